"""Look at the model as it was wrapped: is it what was asked for? Nothing here asks a configuration what it says.

Libraries replace a strategy that they cannot do by another without a word: accelerate wraps in DistributedDataParallel
where FSDP finds no GPU, transformers drops keys that it does not know. So the run reads devices, meshes and classes off
the objects that will train, on every rank, and compares them with what was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tunebook.config.choices import Strategy

Found = dict[str, Any]  # strategy, wrapper, ranks, and what the strategy is made of; goes to the manifest as it is


def find_parallelism(model: nn.Module) -> Found:
    """What a wrapped model is: the keys that `expected_parallelism` asks for, and a few for the reader.

    `model` is the outermost module, as the training loop calls it.
    """
    from torch.distributed.fsdp import FSDPModule

    if isinstance(model, DistributedDataParallel):
        ranks = model.process_group.size()
        return {"strategy": Strategy.ddp.name, "wrapper": type(model).__name__, "ranks": ranks}
    if isinstance(model, FSDPModule):
        return _find_fsdp(model)
    if hasattr(model, "zero_optimization_stage"):
        return _find_zero(model)
    return {"strategy": Strategy.single.name, "wrapper": type(model).__name__, "ranks": 1}


def _find_fsdp(model: Any) -> Found:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sharded = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    units: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule) and module is not model]
    found = {
        "wrapper": type(model).__name__,
        "units": len(units),
        "unit_classes": sorted({type(unit).__name__.removeprefix("FSDP") for unit in units}),
        "whole_parameters": sum(not isinstance(parameter, DTensor) for parameter in model.parameters()),
    }
    if not sharded:
        return {"strategy": Strategy.fsdp.name, **found}
    mesh, placements = sharded[0].device_mesh, sharded[0].placements
    keeps = _keeps_gathered(units)
    is_hybrid = mesh.ndim == 2
    strategy = Strategy.hsdp if is_hybrid else Strategy.fsdp_grad_op if keeps else Strategy.fsdp
    return found | {
        "strategy": strategy.name,
        "ranks": mesh.size(),
        "mesh": list(mesh.shape),
        "mesh_axes": list(mesh.mesh_dim_names or ()),
        "placements": [str(placement) for placement in placements],
        "resharded_after_forward": not keeps,
        "offload_parameters": _offloaded(sharded, mesh.device_type == "cpu"),
        **_fsdp_formats(units, sharded),
    }


def _keeps_gathered(units: list[Any]) -> bool:
    """Whether units keep their gathered parameters after the forward pass. The last one always does: it is next."""
    groups = [group for unit in units if (group := _parameter_group(unit)) is not None]
    return bool(groups) and all(group.post_forward_mesh_info is None for group in groups)


def _parameter_group(unit: Any) -> Any:
    """FSDP's own record of a unit; torch has no public name for it."""
    return unit._get_fsdp_state()._fsdp_param_group


def _fsdp_formats(units: list[Any], sharded: list[Any]) -> Found:
    group = next((found for unit in units if (found := _parameter_group(unit)) is not None), None)
    weights = sharded[0].dtype
    return {
        "weights": _name(weights),
        "gathered": _name((group and group.mp_policy.param_dtype) or weights),
        "reduced": _name((group and group.mp_policy.reduce_dtype) or weights),
    }


def _find_zero(engine: Any) -> Found:
    stage = engine.zero_optimization_stage()
    optimizer, parameters = engine.optimizer, list(engine.module.parameters())
    is_cpu = engine.device.type == "cpu"
    found = {
        "wrapper": type(engine).__name__,
        "optimizer": type(optimizer).__name__,
        "ranks": engine.dp_world_size,
        "autocast": _name(engine.torch_autocast_dtype()) if engine.torch_autocast_enabled() else None,
    }
    if stage == 3:
        whole = [parameter for parameter in parameters if not hasattr(parameter, "ds_tensor")]
        shards = [parameter.ds_tensor for parameter in parameters if hasattr(parameter, "ds_tensor")]
        in_files = optimizer.params_in_nvme_and_cpu
        return found | {
            "strategy": Strategy.zero3.name if not whole else f"zero3 with {len(whole)} whole parameters",
            "offload_optimizer": "nvme"
            if optimizer.swap_optimizer
            else _offloaded(optimizer.fp32_partitioned_groups_flat, is_cpu, told=optimizer.offload_optimizer),
            "offload_parameters": "nvme" if in_files else _offloaded(shards, is_cpu, told=optimizer.offload_param),
            "weights": _name(shards[0].dtype) if shards else None,
        }
    is_sharding = hasattr(optimizer, "partition_gradients")
    strategy = (Strategy.zero2 if optimizer.partition_gradients else Strategy.zero1).name if is_sharding else "no ZeRO"
    shards = optimizer.single_partition_of_fp32_groups if is_sharding else []
    return found | {
        "strategy": strategy,
        "offload_optimizer": _offloaded(shards, is_cpu, told=is_sharding and optimizer.cpu_offload),
        "offload_parameters": "none",
        "weights": _name(parameters[0].dtype),
    }


def _offloaded(tensors: Iterable[torch.Tensor], is_cpu: bool, told: bool = False) -> str:
    """Where states are: `cpu`, `none` (on the GPU), or both. A run on a CPU has only the library's word (`told`)."""
    if is_cpu:
        return "cpu" if told else "none"
    devices = {"cpu" if tensor.device.type == "cpu" else "none" for tensor in tensors if tensor.numel()}
    return " and ".join(sorted(devices)) or "none"


def _name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, str(dtype))
