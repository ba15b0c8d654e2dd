"""What the memory plan says of runs that were measured on GPUs: the table of predicted and measured peaks.

    python tests/bench/memory_table.py [RESULTS.jsonl]

Each line of the results (`gpu_memory.py`, `gpu_evidence.py`) is planned anew from its own words by today's code, so
the table says what the plan is worth now; a test holds it to its bounds. `resolved` in a line is what the machine had
decided: no flash-attn was installed there. Peaks are of tensors, of the rank with the highest.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunebook.config.auto import resolve_auto
from tunebook.config.compose import compose
from tunebook.config.estimate import estimate_memory
from tunebook.hardware.detect import Machine

RESULTS = Path(__file__).parent / "results" / "h200_memory.jsonl"
_H200 = ["hardware=hopper", "hardware.memory_gib=140.4"]
# What was so when the runs were made, where their words do not say: blocks were compiled where that was asked for only,
# the head's logits were computed twice, and a recipe asked for Liger's kernels.
_THEN = {"model.compile_layers": "false", "model.one_pass_head": "false"}
_RECIPES_THEN = {"qwen3b_zero2": {"model.liger_kernel": "true"}}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run, in GiB."""

    name: str
    predicted: float  # peak of allocated memory
    measured: float
    reserved: float  # what torch's allocator held at most

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured; positive where it is too high."""
        return self.predicted / self.measured - 1


def as_it_was_run(line: dict[str, Any]) -> list[str]:
    """The words of a recorded run, with what has become another default since."""
    words: list[str] = [*line["overrides"], *line["resolved"]]
    said = {word.partition("=")[0] for word in words}
    then = _THEN | _RECIPES_THEN.get(line["recipe"], {})
    return [*words, *(f"{key}={value}" for key, value in then.items() if key not in said)]


def read_measured(file: Path = RESULTS) -> list[Measured]:
    """Every run of a file of results, with what the plan says of it."""
    nobody = Machine(gpus=[], driver=None, num_cpus=32, host_memory_gib=256.0)
    found = []
    for text in file.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        config = resolve_auto(compose(line["recipe"], [*as_it_was_run(line), *_H200]).config, nobody).config
        assert config.model.facts is not None
        estimate = estimate_memory(config, config.model.facts, accumulates=line["accumulation"] > 1)
        found.append(
            Measured(
                name=line["name"],
                predicted=estimate.total_gib,
                measured=max(line["allocated_gib"]),
                reserved=max(line["reserved_gib"]),
            )
        )
    return found


def main() -> None:
    """Print the table."""
    runs = read_measured(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS)
    for run in runs:
        print(f"{run.name:46} {run.predicted:7.2f} {run.measured:7.2f} {run.error:+7.1%}  reserved {run.reserved:7.2f}")
    errors, typical = [run.error for run in runs], statistics.median(abs(run.error) for run in runs)
    print(f"{len(runs)} runs: median error {typical:.1%}, from {min(errors):+.1%} to {max(errors):+.1%}")


if __name__ == "__main__":
    main()
