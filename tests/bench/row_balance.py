"""How evenly the attention of a step is spread over ranks, in order of packing and dealt: one JSON line per case.

    python tests/bench/row_balance.py --output tests/bench/results/row_balance.jsonl [--steps 200] [--ranks 2 8]

Lengths are drawn from lognormal(7.5, 1.0), clipped to 16..16384 tokens, and packed into rows of 16,384, as
`packing.balance_attention` gets them. The work of a rank is the sum of its documents' squared lengths. Of each step:

    step_excess    the largest rank's work of the step, divided by the mean, minus 1: how long the others wait if ranks
                   wait for each other once a step (DDP, ZeRO-1)
    round_excess   the same, if they wait in every pass (FSDP, ZeRO-2 and 3): the sum over passes of the largest work

Both are means over the steps. It counts attention only, so it is an upper bound for the time that dealing saves.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from tunebook.data.packing import Lengths, deal_rows, rows_needed
from tunebook.data.sampler import Schedule, StepSize

LOG_MEAN, LOG_SIGMA, LEAST, MOST = 7.5, 1.0, 16, 16_384
PASSES = (2, 4, 8)  # rows of about this many passes a step


def draw(num_documents: int, seed: int) -> Lengths:
    """Lengths of documents in tokens."""
    drawn = np.random.default_rng(seed).lognormal(LOG_MEAN, LOG_SIGMA, num_documents)
    return np.clip(drawn, LEAST, MOST).astype(np.int64)


def excesses(rows: list[list[int]], lengths: Lengths, num_ranks: int) -> tuple[float, float]:
    """`step_excess` and `round_excess` of one step of rows, which are dealt in order."""
    work = np.array([sum(int(lengths[document]) ** 2 for document in row) for row in rows], dtype=np.float64)
    by_round = work.reshape(-1, num_ranks)
    mean = work.sum() / num_ranks
    return float(by_round.sum(axis=0).max() / mean - 1), float(by_round.max(axis=1).sum() / mean - 1)


def measure(num_ranks: int, num_passes: int, num_steps: int, seed: int = 0) -> dict[str, Any]:
    """One line: the spread of `num_steps` steps, in order and dealt."""
    mean = float(draw(100_000, seed).mean())
    samples = round(num_ranks * num_passes * MOST / mean * 0.9)
    lengths = draw(samples * num_steps, seed)
    schedule = Schedule(lengths=lengths, size=StepSize(documents=samples), rows_per_step=0, is_packed=True, seed=seed)
    steps = schedule.steps_of_epoch(0)
    num_rows = rows_needed([lengths[step] for step in steps], MOST, num_ranks)
    schedule = Schedule(lengths=lengths, size=schedule.size, rows_per_step=num_rows, is_packed=True, seed=seed)
    found, seconds = {"in_order": [], "dealt": []}, 0.0
    for step in steps:
        rows = schedule.rows_of_step(step)
        begun = time.perf_counter()
        dealt = deal_rows(rows, lengths, num_ranks, 1)
        seconds += time.perf_counter() - begun
        assert sorted(map(tuple, dealt)) == sorted(map(tuple, rows))
        found["in_order"].append(excesses(rows, lengths, num_ranks))
        found["dealt"].append(excesses(dealt, lengths, num_ranks))
    line: dict[str, Any] = {
        "date": date.today().isoformat(), "ranks": num_ranks, "rows_per_step": num_rows, "documents_per_step": samples,
        "steps": len(steps), "log_mean": LOG_MEAN, "log_sigma": LOG_SIGMA, "most_tokens": MOST, "seed": seed,
        "deal_ms_per_step": round(1000 * seconds / len(steps), 3),
    }  # fmt: skip
    for way, pairs in found.items():
        of_step, of_rounds = np.mean(pairs, axis=0)
        line[way] = {"step_excess": round(float(of_step), 4), "round_excess": round(float(of_rounds), 4)}
    return line


def lines(ranks: list[int], num_steps: int) -> Iterator[dict[str, Any]]:
    """Every case."""
    for num_ranks in ranks:
        for num_passes in PASSES:
            yield measure(num_ranks, num_passes, num_steps)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse()
    options.output.write_text("".join(json.dumps(line) + "\n" for line in lines(options.ranks, options.steps)))
