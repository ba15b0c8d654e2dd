"""What a run asked for, in the words of `parallel.found`, and the error where the wrapped model is something else."""

from __future__ import annotations

from typing import Any

from tunebook.config.choices import Compute, PeftMethod, Strategy
from tunebook.config.schema import FsdpConfig, RunConfig, ZeroConfig, world_size
from tunebook.errors import InvalidTrainingError
from tunebook.parallel.deepspeed import uses_autocast
from tunebook.parallel.fsdp import hsdp_sizes
from tunebook.parallel.precision import mixes_formats


def expected_parallelism(config: RunConfig) -> dict[str, Any]:
    """What `find_parallelism` must find for a resolved run, by key."""
    settings, ranks = config.parallelism, world_size(config)
    strategy = settings.strategy
    if strategy is Strategy.ddp and ranks == 1:
        strategy = Strategy.single
    expected: dict[str, Any] = {"strategy": strategy.name, "ranks": ranks}
    if isinstance(settings, ZeroConfig):
        expected |= {
            "offload_optimizer": settings.offload_optimizer.name,
            "offload_parameters": settings.offload_parameters.name,
            "autocast": "bf16" if uses_autocast(config) else None,
        }
    if isinstance(settings, FsdpConfig):
        copies, group = hsdp_sizes(config) or (1, ranks)
        expected |= {
            "mesh": [copies, group] if copies > 1 else [ranks],
            "offload_parameters": settings.offload_parameters.name,
            "whole_parameters": 0,
            **_formats(config),
        }
    return expected


def _formats(config: RunConfig) -> dict[str, str]:
    """Of the weights that the optimizer keeps, of what FSDP gathers of them, and of the sums of their gradients.

    Adapters have formats of their own.
    """
    if config.peft.method is not PeftMethod.full:
        return {}
    weights = config.precision.master_weights.name
    half = "fp16" if config.precision.compute is Compute.fp16 else "bf16"
    return {"weights": weights, "gathered": half if mixes_formats(config) else weights, "reduced": weights}


def require_expected(config: RunConfig, by_rank: list[dict[str, Any]], unit_classes: list[str]) -> None:
    """Compare what was found on each rank with what was asked for.

    `unit_classes` are those that FSDP should have made units of (`parallel.units`); empty for other strategies.
    Raises: InvalidTrainingError naming what was asked for and found, and on which rank.
    """
    expected = expected_parallelism(config)
    for rank, found in enumerate(by_rank):
        wrong = [
            f"{key} {value} was asked for and {found.get(key)} found"
            for key, value in expected.items()
            if found.get(key) != value and not (value == Strategy.single.name and _is_ddp_of_one(found))
        ]
        wrong += _units_wrong(found, unit_classes)
        if wrong:
            raise InvalidTrainingError(
                f"the model is not spread over the ranks as parallelism={config.parallelism.strategy.name} says: on "
                f"rank {rank} {'; '.join(wrong)} ({found['wrapper']}). Nothing was trained. A library has replaced the "
                "strategy; choose one that it can do here, such as parallelism=ddp",
                problem_id="other-parallelism",
            )


def require_fp8(config: RunConfig, by_rank: list[dict[str, Any]], num_layers: int) -> None:
    """Compare the fp8 layers that each rank found in its wrapped model with the number that were converted.

    Raises: InvalidTrainingError where a run in fp8 computes in something else.
    """
    if config.precision.compute is not Compute.fp8:
        return
    for rank, found in enumerate(by_rank):
        if not num_layers or found.get("fp8_layers") != num_layers:
            raise InvalidTrainingError(
                f"precision.compute=fp8: on rank {rank} {found.get('fp8_layers', 0)} linear layers multiply in fp8, "
                f"and {num_layers} were converted. Nothing was trained, since it would have been in bf16 without a "
                "word; try precision=bf16",
                problem_id="not-in-fp8",
            )


def _is_ddp_of_one(found: dict[str, Any]) -> bool:
    """One rank has nobody to agree with: accelerate wraps DDP around it or not, depending on how it was started."""
    return (found["strategy"], found["ranks"]) == (Strategy.ddp.name, 1)


def _units_wrong(found: dict[str, Any], unit_classes: list[str]) -> list[str]:
    """FSDP without units gathers the whole model at once, which saves nothing."""
    missing = [name for name in unit_classes if name not in found.get("unit_classes", unit_classes)]
    return [f"units of {', '.join(missing)} were asked for and {found['unit_classes']} found"] if missing else []
