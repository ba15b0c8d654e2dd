"""Run every recipe of the sources on a GPU machine, by its own name, with random weights and generated documents.

    python tests/bench/gpu_recipes.py --output DIR [--gpus 4] [--only NAME ...] [--parity SERIES ...]

At full size where time allows, else on a slice of whole layers, said in each line. What is overridden stands in
`RECIPES`: the number of GPUs, a learning rate that random weights learn by within some tens of steps, and the batch
where it is large. With fewer than four GPUs those that a recipe would take are counted round. `--parity` adds series of
`gpu_parity`, whose runs fill the gaps on the GPUs.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpu_parity
import yaml
from gpu_queue import Job, add_arguments, run_jobs

ROOT = Path(__file__).resolve().parents[2]
RANDOM = ["model.weights=random", "dataset=synthetic", "dataset.synthetic.num_documents=1500"]
LOCAL = ["launcher=local", "hardware.num_nodes=1"]
SHORT = ["training.save_every_steps=null", "training.evaluate_every_steps=null", "training.log_every_steps=1"]
NUM_NORMS = {"GPTNeoXForCausalLM": 2}  # vectors of the last norm: a weight, and with LayerNorm a bias


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a recipe is run here."""

    model: str  # its group, for the size of a slice
    gpus: tuple[int, ...]
    layers: int | None = None  # None: all
    steps: int = 20
    words: list[str] = field(default_factory=list)
    turn_timeout_s: float = 90  # with the optimizer on the host a step takes seconds
    holds_gpus: bool = True
    needs: str | None = None
    threads: int = 4  # of a rank: what an optimizer on the host takes


_ALL, _FIRST, _SECOND = (0, 1, 2, 3), (0, 1), (2, 3)
_LORA = ["optimizer.learning_rate=1e-3"]

# In the order of their turns.
RECIPES: dict[str, Recipe] = {
    "qwen3b_zero2": Recipe(
        model="qwen25_3b",
        gpus=_ALL,
        words=["training.global_samples=64", "optimizer.learning_rate=3e-5", "schedule.warmup_steps=3"],
    ),
    "llama2_70b_fsdp": Recipe(model="llama2_70b_chat", gpus=_ALL, layers=4, words=LOCAL),
    "zero1_lora": Recipe(model="qwen25_3b", gpus=_FIRST, steps=30, words=_LORA),
    "dolly3b_ray_zero3_offload": Recipe(
        model="dolly_v2_3b",
        gpus=(2,),
        layers=8,
        words=["launcher=local", "optimizer.learning_rate=3e-5"],
        turn_timeout_s=240,
        threads=16,
    ),
    "dolly3b_zero3_nvme": Recipe(
        model="dolly_v2_3b",
        gpus=(3,),
        layers=2,
        words=["optimizer.learning_rate=3e-5", f"parallelism.nvme_path={gpu_parity.NVME}"],
        turn_timeout_s=240,
        holds_gpus=False,
        needs="async_io",
        threads=8,
    ),
    "zero2_lora": Recipe(model="qwen25_3b", gpus=_FIRST, steps=30, words=_LORA),
    "llama3_8b_ddp": Recipe(model="llama3_8b", gpus=_SECOND, layers=4),
    "zero3_lora": Recipe(model="qwen25_3b", gpus=_FIRST, layers=12, words=_LORA),
    "llama3_8b_fsdp_offload": Recipe(model="llama3_8b", gpus=_SECOND, layers=4, turn_timeout_s=150, threads=16),
    "llama3_8b_fp8": Recipe(model="llama3_8b", gpus=_FIRST, layers=4),
    "llama2_70b_fsdp_1node": Recipe(
        model="llama2_70b_chat",
        gpus=_ALL,
        layers=4,
        words=[*LOCAL, "training.global_tokens=8192"],
        turn_timeout_s=260,
        threads=16,
    ),
}


def slice_words(model: str, layers: int) -> tuple[list[str], int]:
    """The settings of a model cut to some whole layers, and its exact number of parameters."""
    facts = facts_of(model)
    hidden = facts["hidden_size"]
    embeddings = facts["vocab_size"] * hidden * (1 if facts["tie_word_embeddings"] else 2)
    around = embeddings + hidden * NUM_NORMS.get(facts["architecture"], 1)
    layer, rest = divmod(facts["num_parameters"] - around, facts["num_layers"])
    if rest:
        raise ValueError(f"{model}: {facts['num_parameters'] - around} parameters do not make whole layers")
    total = around + layers * layer
    return [f"model.facts.num_layers={layers}", f"model.facts.num_parameters={total}"], total


def facts_of(model: str) -> dict[str, Any]:
    """The planned sizes of a model group."""
    content: dict[str, Any] = yaml.safe_load((ROOT / f"hydra_configs/model/{model}.yaml").read_text())
    facts: dict[str, Any] = content["facts"]
    return facts


def gpus_of(recipe: Recipe, there: int) -> tuple[int, ...]:
    """Which of the GPUs that are there a recipe takes."""
    return tuple(sorted({gpu % there for gpu in recipe.gpus}))


def recipe_job(name: str, priority: int, there: int) -> Job:
    """One recipe as a job of the queue."""
    recipe = RECIPES[name]
    gpus = gpus_of(recipe, there)
    facts = facts_of(recipe.model)
    sliced, total = slice_words(recipe.model, recipe.layers) if recipe.layers else ([], facts["num_parameters"])
    steps = [f"training.max_steps={recipe.steps}", f"hardware.gpus_per_node={len(gpus)}"]
    overrides = [*RANDOM, *SHORT, *steps, *recipe.words, *sliced]
    return Job(
        name=name,
        gpus=gpus,
        words=[name, *overrides],
        priority=priority,
        holds_gpus=recipe.holds_gpus,
        host_gib=len(gpus) * 4 * total / 2**30,
        needs=recipe.needs,
        turn_timeout_s=recipe.turn_timeout_s,
        environment={"OMP_NUM_THREADS": str(recipe.threads)},
        line={
            "recipe": name,
            "overrides": overrides,
            "weights": "random",
            "data": "generated documents",
            "layers": recipe.layers or facts["num_layers"],
            "layers_of_the_model": facts["num_layers"],
            "num_parameters": total,
            "note": "alone on its GPUs while it trained" if recipe.holds_gpus else "beside other runs on its GPU",
        },
    )


def main() -> None:
    """Parse the arguments, build what is compiled on first use, and run the queue."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, deadline_s=250)
    parser.add_argument("--gpus", type=int, default=4, help="of the machine")
    parser.add_argument("--only", nargs="*", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--parity", nargs="*", choices=gpu_parity.SERIES, default=[])
    arguments = parser.parse_args()
    jobs = _all_jobs(arguments.only, arguments.parity, arguments.gpus)
    lines = run_jobs(jobs, arguments, gpu_parity.start_building)
    if lines:
        gpu_parity.write_compared(lines, arguments.output)


def _all_jobs(recipes: list[str], series: list[str], there: int) -> list[Job]:
    """The order is that of starting: the first parity runs are ready while large models still draw their weights."""
    own = [recipe_job(name, number, there) for number, name in enumerate(RECIPES) if name in recipes]
    others = [
        job
        for number, name in enumerate(series)
        for job in gpu_parity.parity_jobs(name, 100 * (number + 1), gpus=there)
    ]
    return [*others[:1], *own, *others[1:]]


if __name__ == "__main__":
    main()
