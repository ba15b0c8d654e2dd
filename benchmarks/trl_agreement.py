"""Tunebook against TRL's plain SFTTrainer on BoolQ with SmolLM2-135M, on one GPU: one JSON line for each measurement.

    python recipes/smollm2_135m_boolq/make_inputs.py
    python benchmarks/trl_agreement.py OUTPUT [--seeds 42 1 2] [--max-steps N] [--only first_step tunebook trl]

TRL is as it comes but for the recipe's learning rate, schedule, warm-up, clipping, epochs and length: messages as
prompt and completion, padded, 64 questions a step as 2 x 32, nothing checkpointed.

    first_step  the loss of Tunebook's first step in fp32, packed, and that of TRL on the tokens of the same documents
    tunebook    the recipe as it is, for each seed: speed, losses, scores before and after
    trl         TRL's training in bf16, an order of its own for each seed, its model scored by `tunebook eval`

Lines go to OUTPUT/trl_agreement.jsonl, run folders to OUTPUT/runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lines import Line, add_line, read_lines, surroundings
from real_inputs import CHECKOUT, OVERRIDES, describe, run_folders

RECIPE = "smollm2_135m_boolq"
MODEL, DATA = CHECKOUT / "inputs" / "smollm2_135m", CHECKOUT / "inputs" / "boolq"
KINDS = ("first_step", "tunebook", "trl")
_ONE_STEP = [
    "precision=fp32", "precision.tf32=disabled", "model.compile_layers=false", "attention=sdpa",
    "training.max_steps=1", "training.evaluate_every_steps=null", "evaluation.before=false", "evaluation.after=false",
    "evaluation.contamination=disabled",
]  # fmt: skip


def tunebook(words: list[str], log: Path) -> None:
    """Run a command of Tunebook. Raises: SystemExit if it failed."""
    with log.open("w") as file:
        command = [sys.executable, "-m", "tunebook", *words]
        ended = subprocess.run(command, cwd=CHECKOUT, stdout=file, stderr=subprocess.STDOUT)
    if ended.returncode:
        raise SystemExit(f"tunebook {' '.join(words)} failed:\n{log.read_text()[-2000:]}")


def train_by_tunebook(output: Path, name: str, *overrides: str) -> Path:
    """Train the recipe; returns the run folder."""
    outputs = output / "runs" / name
    tunebook(["train", RECIPE, *OVERRIDES[RECIPE], *overrides, f"outputs={outputs}"], output / f"{name}.log")
    return run_folders(outputs)[-1]


def train_by_trl(documents: list[dict[str, Any]], output: Path, **settings: Any) -> Line:
    """Train in this process and save the model in `output`; returns losses, seconds, speed and memory."""
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    defaults = {
        "output_dir": str(output), "max_length": 2048, "num_train_epochs": 2, "per_device_train_batch_size": 32,
        "gradient_accumulation_steps": 2, "learning_rate": 1e-4, "lr_scheduler_type": "cosine", "warmup_steps": 0.05,
        "max_grad_norm": 1.0, "activation_checkpointing": False, "save_strategy": "no", "logging_steps": 1,
        "report_to": [], "disable_tqdm": True, "include_num_input_tokens_seen": "non_padding",
    }  # fmt: skip
    arguments = SFTConfig(**defaults | settings)
    trainer = SFTTrainer(model=str(MODEL), args=arguments, train_dataset=Dataset.from_list(documents))
    started = time.monotonic()
    trainer.train()
    training_s = time.monotonic() - started
    trainer.save_model(str(output))
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return {
        "losses": losses[:: max(1, len(losses) // 30)],
        "steps": trainer.state.global_step,
        "training_s": round(training_s, 1),
        "tokens_per_second": round(trainer.state.num_input_tokens_seen / training_s),
        "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else None,
    }


def first_step(output: Path) -> Line:
    """The loss of the first step in fp32 on the same documents."""
    folder = train_by_tunebook(output, "first_step", *_ONE_STEP)
    documents = first_documents(folder)
    found = train_by_trl(documents, output / "first_step_trl", bf16=False, max_steps=1)
    ours, theirs = read_lines(folder / "metrics.jsonl")[0]["loss"], found["losses"][0]
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


def trl_scores(seed: int, output: Path, max_steps: int) -> Line:
    """Train by TRL with one seed and score the model."""
    records = read_lines(DATA / "train.jsonl")
    model = output / f"trl-{seed}"
    found = train_by_trl([as_messages(one) for one in records], model, seed=seed, max_steps=max_steps)
    # Few at once: the trainer holds its memory until this process ends.
    words = [f"model={model}", f"tasks={DATA / 'boolq.yaml'}", "--batch-size", "16", "--outputs", str(output / "eval")]
    tunebook(["eval", *words], output / f"evaluation-{seed}.log")
    files = sorted(output.glob(f"eval/evaluations/*{model.name}*/evaluation/*.json"))
    records = [record for file in files if "tasks" in (record := json.loads(file.read_text()))]
    (task,) = records[-1]["tasks"].values()
    return found | {key: task[key] for key in ("metric", "value", "stderr", "num_items")}


def as_messages(record: dict[str, Any]) -> dict[str, Any]:
    """A question as the recipe's templates write it."""
    question = f"{record['passage']}\nQuestion: {record['question']}?\nAnswer:"
    answer = {"role": "assistant", "content": "yes" if record["answer"] else "no"}
    return {"prompt": [{"role": "user", "content": question}], "completion": [answer]}


def measure(kind: str, seed: int, asked: argparse.Namespace) -> Line:
    """One measurement in this process."""
    if kind == "first_step":
        return first_step(asked.output)
    if kind == "trl":
        return trl_scores(seed, asked.output, asked.max_steps)
    steps = [f"training.max_steps={asked.max_steps}"] if asked.max_steps > 0 else []
    return describe(train_by_tunebook(asked.output, f"seed-{seed}", f"training.seed={seed}", *steps))


def main(words: list[str] | None = None) -> int:
    """Measure and write the lines; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2])
    parser.add_argument("--max-steps", type=int, default=-1, help="of each training; default: two epochs")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    asked = parser.parse_args(words)
    asked.output = asked.output.resolve()
    asked.output.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    pairs = [(kind, seed) for kind in asked.only for seed in (asked.seeds if kind != "first_step" else [42])]
    if len(pairs) == 1:
        ((kind, seed),) = pairs
        line = {"kind": kind, "seed": seed} | measure(kind, seed, asked) | surroundings()
        add_line(line, asked.output / "trl_agreement.jsonl")
        return 0
    options = [str(asked.output), "--max-steps", str(asked.max_steps)]
    commands = [[sys.executable, __file__, *options, "--only", kind, "--seeds", str(seed)] for kind, seed in pairs]
    codes = [subprocess.run(command).returncode for command in commands]  # each in a process of its own
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
