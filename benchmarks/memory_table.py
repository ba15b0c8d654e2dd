"""What the memory plan says of runs whose peaks were measured on GPUs: one line for each run, and the errors.

    python benchmarks/memory_table.py [--files h200_memory h100_held_out ...] [--only NAME ...]

Every recorded run of `FILES` is planned again by today's code, from its own overrides and what `auto` had decided then
(`resolved`). Peaks are of torch's allocated memory on the rank with the highest. A test holds the errors to their
bounds (tests/plan/memory/test_recorded_runs.py); the table shows which runs they come from. Nothing is written.

Models that are not in the book are planned from a config.json, as a user's own model is.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from gpu_models import model_words
from lines import read_lines

from tunebook.config.compose import compose
from tunebook.config.schema import RunConfig
from tunebook.hardware.detect import Machine
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.plan.memory import estimate_memory

HERE = Path(__file__).parent
RESULTS = HERE / "results"
FILES = (
    "h200_memory", "h200_memory_budget", "h200_quantised", "h200x2_architectures",  # chosen one by one
    "h200_adapters_side_by_side", "h200_frozen_fp8", "h200_beside_peers", "h200x2_whole_fp8",
    "h200x2_held_out", "h100_held_out", "h100x2_held_out",  # drawn by `gpu_draw.py`, and planned before they ran
)  # fmt: skip
_H200 = ["hardware=hopper", "hardware.memory_gib=140.4"]  # where a run does not say it
_MACHINE = Machine(gpus=[], driver=None, num_cpus=32, host_memory_gib=256.0)


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A measured run, and the words that plan it today."""

    file: str
    name: str
    recipe: str | None
    words: list[str]  # overrides
    accumulates: bool  # several passes per optimizer step
    allocated_gib: float  # peak of the rank with the highest
    reserved_gib: float | None  # what torch's allocator held of the GPU at most
    tokens_per_second: float | None  # of a GPU: real tokens, the median after the first steps

    def config(self) -> RunConfig:
        """The resolved configuration, as it was run."""
        return resolve_auto(compose(self.recipe, self.words).config, _MACHINE).config

    def planned_gib(self) -> float:
        """The peak that today's plan expects."""
        config = self.config()
        assert config.model.facts is not None
        return estimate_memory(config, config.model.facts, accumulates=self.accumulates).total_gib


def recorded_runs(models: Path, files: Iterable[str] = FILES) -> Iterator[RecordedRun]:
    """Every run of the files whose memory was measured. The config.json of their models are written below `models`."""
    for file in files:
        for line in read_lines(RESULTS / f"{file}.jsonl"):
            if "memory_gib" not in line or "overrides" not in line:  # of a peer
                continue
            words = [*_H200, *line["overrides"], *line.get("resolved", ()), *model_words(line, models)]
            speed = line.get("tokens_per_second_per_gpu")
            if any(word.startswith("model=/") for word in line["overrides"]):  # weights written for the run
                words.append(f"model={line['model']}")
            yield RecordedRun(
                file=file,
                name=line["name"],
                recipe=line.get("recipe"),
                words=[*{word.partition("=")[0]: word for word in words}.values()],  # Hydra takes a key only once
                accumulates=line.get("accumulation", 1) > 1,
                allocated_gib=max(line["memory_gib"]),
                reserved_gib=max(line.get("memory_reserved_gib", ()), default=None),
                tokens_per_second=mean(speed) if isinstance(speed, list) else speed,  # of equal runs
            )


def main(words: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", default=FILES, metavar="NAME", help="of results/, without .jsonl")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these runs")
    asked = parser.parse_args(words)
    errors = []
    with tempfile.TemporaryDirectory() as models:
        for run in recorded_runs(Path(models), asked.files):
            if asked.only and run.name not in asked.only:
                continue
            planned = run.planned_gib()
            errors.append(planned / run.allocated_gib - 1)
            print(
                f"{run.file:20} {run.name:46} planned {planned:7.2f} measured {run.allocated_gib:7.2f} "
                f"{errors[-1]:+7.1%}  reserved {run.reserved_gib or 0:7.2f}"
            )
    typical = median(map(abs, errors))
    print(f"{len(errors)} runs: median error {typical:.1%}, from {min(errors):+.1%} to {max(errors):+.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
