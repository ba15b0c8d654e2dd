"""Tunebook against TRL's plain SFTTrainer on BoolQ with SmolLM2-135M, on one GPU: one JSON line for each measurement.

    python tests/bench/trl_agreement.py OUTPUT [--seeds 42 1 2] [--max-steps N] [--only first_step scores]

Weights and data are those in `inputs/` of the checkout (make_inputs.py). TRL is as it comes but for the recipe's
learning rate, schedule, warm-up, clipping, epochs and length: messages as prompt and completion, padded, 64 questions a
step as 2 x 32, nothing checkpointed.

    first_step  the loss of Tunebook's first step in fp32, packed, and that of TRL on the tokens of the same documents
    scores      TRL's training in bf16, an order of its own for each seed, its model scored by `tunebook eval`. The
                other side are the lines of real_runs.py. Tokens a second are real ones of the whole training
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from real_runs import CHECKOUT, LOCAL, write_line

RECIPE = "smollm2_135m_boolq"
MODEL, DATA = CHECKOUT / "inputs" / "smollm2_135m", CHECKOUT / "inputs" / "boolq"
_FP32 = ["precision=fp32", "precision.tf32=disabled", "model.compile_layers=false", "attention=sdpa"]
_ONE_STEP = [
    *(
        "training.max_steps=1",
        "training.evaluate_every_steps=null",
        "evaluation.before=false",
        "evaluation.after=false",
    ),
    "evaluation.contamination=disabled",
]


def tunebook(words: list[str], log: Path) -> None:
    """Run a command of Tunebook. Raises: SystemExit if it failed."""
    with log.open("w") as file:
        command = [sys.executable, "-m", "tunebook", *words]
        ended = subprocess.run(command, cwd=CHECKOUT, stdout=file, stderr=subprocess.STDOUT)
    if ended.returncode:
        raise SystemExit(f"tunebook {' '.join(words)} failed:\n{log.read_text()[-2000:]}")


def train_by_trl(documents: list[dict[str, Any]], output: Path, **settings: Any) -> dict[str, Any]:
    """Train in this process and save the model; returns losses, seconds, speed and memory."""
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    defaults = {
        "output_dir": str(output), "max_length": 2048, "num_train_epochs": 2, "per_device_train_batch_size": 32,
        "gradient_accumulation_steps": 2, "learning_rate": 1e-4, "lr_scheduler_type": "cosine", "warmup_steps": 0.05,
        "max_grad_norm": 1.0, "activation_checkpointing": False, "save_strategy": "no", "logging_steps": 1,
        "report_to": [], "disable_tqdm": True, "include_num_input_tokens_seen": "non_padding",
    }  # fmt: skip
    is_on_gpu = torch.cuda.is_available()
    started = time.monotonic()
    arguments = SFTConfig(**defaults | settings)
    trainer = SFTTrainer(model=str(MODEL), args=arguments, train_dataset=Dataset.from_list(documents))
    constructed = time.monotonic()
    trainer.train()
    training_s = time.monotonic() - constructed
    trainer.save_model(str(output / output.name))
    logged = [line for line in trainer.state.log_history if "loss" in line]
    return {
        "losses": [line["loss"] for line in logged][:: max(1, len(logged) // 30)],
        "steps": trainer.state.global_step,
        "construction_s": round(constructed - started, 1),
        "training_s": round(training_s, 1),
        "tokens_per_second": round(trainer.state.num_input_tokens_seen / training_s),
        "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if is_on_gpu else None,
    }


def first_step(output: Path) -> dict[str, Any]:
    """The loss of the first step in fp32 on the same documents."""
    outputs = output / "first_step"
    tunebook(["train", RECIPE, *LOCAL[RECIPE], *_FP32, *_ONE_STEP, f"outputs={outputs}"], output / "first_step.log")
    (metrics,) = [file for file in outputs.glob("*/*/metrics.jsonl") if not file.parent.is_symlink()]
    line = json.loads(metrics.read_text().splitlines()[0])
    documents = first_documents(metrics.parent)
    found = train_by_trl(documents, output / "first_step_trl", bf16=False, max_steps=1)
    ours, theirs = line["loss"], found["losses"][0]
    return {"ours": ours, "theirs": theirs, "difference": abs(ours - theirs), "documents": len(documents)}


def first_documents(folder: Path) -> list[dict[str, Any]]:
    """Tokens and labels of the documents of a run's first step."""
    from tunebook.config.frozen import load_config
    from tunebook.data.batch import schedule_of, solve_batch
    from tunebook.data.prepared import load_prepared

    config = load_config(folder / "run.yaml")
    part = load_prepared(Path(json.loads((folder / "prepared.json").read_text())["folder"])).train
    lengths = part.load_lengths().astype("int64")
    numbers = schedule_of(config, solve_batch(config, lengths), lengths).steps_of_epoch(0)[0]
    rows = part.load()
    return [{key: list(rows[int(number)][key]) for key in ("input_ids", "labels")} for number in numbers]


