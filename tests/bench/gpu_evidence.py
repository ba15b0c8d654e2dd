"""Run what evidence is recorded from on a GPU machine: each claim as many times as it needs, at full size.

    python tests/bench/gpu_evidence.py --output DIR --gpus 2 [--only NAME ...] [--deadline-s 400] [--list]

Random weights of the real architecture learn generated documents; the file that is recorded says both, and how many of
a model's layers were left where it is too large for the machine. Run it from a clean clone: `tunebook verify --record`
refuses code of no commit. Each run's small files end up in OUTPUT/logs.tgz; unpack that, then record:

    tunebook verify logs/qwen3b_zero2_2-1 logs/qwen3b_zero2_2-2 --record --label random_weights
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from itertools import cycle

from gpu_parity import NVME, start_building
from gpu_queue import Job, add_arguments, run_jobs
from gpu_recipes import LOCAL, RANDOM, RECIPES, SHORT, facts_of, slice_words
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
    layers: int | None = None  # None: all
    threads: int = 8  # of a rank: what an optimizer on the host takes
    saves_in_its_turn: bool = True  # False: the next one may train while a large model is still written
    needs: str | None = None  # see `Job`


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
    **{
        f"{recipe}_4": Claim(recipe=recipe, model="qwen25_3b", gpus=4, steps=30, words=RECIPES[recipe].words)
        for recipe in ("zero1_lora", "zero2_lora")
    },
    "llama3_8b_fp8_4": Claim(
        recipe="llama3_8b_fp8", model="llama3_8b", gpus=4, steps=15, saves_in_its_turn=False
    ),
    "llama2_70b_fsdp_4": Claim(
        recipe="llama2_70b_fsdp", model="llama2_70b_chat", gpus=4, layers=8, steps=15, words=LOCAL,
        saves_in_its_turn=False,
    ),
    "llama3_8b_ddp_4": Claim(
        recipe="llama3_8b_ddp", model="llama3_8b", gpus=4, layers=12, steps=15, saves_in_its_turn=False
    ),
    "dolly3b_ray_zero3_offload_1": Claim(
        recipe="dolly3b_ray_zero3_offload", model="dolly_v2_3b", gpus=1, steps=15, threads=16,
        words=RECIPES["dolly3b_ray_zero3_offload"].words, saves_in_its_turn=False,
    ),
    "dolly3b_zero3_nvme_1": Claim(
        recipe="dolly3b_zero3_nvme", model="dolly_v2_3b", gpus=1, layers=2, steps=10, timeout_s=240,
        words=["optimizer.learning_rate=3e-5", f"parallelism.nvme_path={NVME}"], needs="async_io",
        saves_in_its_turn=False,
    ),
    "llama3_8b_fsdp_offload_2": Claim(
        recipe="llama3_8b_fsdp_offload", model="llama3_8b", gpus=2, layers=16, steps=12, threads=16,
        saves_in_its_turn=False,
    ),
    **{
        f"llama2_70b_fsdp_1node_{gpus}": Claim(
            recipe="llama2_70b_fsdp_1node", model="llama2_70b_chat", gpus=gpus, layers=layers, steps=12, threads=16,
            words=[*LOCAL, "training.global_tokens=8192"], saves_in_its_turn=False, timeout_s=200,
        )
        for gpus, layers in ((4, 8), (2, 4))
    },
    **{
        f"qwen3b_zero2_exact_{gpus}": Claim(
            recipe="qwen3b_zero2_exact", model="qwen25_3b", gpus=gpus, steps=10,
            words=[*_3B, "hardware=auto", "precision.tf32=disabled", f"training.global_samples={11 * gpus}"],
        )
        for gpus in (4, 2)
    },
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
        cut, num_parameters = slice_words(claim.model, claim.layers) if claim.layers else ([], facts["num_parameters"])
        own = [*RANDOM, *SHORT, f"training.max_steps={claim.steps}", f"hardware.gpus_per_node={claim.gpus}"]
        words = without_repeats([claim.recipe, *own, "evaluation=none", *claim.words, *cut])
        environment = {"OMP_NUM_THREADS": str(claim.threads)}
        environment |= {"TUNEBOOK_BENCH_KEEPS_GPUS": "1"} if claim.saves_in_its_turn else {}
        for number in range(1, claim.repeats + 1):
            first = next(places[claim.gpus])
            jobs.append(
                Job(
                    name=f"{name}-{number}",
                    gpus=tuple(range(first, first + claim.gpus)),
                    words=words,
                    priority=len(jobs),
                    host_gib=claim.gpus * 4 * num_parameters / 2**30,
                    needs=claim.needs,
                    turn_timeout_s=claim.timeout_s,
                    environment=environment,
                    line={"recipe": claim.recipe, "overrides": words[1:], "weights": "random",
                          "data": "generated documents", "layers": claim.layers or facts["num_layers"]},
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
    jobs = jobs_of(arguments.only, arguments.gpus)
    run_jobs(jobs, arguments, start_building if any(job.needs for job in jobs) else dict)


if __name__ == "__main__":
    main()
