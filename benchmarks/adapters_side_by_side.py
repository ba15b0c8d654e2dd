"""Adapters of Tunebook and of its peers on one GPU: all get ready together, then each is timed alone. JSON lines.

    python benchmarks/adapters_side_by_side.py --output FILE --unsloth SITE [--only NAME ...] [--more WORD ...]
    python benchmarks/adapters_side_by_side.py --output FILE --unsloth SITE --model qwen3_4b --short --steps 16
    python benchmarks/adapters_side_by_side.py --output FILE --automodel SITE --only lora_4096 automodel --steps 8

Random weights, rank 16 on all linear layers, rows of 8,192 tokens with documents of 512, or of 250 on average with
`--short`; 32,768 tokens a step, and 32,256 in the 9 rows of 3,584 that take the least memory. `lora_4096` is what
AutoModel publishes, `dpo` takes 16 pairs of 512 tokens a side. `--more` has overrides of all runs of Tunebook. Speeds
are of real tokens, the median of the steps after the warm-up. A table comes last.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import gpu_runs
from gpu_queue import GpuQueue, Job, require_gpus
from lines import Line, add_line, read_lines, write_lines
from peer_documents import folders_of, last_words
from peer_trl import write_weights
from peer_unsloth import MODELS

# Overrides of each run of Tunebook.
_LEAST = ["activation=stored", "activation.memory_budget=0.2", "activation.offload=true",
          "training.max_length=3584", "packing.row_length=3584", "training.global_tokens=32256"]  # fmt: skip
_PAIRS = ["method=dpo", "dataset.synthetic.pairs=true", "dataset.synthetic.num_documents=800",
          "dataset.train_on=auto", "training.max_length=1024", "training.global_tokens=null",
          "training.global_samples=16"]  # fmt: skip
OURS: dict[str, list[str]] = {
    "lora": ["peft=lora", "activation=stored", "activation.memory_budget=0.8"],
    "lora_least": ["peft=lora", *_LEAST],
    "lora_least_8192": ["peft=lora", *_LEAST[:3]],
    "qlora": ["peft=qlora", "activation=stored", "activation.memory_budget=0.8"],
    "qlora_least": ["peft=qlora", *_LEAST],
    "lora_fp8": ["peft=lora", "precision=fp8", "activation=stored", "activation.memory_budget=0.6"],
    "lora_4096": ["peft=lora", "peft.dropout=0.1", "training.max_length=4096", "training.global_tokens=131072",
                  "dataset.synthetic.min_tokens=4096", "dataset.synthetic.max_tokens=4096"],
    "dpo": ["peft=lora", *_PAIRS],
    "dpo_compiled": ["peft=lora", *_PAIRS, "model.compile_layers=true", "activation=stored",
                     "activation.memory_budget=0.8"],
}  # fmt: skip
# Scripts of peers, their variants for a model, and the GiB that they take at the most.
PEERS: dict[str, tuple[str, str, float]] = {
    "unsloth_stored": ("peer_unsloth.py", "{model}_stored{short}", 52),
    "unsloth_checkpointing": ("peer_unsloth.py", "{model}_checkpointing{short}", 24),
    "unsloth_4bit": ("peer_unsloth.py", "{model}_4bit{short}", 14),
    "unsloth_dpo": ("peer_unsloth.py", "{model}_dpo", 30),
    "trl_dpo": ("peer_trl.py", "dpo_8b_lora", 30),
    "automodel": ("peer_automodel.py", "{model}", 80),
}
ORDER = ["qlora_least", "unsloth_4bit", "lora_least", "unsloth_checkpointing", "lora", "unsloth_stored", "lora_fp8"]
_SHARED = [
    "hardware=hopper", "hardware.gpus_per_node=1", "launcher=local", "evaluation=none",
    "parallelism=single", "training.save_every_steps=null", "training.evaluate_every_steps=null",
    "training.log_every_steps=1", "training.global_samples=null", "training.global_tokens=32768",
    "training.max_length=8192", "packing.row_length=8192", "optimizer.learning_rate=3e-5", "schedule.warmup_steps=3",
    "peft.rank=16", "peft.alpha=32", "peft.dropout=0", "dataset=synthetic", "dataset.train_on=everything",
    "dataset.validation_share=0", "dataset.synthetic.num_documents=4000",
]  # fmt: skip
_EQUAL = ["dataset.synthetic.min_tokens=512", "dataset.synthetic.max_tokens=512"]
_SHORT = ["dataset.synthetic.log_mean_tokens=5.34", "dataset.synthetic.log_sigma_tokens=0.6",
          "dataset.synthetic.max_tokens=2048"]  # fmt: skip
_HERE = Path(__file__).parent
_TO_WRITE_S = 20.0  # a peer's script ends before the queue does
_COLUMNS = ("tokens_per_second_per_gpu", "memory_gib", "memory_reserved_gib")


def case(name: str, asked: argparse.Namespace) -> Line:
    """A run of Tunebook as `gpu_runs.py` reads it."""
    words = [*_SHARED, *(_SHORT if asked.short else _EQUAL), f"training.max_steps={asked.steps}"]
    if "peft=qlora" in OURS[name]:  # which quantizes weights of a folder
        words += [f"model={asked.models / asked.model}", "model.weights=pretrained"]
    else:
        words += [f"model={asked.model}", "model.weights=random"]
    return {"name": name, "overrides": [*words, *OURS[name], *asked.more], "weights": "random", "unsaved": True,
            "warm_up_steps": asked.warm_up_steps}  # fmt: skip


def jobs_of_ours(names: list[str], asked: argparse.Namespace) -> tuple[list[Job], list[Line]]:
    """Runs of Tunebook, and a line for each that the rules refuse."""
    cases, file = [case(name, asked) for name in names], asked.logs / "cases.jsonl"
    write_lines(file, cases)
    words = [str(file), "--output", str(asked.logs), "--timeout-s", str(asked.budget_s)]
    runs = gpu_runs.run_parser().parse_args([*words, "--runs", str(asked.logs / "runs")])
    return gpu_runs.jobs_of(cases, runs)


def job_of_peer(name: str, timeout_s: float, asked: argparse.Namespace) -> Job:
    """A peer's script, whose line goes to a file of its own."""
    script, variant, gib = PEERS[name]
    written = asked.logs / name / "line.jsonl"
    written.unlink(missing_ok=True)  # of an earlier run
    site = asked.automodel if name == "automodel" else asked.unsloth if script == "peer_unsloth.py" else None
    words = ["--output", str(written), "--steps", str(asked.steps), "--timeout-s", str(timeout_s),
             "--warm-up-steps", str(asked.warm_up_steps)]  # fmt: skip
    words += ["--python-path", site, "--models", str(asked.models)] if site else []
    only = variant.format(model=asked.model, short="_short" if asked.short else "")
    return Job(
        name=name, gpus=(0,), line={}, gpu_gib=gib, timeout_s=asked.budget_s, warm_up_steps=asked.warm_up_steps,
        command=[sys.executable, str(_HERE / script), *words, "--only", only],
    )  # fmt: skip


