"""Resume a checkpoint with another number of CPU ranks: how far are the losses from those of the first run?

    python tests/bench/checkpoint_ranks.py --output FILE [--only CASE ...]

Ten steps of a tiny model, saved after four. The rest is trained from that checkpoint with one rank instead of two, and
with two instead of one. The order of sums differs, so losses may differ by roundings; more than 1e-6 fails. One JSON
line per case and direction. Ranks are forked from this process, as in `checkpoint_kills`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from checkpoint_kills import Attempt, forked, give_extensions, import_everything, remove_stale_locks, result_of, set_up
from losses import compare_losses

SAVED_AT = 4
TOLERANCE = 1e-6
_LORA = ["peft=lora", "peft.dropout=0"]  # each rank has its own generator for dropout
CASES: dict[str, list[str]] = {
    "ddp": ["parallelism=ddp"],
    "ddp_lora": ["parallelism=ddp", *_LORA],
    "zero1": ["parallelism=zero1"],
    "zero2": ["parallelism=zero2"],  # with round_robin_gradients
    "zero2_in_order": ["parallelism=zero2", "parallelism.round_robin_gradients=false"],
    "zero3": ["parallelism=zero3"],
    "zero3_lora": ["parallelism=zero3", *_LORA],
}
_COMMON = ["training.micro_batch_size=2", "training.keep_checkpoints=9", "optimizer.weight_decay=0.1"]
_PATIENCE_S = 900.0  # DeepSpeed compiles a small operator when it is first used


def train(folder: Path, words: list[str], ranks: int, place: Path) -> list[float]:
    """Set up a run, train it to its end and return its losses."""
    log = folder.with_suffix(".log")
    process = forked(lambda: set_up(folder, [*words, *_COMMON, f"hardware.gpus_per_node={ranks}"], place), log)
    if os.waitpid(process, 0)[1] != 0:
        raise SystemExit(f"{folder.name} could not be set up:\n{log.read_text()}")
    remove_stale_locks()
    attempt = Attempt(folder, ranks, log)
    is_over = attempt.wait(_PATIENCE_S)
    attempt.kill(attempt.ranks)
    if not is_over or any(attempt.ended.values()):
        raise SystemExit(f"{folder.name} did not end well:\n{log.read_text()[-4000:]}")
    return result_of(folder).losses


def measure(case: str, first: int, then: int, place: Path) -> dict[str, Any]:
    """The line of one case and direction."""
    whole, later = place / f"{case}-{first}", place / f"{case}-{first}-{then}"
    losses = train(whole, CASES[case], first, place)
    resumed = f"training.resume={whole / 'checkpoints' / f'checkpoint-{SAVED_AT}'}"
    found = train(later, [*CASES[case], resumed, "training.resume_anyway=[world_size]"], then, place)
    difference = compare_losses(found, losses[SAVED_AT:])
    shutil.rmtree(whole)
    shutil.rmtree(later)
    line = {"case": case, "date": date.today().isoformat(), "machine": platform.machine(), "ranks": first}
    return line | {"resumed_with": then, "steps": len(found), "largest_difference": difference.largest}


def main() -> int:
    """Measure the cases in both directions. Exit code 1 if losses differ by more than roundings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--saved-by", type=int, nargs="+", choices=(1, 2), default=[2, 1], help="so many ranks")
    arguments = parser.parse_args()
    import_everything()
    lines = []
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["TUNEBOOK_CACHE"] = f"{temporary}/cache"
        give_extensions(Path(temporary) / "extensions")
        for case in arguments.only:
            for first in arguments.saved_by:
                lines.append(measure(case, first, 3 - first, Path(temporary)))
                print(json.dumps(lines[-1]), flush=True)
                if arguments.output is not None:
                    with arguments.output.open("a") as file:
                        file.write(json.dumps(lines[-1]) + "\n")
    return int(any(line["largest_difference"] > TOLERANCE for line in lines))


if __name__ == "__main__":
    sys.exit(main())
