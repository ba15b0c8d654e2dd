"""Which modules become FSDP units, and whether the wrapped model matches the configuration: devices, meshes, classes.

Libraries silently replace a strategy that they cannot run: accelerate wraps a model in DistributedDataParallel if FSDP
finds no GPU, and transformers drops unknown keys. So every rank checks the objects that will train.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tunebook.config.choices import Compute, PeftMethod, Strategy
from tunebook.config.schema import FsdpConfig, RunConfig, ZeroConfig, world_size
from tunebook.errors import InvalidTrainingError, RequestError
from tunebook.facts.sharing import mixes_formats
from tunebook.model.blocks import transformer_blocks
from tunebook.parallel.deepspeed import uses_autocast
from tunebook.parallel.fsdp import fsdp_of, hsdp_sizes

Wrapping = dict[str, Any]  # strategy, wrapper, ranks and the strategy's parts; written to the manifest unchanged


def unit_classes(config: RunConfig, model: nn.Module) -> list[str]:
    """The classes whose instances become units, apart from the embeddings, the last norm and the head.

    Raises: RequestError if the model has no such class.
    """
    named = list(fsdp_of(config).wrap_classes)
    present = {type(module).__name__ for module in model.modules()}
    blocks = sorted({type(block).__name__ for block in transformer_blocks(model).values()})
    unknown = [name for name in named if name not in present]
    if unknown or not (named or blocks):
        says = f"{type(model).__name__} has no {', '.join(unknown)}" if unknown else "no block of the model is known"
        known = blocks or sorted(name for name in present if "Layer" in name or "Block" in name) or sorted(present)
        raise RequestError(
            f"parallelism.wrap_classes={named}: {says}, and FSDP would gather all of it at once; name the class of one "
            f"transformer block, such as parallelism.wrap_classes=[{known[0]}]",
            problem_id="wrap-class-unknown",
        )
    return named or blocks


def find_parallelism(model: nn.Module) -> Wrapping:
    """How a model is wrapped: the keys of `expected_parallelism`, and a few more.

    `model` is the outermost module, as the training loop calls it.
    """
    if isinstance(model, DistributedDataParallel):
        ranks = model.process_group.size()
        return {"strategy": Strategy.ddp.name, "wrapper": type(model).__name__, "ranks": ranks}
    if isinstance(model, FSDPModule):
        return _find_fsdp(model)
    if hasattr(model, "zero_optimization_stage"):
        return _find_zero(model)
    return {"strategy": Strategy.single.name, "wrapper": type(model).__name__, "ranks": 1}


def _find_fsdp(model: Any) -> Wrapping:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sharded = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    units: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule) and module is not model]
    wrapping = {
        "wrapper": type(model).__name__,
        "unit_classes": sorted({type(unit).__name__.removeprefix("FSDP") for unit in units}),
        "whole_parameters": sum(not isinstance(parameter, DTensor) for parameter in model.parameters()),
    }
    if not sharded:
        return {"strategy": Strategy.fsdp.name, **wrapping}
    mesh = sharded[0].device_mesh
    keeps = _keeps_gathered(units)
    is_hybrid = mesh.ndim == 2
    strategy = Strategy.hsdp if is_hybrid else Strategy.fsdp_grad_op if keeps else Strategy.fsdp
    return wrapping | {
        "strategy": strategy.name,
        "ranks": mesh.size(),
        "mesh": list(mesh.shape),
        "offload_parameters": _offloaded(sharded, mesh.device_type == "cpu"),
        **_fsdp_formats(units, sharded),
    }


def _keeps_gathered(units: list[Any]) -> bool:
    """Whether units keep their gathered parameters after the forward pass. The last one always does: it comes next."""
    groups = [group for unit in units if (group := _parameter_group(unit)) is not None]
    return bool(groups) and all(group.post_forward_mesh_info is None for group in groups)


def _parameter_group(unit: Any) -> Any:
    """FSDP's state of a unit; torch has no public name for it."""
    return unit._get_fsdp_state()._fsdp_param_group


def _fsdp_formats(units: list[Any], sharded: list[Any]) -> Wrapping:
    groups = [group for unit in units if (group := _parameter_group(unit)) is not None]
    policy = groups[0].mp_policy if groups else None
    weights = sharded[0].dtype
    return {
        "weights": format_name(weights),
        "gathered": format_name((policy and policy.param_dtype) or weights),
        "reduced": format_name((policy and policy.reduce_dtype) or weights),
    }


