"""What the plan's speed says of runs whose speed was measured on GPUs: one line for each run, and a table by kind.

    python benchmarks/speed_table.py [--files h200_memory_budget ...]

Runs are planned again by today's code, as in `memory_table.py`, before their data is prepared. The table is the one in
docs/speed.md. Nothing is written.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

from memory_table import RESULTS, recorded_runs

from tunebook.config.choices import PackingMode
from tunebook.config.schema import RunConfig, world_size
from tunebook.data.batch import longest_side, solve_batch
from tunebook.facts.attention import attention_facts
from tunebook.facts.sharing import offloaded_states
from tunebook.model.parameters import has_experts
from tunebook.plan.speed import plan_time

_LONG_DOCUMENT = 27_904  # tokens: most of the time is attention


def kind_of(config: RunConfig, assumption: str) -> str:
    """The first kind that fits a run, by what its estimate rests on."""
    assert config.model.facts is not None
    kinds = {
        "states on the host or on NVMe": bool(offloaded_states(config)),
        "one document of 27,904 tokens or more": longest_side(config) >= _LONG_DOCUMENT,
        "short passes and small models, which wait for the host": "too few tokens" in assumption,
        "sdpa or eager attention, deterministic": attention_facts(config).has_mask or config.training.deterministic,
        "padded rows": config.packing.mode is PackingMode.padded,
        "experts": has_experts(config.model.facts),
        "several GPUs, with work enough": world_size(config) > 1,
    }
    return next((kind for kind, fits in kinds.items() if fits), "one GPU, with work enough")


def main(words: list[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = sorted(
        file.stem
        for file in RESULTS.glob("h[12]00*.jsonl")  # what images take is not known before their data is prepared
        if "tokens_per_second_per" in file.read_text() and file.stem != "h200_images"
    )
    parser.add_argument("--files", nargs="+", default=every, metavar="NAME", help="of results/, without .jsonl")
    asked = parser.parse_args(words)
    ratios: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as models:
        for run in recorded_runs(Path(models), asked.files):
            if run.tokens_per_second is None:
                continue
            config = run.config()
            time = plan_time(config, solve_batch(config, None))
            if time.tokens_per_second_per_gpu is None:
                continue
            kind, ratio = kind_of(config, time.assumption), time.tokens_per_second_per_gpu / run.tokens_per_second
            ratios[kind].append(ratio)
            print(f"{run.file:24} {run.name:46} {run.tokens_per_second:9,.0f} x {ratio:.2f}  {kind}", flush=True)
    ratios["all"] = [ratio for found in ratios.values() for ratio in found]
    for kind, found in ratios.items():
        within = sum(2 / 3 <= ratio <= 4 / 3 for ratio in found)
        print(f"{kind:56} {within:3} of {len(found):3} within a third; median x {median(found):.2f}")
    print(f"median error {median(abs(ratio - 1) for ratio in ratios['all']):.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