def line_of_peer(name: str, asked: argparse.Namespace) -> Line:
    """What a peer's script wrote."""
    written = asked.logs / name / "line.jsonl"
    if not written.exists():
        return {"error": last_words(asked.logs / "logs" / name / "terminal.txt")}
    line = read_lines(written)[-1]
    return {key: value for key, value in line.items() if key != "first_step_s"}  # it waited for the others


def table(lines: list[Line]) -> str:
    """A row for each line."""
    rows = [f"{'':30}{'tokens/s':>10}{'GiB':>10}{'reserved':>10}{'last loss':>10}"]
    for line in lines:
        cells = [line.get(column) for column in _COLUMNS] + (line.get("losses") or [None])[-1:]
        cells = [max(cell) if isinstance(cell, list) else cell for cell in cells]  # of several ranks
        rows.append(f"{line['name']:30}" + "".join(f"{'-' if cell is None else f'{cell:,.2f}':>10}" for cell in cells))
    return "\n".join(rows)


def main(words: list[str] | None = None) -> int:
    """Run them; 1 if one has no speed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON lines")
    parser.add_argument("--logs", type=Path, default=Path("/tmp/side_by_side"))
    parser.add_argument("--unsloth", metavar="PATH", default="", help="PYTHONPATH of Unsloth")
    parser.add_argument("--automodel", metavar="PATH", default="", help="PYTHONPATH of AutoModel")
    parser.add_argument("--only", nargs="*", choices=[*OURS, *PEERS], default=ORDER, metavar="NAME",
                        help="some of: %(choices)s")  # fmt: skip
    parser.add_argument("--more", nargs="*", default=[], metavar="WORD", help="overrides for every run of Tunebook")
    parser.add_argument("--model", choices=("llama31_8b", "qwen3_4b", "qwen25_7b"), default="llama31_8b")
    parser.add_argument("--models", type=Path, default=MODELS, help="where weights are written")
    parser.add_argument("--short", action="store_true", help="documents of 250 tokens on average")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--warm-up-steps", type=int, default=6, help="of those that are not timed")
    parser.add_argument("--budget-s", type=float, default=510, help="of all runs")
    asked = parser.parse_args(words)
    for peer in ("unsloth", "automodel"):
        if not getattr(asked, peer) and any(name.startswith(peer) for name in asked.only):
            parser.error(f"--{peer} is missing: the folder of its packages")
    require_gpus(1)
    end = time.monotonic() + asked.budget_s
    asked.logs.mkdir(parents=True, exist_ok=True)
    if any(name.startswith(("qlora", "unsloth", "automodel")) for name in asked.only):
        site = asked.unsloth if any(name.startswith("unsloth") for name in asked.only) else None
        write_weights(asked.model, asked.models / asked.model, asked.logs / "weights.txt", folders_of(site))
    ours, refused = jobs_of_ours([name for name in asked.only if name in OURS], asked)
    left_s = end - time.monotonic()
    peers = [job_of_peer(name, left_s - _TO_WRITE_S, asked) for name in asked.only if name in PEERS]
    jobs = sorted([*ours, *peers], key=lambda job: asked.only.index(job.name))
    lines = GpuQueue(
        jobs, asked.logs, runs=asked.logs / "runs", deadline_s=left_s, max_ranks=len(jobs), max_gpu_gib=134,
        max_host_gib=1000,
    ).run()  # fmt: skip
    lines = [
        line | (line_of_peer(line["name"], asked) | {"name": line["name"]} if line["name"] in PEERS else
                {"peer": "tunebook", "model": asked.model})
        for line in lines
    ] + refused  # fmt: skip
    for line in lines:
        add_line(line, asked.output)
    print(table(lines))
    return int(len(lines) < len(jobs) or any("tokens_per_second_per_gpu" not in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
