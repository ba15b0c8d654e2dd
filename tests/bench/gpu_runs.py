"""Run `tunebook train` in several configurations on a GPU machine and print one JSON line for each.

    python tests/bench/gpu_runs.py --output DIR [--only NAME ...] [--timeout-s 240] [--steps 20]

Random weights of the real architecture on generated documents: right for speed, memory and whether the loss falls, and
said so in each line. The small files of every run folder are kept under DIR.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_queue import require_gpus

WARM_UP_STEPS = 5
KEPT = ("run.yaml", "plan.json", "manifest.json", "metrics.jsonl", "report.html", "log.txt", "outcome-0.json")
RANDOM = ["model.weights=random", "dataset=synthetic"]

CONFIGURATIONS: dict[str, list[str]] = {
    "auto": [],
    "sdpa": ["attention=sdpa"],
    "flash_attention_4": ["attention=flash_attention_4"],
    "flash_attention_4_micro_4": ["attention=flash_attention_4", "training.micro_batch_size=4"],
    "sdpa_rows_4096": ["attention=sdpa", "packing.row_length=4096"],
    "flash_attention_4_rows_8192": ["attention=flash_attention_4", "packing.row_length=8192"],
    "padded": ["attention=sdpa", "packing=padded"],
    "fp32_as_volta": ["attention=sdpa", "precision=fp32", "precision.tf32=disabled"],
    "checkpointing": ["attention=sdpa", "activation=checkpointing"],
    "lora": ["attention=sdpa", "peft=lora"],
    "single": ["attention=sdpa", "hardware.gpus_per_node=1"],
    "ddp": ["attention=sdpa", "parallelism=ddp"],
    "zero2": ["attention=sdpa", "parallelism=zero2"],
    "zero3": ["attention=sdpa", "parallelism=zero3"],
    "zero2_offload": ["attention=sdpa", "parallelism=zero2_offload"],
    "zero2_lora": ["attention=sdpa", "parallelism=zero2", "peft=lora", "optimizer.learning_rate=2e-4"],
    "fsdp_lora": ["attention=sdpa", "parallelism=fsdp", "peft=lora", "optimizer.learning_rate=2e-4"],
    "hsdp": ["attention=sdpa", "parallelism=hsdp"],
    "fsdp": ["attention=sdpa", "parallelism=fsdp"],
    "adamw": ["optimizer=adamw"],
    "adafactor": ["optimizer=adafactor"],
    "muon": ["optimizer=muon"],
    "muon_lora": ["optimizer=muon", "peft=lora", "optimizer.learning_rate=2e-4"],
    "adamw_fsdp": ["optimizer=adamw", "parallelism=fsdp"],
    "muon_fsdp": ["optimizer=muon", "parallelism=fsdp"],
    "muon_fsdp_grad_op": ["optimizer=muon", "parallelism=fsdp_grad_op"],
    "muon_ddp": ["optimizer=muon", "parallelism=ddp"],
}


def main() -> None:
    """Parse the arguments and run the configurations one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--recipe", default="qwen05b_single")
    parser.add_argument("--only", nargs="*", choices=CONFIGURATIONS, default=list(CONFIGURATIONS))
    parser.add_argument("--timeout-s", type=float, default=240)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--more", nargs="*", default=[], help="overrides for every configuration")
    arguments = parser.parse_args()
    require_gpus(1)
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        overrides = [*RANDOM, f"training.max_steps={arguments.steps}", *CONFIGURATIONS[name], *arguments.more]
        line = run(name, arguments.recipe, overrides, arguments.output, arguments.timeout_s)
        print(json.dumps(line), flush=True)
        with (arguments.output / "results.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def run(name: str, recipe: str, overrides: list[str], output: Path, timeout_s: float) -> dict[str, Any]:
    """One run in a process of its own; returns what it measured, or how it failed."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        command = [sys.executable, "-m", "tunebook", "train", recipe, *overrides, "--run-folder", str(folder)]
        started = time.monotonic()
        kept = output / name
        kept.mkdir(parents=True, exist_ok=True)
        with (kept / "terminal.txt").open("w") as terminal:
            code = _wait(command, terminal, timeout_s)
        for file in KEPT:
            if (folder / file).exists():
                shutil.copy(folder / file, kept / file)
        line = {"name": name, "recipe": recipe, "overrides": overrides, "weights": "random", "data": "generated"}
        return line | {"exit_code": code, "wall_s": round(time.monotonic() - started, 1)} | _measured(kept)


def _wait(command: list[str], terminal: Any, timeout_s: float) -> int | str:
    """The exit code. A run that takes too long ends with all its ranks, which would keep the GPU's memory."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        command, stdout=terminal, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    ) as process:
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return "timeout"


def _measured(folder: Path) -> dict[str, Any]:
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if not lines:
        return {}
    timed = lines[WARM_UP_STEPS:] or lines
    return {
        "steps": lines[-1]["step"],
        "losses": [round(line["loss"], 5) for line in lines],
        "grad_norms": [round(line["grad_norm"], 5) for line in lines],
        "tokens_per_second_per_gpu": statistics.median(line["tokens_per_second_per_gpu"] for line in timed),
        "mfu": statistics.median(line["mfu"] or 0 for line in timed),
        "peak_tflops": lines[-1]["peak_tflops"],
        "padding_share": lines[-1]["padding_share"],
        "memory_gib": lines[-1]["memory_gib"],
    }


if __name__ == "__main__":
    main()
