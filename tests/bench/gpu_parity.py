"""The same loss on every strategy: run one recipe in many configurations on a GPU machine, one JSON line for each.

    python tests/bench/gpu_parity.py --output DIR --series fp32 [--together 4] [--only NAME ...] [--timeout-s 120]

Each series names a recipe, settings that all its runs share, and a reference on one GPU; runs that share the GPUs
(`--together`) are good for losses, not for speed. Random weights, and said so in each line. `tunebook parity` does the
same for one recipe, one run after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

from tunebook.parity.compare import compare_losses

KEPT = ("manifest.json", "metrics.jsonl", "deepspeed.json", "terminal.txt", "outcome-0.json")
SHARDED = ("zero1", "zero2", "zero3", "fsdp", "fsdp_grad_op")

Runs = dict[str, tuple[int, list[str]]]  # name -> GPUs, overrides; the first is the reference


def _strategies(gpus: int, *more: str) -> Runs:
    """Every strategy on some GPUs."""
    by_size = ["parallelism=fsdp", "parallelism.wrap_policy=size", "parallelism.wrap_min_num_parameters=100000"]
    runs: Runs = {"single": (1, ["parallelism=single"]), "ddp_2": (2, ["parallelism=ddp"])}
    runs |= {name: (gpus, [f"parallelism={name}"]) for name in ("ddp", *SHARDED)}
    runs |= {name: (gpus, [f"parallelism={name}"]) for name in ("zero2_offload", "zero3_offload", "fsdp_offload")}
    runs["zero3_nvme"] = (gpus, ["parallelism=zero3_nvme", "parallelism.nvme_path=/tmp/nvme"])
    runs["hsdp"] = (gpus, ["parallelism=hsdp", "parallelism.shard_group_size=2"])
    runs["fsdp_by_size"] = (gpus, by_size)
    runs |= {f"{name}_alone": (1, [f"parallelism={name}"]) for name in ("zero3_offload", "fsdp_offload")}
    return {name: (count, [*overrides, *more]) for name, (count, overrides) in runs.items()}


def _casting(gpus: int) -> Runs:
    """The strategies whose library may cast the whole model to bf16, both ways."""
    runs: Runs = {}
    for name in ("zero1", "zero2", "zero3", "zero2_offload", "fsdp", "hsdp"):
        group = ["parallelism.shard_group_size=2"] if name == "hsdp" else []
        runs[f"{name}_cast"] = (gpus, [f"parallelism={name}", *group, "parallelism.mixed_precision=cast"])
    return runs


_GENERATED = ["model.weights=random", "dataset=synthetic", "dataset.synthetic.num_documents=4000", "attention=sdpa"]
QUICKSTART = [
    "quickstart",
    "evaluation=none",
    "attention=sdpa",
    "training.global_samples=32",
    "schedule.warmup_steps=2",
]
QWEN_05B = ["qwen05b_single", *_GENERATED, "training.global_samples=32", "packing.row_length=2048"]
QWEN_3B_SLICE = [
    *["qwen3b_zero2", *_GENERATED, "training.global_samples=64", "packing.row_length=4096", "activation=stored"],
    *["model.liger_kernel=false", "model.facts.num_layers=12", "model.facts.num_parameters=1236000000"],
]


def series(name: str, gpus: int) -> tuple[list[str], Runs]:
    """The words that all runs of a series share, and its runs."""
    if name == "fp32":
        return [*QUICKSTART, "precision=fp32", "precision.tf32=disabled"], _strategies(gpus)
    if name == "bf16":
        fp32: Runs = {"fp32": (1, ["parallelism=single", "precision=fp32"])}  # on tf32: 10 bits of mantissa, bf16 has 7
        return [*QWEN_05B], _strategies(gpus) | _casting(gpus) | fp32
    if name == "lora":
        runs: Runs = {key: (gpus, [f"parallelism={key}"]) for key in ("ddp", "zero2", "zero3", "fsdp", "fsdp_offload")}
        return [*QUICKSTART, "peft=lora", "optimizer.learning_rate=1e-2", "precision=bf16"], runs
    runs = {}
    for strategy in ("zero2", "fsdp", "zero3"):
        runs[strategy] = (gpus, [f"parallelism={strategy}"])
        runs[f"{strategy}_cast"] = (gpus, [f"parallelism={strategy}", "parallelism.mixed_precision=cast"])
    return [*QWEN_3B_SLICE], runs


def main() -> None:
    """Run a series and print a line for each run as it ends, with its difference from the reference at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--series", choices=("fp32", "bf16", "lora", "speed"), required=True)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--together", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=120)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--more", nargs="*", default=[], help="overrides for every run")
    arguments = parser.parse_args()
    shared, runs = series(arguments.series, arguments.gpus)
    shared = [*shared, f"training.max_steps={arguments.steps}", "training.save_every_steps=null", *arguments.more]
    chosen = {name: run for name, run in runs.items() if not arguments.only or name in arguments.only}
    Path("/tmp/nvme").mkdir(exist_ok=True)
    _prepare(shared, arguments.output)
    offset = count()
    with ThreadPoolExecutor(arguments.together) as pool:
        futures = {
            name: pool.submit(_run, name, gpus, [*shared, *overrides], arguments, next(offset))
            for name, (gpus, overrides) in chosen.items()
        }
        lines = [future.result() for future in futures.values()]
    _write(lines, arguments.output / f"{arguments.series}.jsonl")