def _find_zero(engine: Any) -> Wrapping:
    stage = engine.zero_optimization_stage()
    optimizer, parameters = engine.optimizer, list(engine.module.parameters())
    is_cpu = engine.device.type == "cpu"
    wrapping = {
        "wrapper": type(engine).__name__,
        "optimizer": type(optimizer).__name__,
        "ranks": engine.dp_world_size,
        "autocast": format_name(engine.torch_autocast_dtype()) if engine.torch_autocast_enabled() else None,
    }
    if stage == 3:
        whole = [parameter for parameter in parameters if not hasattr(parameter, "ds_tensor")]
        shards = [parameter.ds_tensor for parameter in parameters if hasattr(parameter, "ds_tensor")]
        in_files = optimizer.params_in_nvme_and_cpu
        return wrapping | {
            "strategy": Strategy.zero3.name if not whole else f"zero3 with {len(whole)} whole parameters",
            "offload_optimizer": "nvme"
            if optimizer.swap_optimizer
            else _offloaded(optimizer.fp32_partitioned_groups_flat, is_cpu, reported=optimizer.offload_optimizer),
            "offload_parameters": "nvme" if in_files else _offloaded(shards, is_cpu, reported=optimizer.offload_param),
            "weights": format_name(shards[0].dtype) if shards else None,
        }
    is_sharding = hasattr(optimizer, "partition_gradients")
    strategy = (Strategy.zero2 if optimizer.partition_gradients else Strategy.zero1).name if is_sharding else "no ZeRO"
    shards = optimizer.single_partition_of_fp32_groups if is_sharding else []
    return wrapping | {
        "strategy": strategy,
        "offload_optimizer": _offloaded(shards, is_cpu, reported=is_sharding and optimizer.cpu_offload),
        "offload_parameters": "none",
        "weights": format_name(parameters[0].dtype),
    }


def _offloaded(tensors: Iterable[torch.Tensor], is_cpu: bool, reported: bool = False) -> str:
    """Where states are: `cpu`, `none` (on the GPU), or both. On a CPU only the library's setting (`reported`) tells."""
    if is_cpu:
        return "cpu" if reported else "none"
    devices = {"cpu" if tensor.device.type == "cpu" else "none" for tensor in tensors if tensor.numel()}
    return " and ".join(sorted(devices)) or "none"


def format_name(dtype: torch.dtype) -> str:
    """A number format by our name: fp32, bf16, fp16; others by torch's name."""
    name = str(dtype).removeprefix("torch.")
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(name, name)


def expected_parallelism(config: RunConfig) -> dict[str, Any]:
    """The values that `find_parallelism` must find for a resolved run."""
    settings, ranks = config.parallelism, world_size(config)
    strategy = settings.strategy
    if strategy is Strategy.ddp and ranks == 1:
        strategy = Strategy.single
    expected: dict[str, Any] = {"strategy": strategy.name, "ranks": ranks}
    if settings.sequence_group_size > 1:
        expected["sequence_group_size"] = settings.sequence_group_size
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
    """Number formats of the optimizer's weights, the gathered weights and the summed gradients; not for adapters."""
    if config.peft.method is not PeftMethod.full:
        return {}
    weights = config.precision.master_weights.name
    half = "fp16" if config.precision.compute is Compute.fp16 else "bf16"
    return {"weights": weights, "gathered": half if mixes_formats(config) else weights, "reduced": weights}


def require_expected(
    config: RunConfig, by_rank: list[dict[str, Any]], unit_classes: list[str], num_fp8_layers: int = 0
) -> None:
    """Compare the wrapped model of each rank with the configuration.

    `unit_classes` are the classes that FSDP should have made units of; empty for other strategies.
    `num_fp8_layers` were converted, and must still multiply in fp8.
    Raises: InvalidTrainingError naming the rank, the expected value and the value found.
    """
    expected = expected_parallelism(config)
    if config.precision.compute is Compute.fp8:
        expected["fp8_layers"] = num_fp8_layers
    for rank, wrapping in enumerate(by_rank):
        wrong = [
            f"{key} {value} was asked for and {wrapping.get(key)} found"
            for key, value in expected.items()
            if wrapping.get(key) != value and not (value == Strategy.single.name and _is_ddp_of_one(wrapping))
        ]
        wrong += _units_wrong(wrapping, unit_classes)
        if wrong:
            raise InvalidTrainingError(
                f"the model is not spread over the ranks as parallelism={config.parallelism.strategy.name} says: on "
                f"rank {rank} {'; '.join(wrong)} ({wrapping['wrapper']}). Nothing was trained. A library has replaced "
                "the strategy or the number format; choose one that it can do here, such as parallelism=ddp "
                "precision=bf16",
                problem_id="other-parallelism",
            )


def _is_ddp_of_one(wrapping: dict[str, Any]) -> bool:
    """accelerate wraps a single rank in DDP or not, depending on how it was started."""
    return (wrapping["strategy"], wrapping["ranks"]) == (Strategy.ddp.name, 1)


def _units_wrong(wrapping: dict[str, Any], unit_classes: list[str]) -> list[str]:
    """Without units FSDP gathers the whole model at once, which saves no memory."""
    missing = [name for name in unit_classes if name not in wrapping.get("unit_classes", unit_classes)]
    return [f"units of {', '.join(missing)} were asked for and {wrapping['unit_classes']} found"] if missing else []
