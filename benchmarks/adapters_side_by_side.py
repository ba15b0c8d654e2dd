"""Adapters of Tunebook and of Unsloth on one GPU, one after the other in the same minutes. One JSON line each.

    python benchmarks/adapters_side_by_side.py --output FILE --unsloth SITE [--only NAME ...] [--more WORD ...]
    python benchmarks/adapters_side_by_side.py --output FILE --unsloth SITE --model qwen3_4b --short --steps 16

Random weights, rank 16 on all linear layers, rows of 8,192 tokens with documents of 512, or of 250 on average with
`--short`; 32,768 tokens a step, and 32,256 in the 9 rows of 3,584 that take the least memory. The most important come
first; what does not fit the budget is left out. `--more` has overrides of all runs of Tunebook. Speeds are of real
tokens, the median of the steps after the warm-up; `first_step_s` counts from the start of the command. A table comes
last.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from gpu_queue import require_gpus
from lines import Line, add_line, read_lines, write_lines
from peer_documents import folders_of, last_words, run_peer
from peer_trl import write_weights
from peer_unsloth import MODELS

# Overrides of each run of Tunebook.
_LEAST = ["activation=stored", "activation.memory_budget=0.05", "activation.offload=true",
          "training.max_length=3584", "packing.row_length=3584", "training.global_tokens=32256"]  # fmt: skip
OURS: dict[str, list[str]] = {
    "lora": ["peft=lora", "activation=stored", "activation.memory_budget=0.8"],
    "lora_least": ["peft=lora", *_LEAST],
    "lora_least_8192": ["peft=lora", *_LEAST[:3]],
    "qlora": ["peft=qlora", "activation=stored", "activation.memory_budget=0.8"],
    "qlora_least": ["peft=qlora", *_LEAST],
    "lora_fp8": ["peft=lora", "precision=fp8", "activation=stored", "activation.memory_budget=0.6"],
}
# Names of `OURS`, and modes of `peer_unsloth.py`.
ORDER = ["qlora_least", "unsloth_4bit", "lora_least", "unsloth_checkpointing", "lora", "unsloth_stored", "lora_fp8",
         "qlora", "lora_least_8192"]  # fmt: skip
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
_COLUMNS = ("tokens_per_second_per_gpu", "memory_gib", "memory_reserved_gib", "first_step_s")


def case(name: str, asked: argparse.Namespace) -> Line:
    """A run of Tunebook as `gpu_runs.py` reads it."""
    words = [*_SHARED, *(_SHORT if asked.short else _EQUAL), f"training.max_steps={asked.steps}"]
    if "peft=qlora" in OURS[name]:  # which quantizes weights of a folder
        words += [f"model={asked.models / asked.model}", "model.weights=pretrained"]
    else:
        words += [f"model={asked.model}", "model.weights=random"]
    return {"name": name, "overrides": [*words, *OURS[name], *asked.more], "weights": "random", "unsaved": True,
            "warm_up_steps": asked.warm_up_steps}  # fmt: skip


def run_ours(name: str, timeout_s: float, asked: argparse.Namespace) -> Line:
    """Train by `tunebook train`."""
    folder = asked.logs / name
    folder.mkdir(parents=True, exist_ok=True)
    if "peft=qlora" in OURS[name]:
        write_weights(asked.model, asked.models / asked.model, folder / "weights.txt", folders_of())
    write_lines(folder / "cases.jsonl", [case(name, asked)])
    command = [sys.executable, str(_HERE / "gpu_runs.py"), str(folder / "cases.jsonl"), "--output", str(folder),
               "--runs", str(folder / "runs"), "--timeout-s", str(timeout_s),
               "--deadline-s", str(timeout_s)]  # fmt: skip
    results = folder / "results.jsonl"
    results.unlink(missing_ok=True)
    run_peer(command, folder / "gpu_runs.txt", timeout_s + 30, folders_of())
    line = read_lines(results)[-1] if results.exists() else {"error": last_words(folder / "gpu_runs.txt")}
    terminal = folder / "logs" / name / "terminal.txt"
    if line.get("exit_code") and terminal.exists():
        line["error"] = last_words(terminal)
    return line | {"peer": "tunebook", "model": asked.model}


def run_unsloth(mode: str, timeout_s: float, asked: argparse.Namespace) -> Line:
    """Train by `peer_unsloth.py`."""
    variant = f"{asked.model}_{mode}" + ("_short" if asked.short else "")
    file = asked.logs / "unsloth.jsonl"
    file.unlink(missing_ok=True)
    command = [sys.executable, str(_HERE / "peer_unsloth.py"), "--output", str(file), "--python-path", asked.unsloth,
               "--only", variant, "--steps", str(asked.steps), "--warm-up-steps", str(asked.warm_up_steps),
               "--timeout-s", str(timeout_s), "--models", str(asked.models)]  # fmt: skip
    log = asked.logs / "unsloth.txt"
    run_peer(command, log, timeout_s + 90, folders_of())
    return read_lines(file)[-1] if file.exists() else {"peer": "unsloth", "error": last_words(log)}


def table(lines: list[Line]) -> str:
    """A row for each line."""
    rows = [f"{'':30}{'tokens/s':>10}{'GiB':>10}{'reserved':>10}{'1st step':>10}{'last loss':>10}"]
    for line in lines:
        cells = [line.get(column) for column in _COLUMNS] + (line.get("losses") or [None])[-1:]
        cells = [max(cell) if isinstance(cell, list) else cell for cell in cells]  # of several ranks
        rows.append(f"{line['name']:30}" + "".join(f"{'-' if cell is None else f'{cell:,.2f}':>10}" for cell in cells))
    return "\n".join(rows)


def main(words: list[str] | None = None) -> int:
    """Run one after the other; 1 if one was left out or has no speed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON lines")
    parser.add_argument("--logs", type=Path, default=Path("/tmp/side_by_side"))
    parser.add_argument("--unsloth", metavar="PATH", default="", help="PYTHONPATH of Unsloth")
    parser.add_argument("--only", nargs="*", choices=ORDER, default=ORDER, metavar="NAME", help="some of: %(choices)s")
    parser.add_argument("--more", nargs="*", default=[], metavar="WORD", help="overrides for every run of Tunebook")
    parser.add_argument("--model", choices=("llama31_8b", "qwen3_4b", "qwen25_7b"), default="llama31_8b")
    parser.add_argument("--models", type=Path, default=MODELS, help="where weights are written")
    parser.add_argument("--short", action="store_true", help="documents of 250 tokens on average")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-up-steps", type=int, default=4, help="of those that are not timed")
    parser.add_argument("--timeout-s", type=float, default=120, help="of one run")
    parser.add_argument("--budget-s", type=float, default=510, help="of all runs")
    asked = parser.parse_args(words)
    if not asked.unsloth and not set(asked.only) <= set(OURS):
        parser.error("--unsloth is missing: the folder of its packages")
    require_gpus(1)
    end, lines = time.monotonic() + asked.budget_s, []
    for name in asked.only:
        timeout_s = min(asked.timeout_s, end - time.monotonic())
        if timeout_s < 45:
            print(f"no time is left for {name}")
            continue
        started = time.monotonic()
        if name in OURS:
            line = run_ours(name, timeout_s, asked)
        else:
            line = run_unsloth(name.removeprefix("unsloth_"), timeout_s, asked)
        lines.append(line | {"name": name, "took_s": round(time.monotonic() - started, 1)})
        add_line(lines[-1], asked.output)
    print(table(lines))
    return int(len(lines) < len(asked.only) or any("tokens_per_second_per_gpu" not in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