def _prepare(shared: list[str], output: Path) -> None:
    """Once, or the runs would wait for each other."""
    words = [sys.executable, "-m", "tunebook", "data", *shared, "hardware.gpus_per_node=1", "parallelism=single",
             "--samples", "0"]  # fmt: skip
    output.mkdir(parents=True, exist_ok=True)
    with (output / "data.txt").open("w") as terminal:
        subprocess.run(words, stdout=terminal, stderr=subprocess.STDOUT, timeout=200, check=False)


def _run(name: str, gpus: int, words: list[str], arguments: argparse.Namespace, turn: int) -> dict[str, Any]:
    folder = arguments.output / arguments.series / name
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "tunebook", "train", *words, f"hardware.gpus_per_node={gpus}"]
    visible = ",".join(str((turn + number) % arguments.gpus) for number in range(gpus))
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": visible}
    if arguments.together > 1:
        environment["OMP_NUM_THREADS"] = "4"
    started = time.monotonic()
    run_folder = Path("/tmp/runs") / arguments.series / name
    with (folder / "terminal.txt").open("w") as terminal:
        process = subprocess.Popen(
            [*command, "--run-folder", str(run_folder)], stdout=terminal, stderr=subprocess.STDOUT, env=environment
        )
        try:
            code: int | str = process.wait(arguments.timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            code = "timeout"
    for file in KEPT:
        if (run_folder / file).exists():
            (folder / file).write_bytes((run_folder / file).read_bytes())
    subprocess.run(["rm", "-rf", str(run_folder / "model")], check=False)
    line = {"series": arguments.series, "name": name, "gpus": gpus, "exit_code": code}
    line |= {"wall_s": round(time.monotonic() - started, 1), **_measured(folder)}
    print(json.dumps({key: value for key, value in line.items() if key != "losses"}), flush=True)
    return line


def _measured(folder: Path) -> dict[str, Any]:
    manifest, metrics = folder / "manifest.json", folder / "metrics.jsonl"
    found: dict[str, Any] = {}
    if manifest.exists():
        content = json.loads(manifest.read_text())
        found = {"reason": content["status"]["reason"], "found": content.get("parallelism_found")}
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    if lines:
        speeds = sorted(line["tokens_per_second_per_gpu"] for line in lines[len(lines) // 4 :])
        found |= {
            "losses": [line["loss"] for line in lines],
            "first_loss": lines[0]["loss"],
            "last_loss": lines[-1]["loss"],
            "tokens_per_second_per_gpu": speeds[len(speeds) // 2],
            "memory_gib": lines[-1]["memory_gib"],
        }
    return found


def _write(lines: list[dict[str, Any]], file: Path) -> None:
    reference = lines[0].get("losses", [])
    for line in lines:
        difference = compare_losses(line.get("losses", []), reference)
        line["largest_difference"], line["at_step"] = difference.largest, difference.at_step
        print(f"{line['name']:24} {line['exit_code']!s:8} {difference.largest:.2e} at {difference.at_step}", flush=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
