"""Run what evidence is recorded from on a GPU machine: each claim as many times as it needs, at full size.

    python tests/bench/gpu_evidence.py --output DIR --gpus 2 [--only NAME ...] [--deadline-s 400] [--list]

Random weights of the real architecture learn generated documents; the file that is recorded says both. Run it from a
clean clone: `tunebook verify --record` refuses code of no commit. Each run's small files end up in OUTPUT/logs.tgz;
unpack that, then record:

    tunebook verify logs/qwen3b_zero2_2-1 logs/qwen3b_zero2_2-2 --record --label random_weights
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from itertools import cycle

from gpu_queue import Job, add_arguments, run_jobs
from gpu_recipes import RANDOM, RECIPES, SHORT, facts_of
from gpu_speed import without_repeats

REPEATS = 2


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A recipe on some GPUs, and what is typed after it."""

    recipe: str
    model: str  # its group
    gpus: int
    steps: int = 25
    repeats: int = REPEATS
    words: list[str] = field(default_factory=list)
    timeout_s: float = 150  # of training


_BATCH, _SMALL_BATCH = ["training.global_samples=64"], ["training.global_samples=16"]
_05B = [*_BATCH, "optimizer.learning_rate=1e-4", "schedule.warmup_steps=3", "schedule.warmup_share=null"]
_3B = ["optimizer.learning_rate=3e-5", "schedule.warmup_steps=3"]
_FP32 = ["precision=fp32", "precision.tf32=disabled", "attention=sdpa"]
_DETERMINISTIC = [*_05B, "attention=sdpa", "training.deterministic=true"]

# In the order of their turns.
CLAIMS: dict[str, Claim] = {
    **{
        f"qwen3b_zero2_{gpus}": Claim(recipe="qwen3b_zero2", model="qwen25_3b", gpus=gpus, words=[*_BATCH, *_3B])
        for gpus in (8, 2, 1)
    },
    # With the recipe's own batch of 528 documents.
    "qwen3b_zero2_4": Claim(
        recipe="qwen3b_zero2", model="qwen25_3b", gpus=4, steps=15,
        words=[*_3B, "dataset.synthetic.num_documents=8000"],
    ),
    "qwen05b_single_1": Claim(recipe="qwen05b_single", model="qwen25_05b", gpus=1, steps=30, words=_05B),
    **{
        f"zero3_lora_{gpus}": Claim(
            recipe="zero3_lora", model="qwen25_3b", gpus=gpus, steps=20, words=RECIPES["zero3_lora"].words
        )
        for gpus in (8, 4, 2)
    },
    **{
        f"qwen3b_zero2_fp32_{gpus}": Claim(
            recipe="qwen3b_zero2", model="qwen25_3b", gpus=gpus, steps=15, words=[*_SMALL_BATCH, *_3B, *_FP32]
        )
        for gpus in (8, 4, 2)
    },
    "qwen05b_single_deterministic_1": Claim(
        recipe="qwen05b_single", model="qwen25_05b", gpus=1, steps=12, words=_DETERMINISTIC
    ),
    # The price of the above, and how far two runs without it are apart.
    "qwen05b_single_sdpa_1": Claim(
        recipe="qwen05b_single", model="qwen25_05b", gpus=1, words=[*_05B, "attention=sdpa"]
    ),
}  # fmt: skip


def jobs_of(names: list[str], num_gpus: int) -> list[Job]:
    """The repetitions of the claims that the machine has GPUs for; those on fewer GPUs take turns on different ones."""
    jobs: list[Job] = []
    places = {size: cycle(range(0, num_gpus - size + 1, size)) for size in range(1, num_gpus + 1)}  # of first GPUs
    for name in names:
        claim = CLAIMS[name]
        if claim.gpus > num_gpus:
            print(json.dumps({"name": name, "left_out": f"{claim.gpus} GPUs are needed"}), flush=True)
            continue
        facts = facts_of(claim.model)
        own = [*RANDOM, *SHORT, f"training.max_steps={claim.steps}", f"hardware.gpus_per_node={claim.gpus}"]
        words = without_repeats([claim.recipe, *own, "evaluation=none", *claim.words])
        for number in range(1, claim.repeats + 1):
            first = next(places[claim.gpus])
            jobs.append(
                Job(
                    name=f"{name}-{number}",
                    gpus=tuple(range(first, first + claim.gpus)),
                    words=words,
                    priority=len(jobs),
                    host_gib=claim.gpus * 4 * facts["num_parameters"] / 2**30,
                    turn_timeout_s=claim.timeout_s,
                    environment={"OMP_NUM_THREADS": "8", "TUNEBOOK_BENCH_KEEPS_GPUS": "1"},
                    line={"recipe": claim.recipe, "overrides": words[1:], "weights": "random",
                          "data": "generated documents", "layers": facts["num_layers"]},
                )
            )  # fmt: skip
    return jobs


def main() -> None:
    """Parse the arguments and run the queue."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, deadline_s=400)
    parser.add_argument("--gpus", type=int, required=True, help="of the machine")
    parser.add_argument("--only", nargs="*", choices=CLAIMS, default=list(CLAIMS))
    arguments = parser.parse_args()
    # Those that train, and the next ones getting ready: more would disturb what is timed.
    arguments.max_ranks = min(arguments.max_ranks, 2 * arguments.gpus)
    run_jobs(jobs_of(arguments.only, arguments.gpus), arguments)


if __name__ == "__main__":
    main()