def scores(seed: int, output: Path, max_steps: int) -> dict[str, Any]:
    """Train by TRL with one seed and score the model."""
    records = [json.loads(line) for line in (DATA / "train.jsonl").read_text().splitlines()]
    found = train_by_trl([as_messages(one) for one in records], output / f"trl-{seed}", seed=seed, max_steps=max_steps)
    name = f"trl-{seed}"
    # Few at once: the trainer holds its memory until this process ends.
    words = [f"model={output / name / name}", f"tasks={DATA / 'boolq.yaml'}", "--batch-size", "16"]
    tunebook(["eval", *words], output / f"evaluation-{seed}.log")
    files = (CHECKOUT / "outputs" / "evaluations").glob(f"*{name}*/evaluation/*.json")
    file = max(
        (file for file in files if "tasks" in json.loads(file.read_text())), key=lambda file: file.stat().st_mtime
    )
    (task,) = json.loads(file.read_text())["tasks"].values()
    return found | {key: task[key] for key in ("metric", "value", "stderr", "num_items")}


def as_messages(record: dict[str, Any]) -> dict[str, Any]:
    """A question as the recipe's templates write it."""
    question = f"{record['passage']}\nQuestion: {record['question']}?\nAnswer:"
    answer = {"role": "assistant", "content": "yes" if record["answer"] else "no"}
    return {"prompt": [{"role": "user", "content": question}], "completion": [answer]}


def measure(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The lines of results. Each training by TRL is a process of its own."""
    for kind, seed in [("first_step", 42), *(("scores", seed) for seed in asked.seeds)]:
        if kind in asked.only:
            words = [sys.executable, __file__, str(asked.output), "--max-steps", str(asked.max_steps), "--one", kind]
            ended = subprocess.run([*words, "--seeds", str(seed)], stdout=subprocess.PIPE, text=True)
            line = {"kind": kind, "seed": seed}
            if ended.returncode:
                yield line | {"error": f"exit code {ended.returncode}; the log is above"}
            else:
                yield line | json.loads(ended.stdout.splitlines()[-1])


def main(words: list[str] | None = None) -> int:
    """Measure and write the lines; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2])
    parser.add_argument("--max-steps", type=int, default=-1, help="of TRL's trainings; default: two epochs")
    parser.add_argument("--only", nargs="+", choices=["first_step", "scores"], default=["first_step", "scores"])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args(words)
    asked.output = asked.output.resolve()
    asked.output.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if asked.one:
        is_first = asked.one == "first_step"
        found = first_step(asked.output) if is_first else scores(asked.seeds[0], asked.output, asked.max_steps)
        print(json.dumps(found))
        return 0
    lines = []
    with (asked.output / "trl_agreement.jsonl").open("a") as file:
        for line in measure(asked):
            lines.append(line)
            write_line(line, file)
    return int(any("error" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
