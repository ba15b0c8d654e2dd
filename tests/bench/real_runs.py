"""Train the smollm2 recipes on real weights and real data, several times each: one JSON line for each run.

    python recipes/smollm2_135m_boolq/make_inputs.py
    python tests/bench/real_runs.py OUTPUT [--recipes NAME ...] [--seeds 42 42 1 2] [--at-once 1] [--timeout-s 400]
        [OVERRIDE ...]

Weights and data are those in `inputs/` of the checkout. Scores are of the whole validation part (BoolQ) or of all
held-out calls, before and after training. `seconds` is the whole command, `training_s` the optimizer steps. A seed that
stands twice is trained twice: evidence needs equal runs. Run folders without weights are kept in OUTPUT/runs.tar.gz.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any, TextIO

CHECKOUT = Path(__file__).resolve().parents[2]
MODEL = ["model.name=null", "model.path=book:inputs/smollm2_135m"]
_BOOLQ = [*MODEL, "dataset.name=book:inputs/boolq", "evaluation.tasks=[book:inputs/boolq/boolq.yaml]"]
_TOOLS = [
    *[*MODEL, "dataset=jsonl", "dataset.path=book:inputs/tool_calls/train.jsonl"],
    *["evaluation.tasks=[book:inputs/tool_calls/calls.yaml]", "evaluation.before=true"],
]
LOCAL = {"smollm2_135m_boolq": _BOOLQ, "smollm2_135m_lora": _BOOLQ, "smollm2_135m_tools": _TOOLS}
HEAVY = {".safetensors", ".bin", ".pt", ".distcp"}


def run(recipe: str, seed: int, number: int, asked: argparse.Namespace) -> dict[str, Any]:
    """Train once; returns the line of results, with an `error` if it failed."""
    outputs = asked.output / "runs" / f"{recipe}-{number}-seed-{seed}"
    outputs.mkdir(parents=True)
    overrides = [*LOCAL[recipe], f"training.seed={seed}", *asked.overrides]
    words = [recipe, *overrides, f"outputs={outputs}"]
    line: dict[str, Any] = {"name": outputs.name, "recipe": recipe, "overrides": overrides, "gpus": 1}
    line |= {"seed": seed, "at_once": asked.at_once, "date": date.today().isoformat()}
    started = time.monotonic()
    with (outputs / "log.txt").open("w") as log:
        command = [sys.executable, "-m", "tunebook", "train", *words]
        try:
            code = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, timeout=asked.timeout_s, cwd=CHECKOUT
            ).returncode
        except subprocess.TimeoutExpired:
            return line | {"error": f"cut after {asked.timeout_s} s"}
    line["seconds"] = round(time.monotonic() - started, 1)
    if code:
        return line | {"error": f"exit code {code}: {(outputs / 'log.txt').read_text()[-1500:]}"}
    (manifest,) = [file for file in outputs.glob("*/*/manifest.json") if not file.parent.is_symlink()]
    return line | describe(manifest.parent)


def describe(folder: Path) -> dict[str, Any]:
    """The numbers of a run folder."""
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    start_up = json.loads((folder / "manifest.json").read_text())["start_up"]
    speeds = sorted(line["tokens_per_second_per_gpu"] for line in steps[len(steps) // 5 :])
    found: dict[str, Any] = {
        "run": folder.name,
        "steps": steps[-1]["step"],
        "training_s": round(sum(line["seconds"] for line in steps), 1),
        "first_step_s": start_up["first_step_s"],
        "start_up": {process: start_up[process] for process in ("launcher", "rank")},
        "tokens_per_second": speeds[len(speeds) // 2],
        "memory_gib": max(steps[-1]["memory_gib"]),
        "losses": [round(line["loss"], 4) for line in steps[:: max(1, len(steps) // 30)]],
        "validation_losses": {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line},
    }
    for when in ("before", "after"):
        file = folder / "evaluation" / f"{when}.json"
        if file.is_file():
            tasks = json.loads(file.read_text())["tasks"]
            kept = ("metric", "value", "stderr", "num_items", "contamination")
            found[when] = {name: {key: task[key] for key in kept if key in task} for name, task in tasks.items()}
    return found


def write_line(line: dict[str, Any], file: TextIO) -> None:
    """Print a line with the packages' versions, and append it to a file."""
    from gpu_queue import machine_versions  # imports tunebook, which a host that only runs containers lacks

    text = json.dumps(line | machine_versions())
    print(text, flush=True)
    file.write(text + "\n")
    file.flush()


def keep(output: Path) -> None:
    """Pack the run folders without weights."""
    with tarfile.open(output / "runs.tar.gz", "w:gz") as archive:
        for file in sorted((output / "runs").rglob("*")):
            if file.is_file() and file.suffix not in HEAVY and not any(part == "latest" for part in file.parts):
                archive.add(file, file.relative_to(output))


def parse(words: list[str] | None) -> argparse.Namespace:
    """The arguments. Exits with 2 for wrong ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--recipes", nargs="+", choices=list(LOCAL), default=list(LOCAL))
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 42, 1, 2])
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=400)
    return parser.parse_intermixed_args(words)


def main(words: list[str] | None = None) -> int:
    """Run everything; 1 if a run failed."""
    asked = parse(words)
    asked.output = asked.output.resolve()
    asked.output.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    jobs = [(recipe, seed, number) for recipe in asked.recipes for number, seed in enumerate(asked.seeds)]
    has_failed = False
    with ThreadPoolExecutor(asked.at_once) as pool, (asked.output / "real_runs.jsonl").open("a") as file:
        for line in pool.map(lambda job: run(*job, asked), jobs):
            write_line(line, file)
            has_failed |= "error" in line
    keep(asked.output)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
