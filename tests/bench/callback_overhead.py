"""How long Tunebook's own callbacks take in each optimizer step: records, agreeing on stops, looking at the loss.

    python tests/bench/callback_overhead.py [--steps 200] [--output FILE]

Trains the quickstart on a CPU in this process, with a clock around every call of every callback of ours, and tells the
milliseconds of a step and their share of a step of Qwen2.5-3B on one H200 (`h200_speed_one_gpu.jsonl`). What waits for
a GPU there is not in it: asking all ranks for a stop and for their memory ends with a synchronisation each.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunebook.data.prepared import PREPARED_FILE

RESULTS = Path(__file__).parent / "results"
GPU_STEP = ("h200_speed_one_gpu.jsonl", "compiled_16384")
WARM_UP_STEPS = 10
HOOKS = ("on_step_begin", "on_step_end", "on_log")  # of each step; the others are of a save, a validation or the start


def clocked(hook: Callable[..., Any], spent: dict[int, float]) -> Callable[..., Any]:
    """A callback's method that adds its seconds to those of its step."""

    def run(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return hook(self, args, state, control, **kwargs)
        finally:
            spent[state.global_step] += time.perf_counter() - started

    return run


def seconds_by_step(folder: Path) -> tuple[dict[int, float], list[float]]:
    """Train as a run's only rank does: the seconds in our callbacks by optimizer step, and those of the steps."""
    from tunebook.record.start_up import StartClock
    from tunebook.train.callbacks import FiniteLoss, Records, StopOnRequest
    from tunebook.train.rank_process import StopRequest
    from tunebook.train.run import train

    spent: dict[int, float] = defaultdict(float)
    for callback in (FiniteLoss, Records, StopOnRequest):
        for name in HOOKS:
            if name in vars(callback):
                setattr(callback, name, clocked(getattr(callback, name), spent))
    train(folder, StopRequest(), StartClock())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return spent, [line["seconds"] for line in lines if "loss" in line]


def measure(steps: int) -> dict[str, Any]:
    """Make a run by the command, train it once more in this process, and tell the medians of its steps."""
    words = ["quickstart", "hardware=cpu", "evaluation=none", f"training.max_steps={steps}", "schedule.warmup_steps=5",
             "training.save_every_steps=null", "training.evaluate_every_steps=null"]  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        made, again = Path(scratch) / "made", Path(scratch) / "again"
        command = [sys.executable, "-m", "tunebook", "train", *words, "--run-folder", str(made)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        again.mkdir()
        for name in ("run.yaml", PREPARED_FILE):
            shutil.copy(made / name, again)
        spent, seconds = seconds_by_step(again)
    steady = [spent[step] for step in sorted(spent)][WARM_UP_STEPS:]
    file, name = GPU_STEP
    (of_gpu,) = [line for line in map(json.loads, (RESULTS / file).read_text().splitlines()) if line["name"] == name]
    middle = statistics.median(steady)
    return {
        "date": time.strftime("%Y-%m-%d"), "steps": len(steady), "callbacks_ms": round(1000 * middle, 3),
        "callbacks_ms_of_the_slowest_tenth": round(1000 * statistics.quantiles(steady, n=10)[-1], 3),
        "step_ms_here": round(1000 * statistics.median(seconds[WARM_UP_STEPS:]), 1),
        "step_ms_of_one_h200": round(1000 * of_gpu["seconds_per_step"], 1), "compared_with": " ".join(GPU_STEP),
        "share_of_that": round(middle / of_gpu["seconds_per_step"], 5),
    }  # fmt: skip


def main() -> None:
    """Parse the arguments, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path, help="a file to which the line is added")
    arguments = parser.parse_args()
    line = json.dumps(measure(arguments.steps))
    print(line)
    if arguments.output is not None:
        with arguments.output.open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
