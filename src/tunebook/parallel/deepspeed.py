"""DeepSpeed ZeRO: its configuration for a resolved run (`deepspeed.json` in the run folder), and workarounds.

Stage 1 shards the optimizer state over the ranks, stage 2 also the gradients, stage 3 also the parameters. A null
setting is not written, so DeepSpeed's default applies; the Trainer fills in "auto" from its arguments.
"""

from __future__ import annotations

import math
from typing import Any

from tunebook.config.book import resolve_path
from tunebook.config.choices import MasterWeights, Offload, Strategy
from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import RunConfig, ZeroConfig, world_size
from tunebook.facts.sharing import is_cast_by_deepspeed, mixes_formats
from tunebook.facts.strategies import STRATEGIES
from tunebook.model.parameters import count_parameters, largest_parameter

_OPTIMIZER_BYTES = 16
_NVME_BUFFER_ELEMENTS = 100_000_000  # DeepSpeed's default; a larger parameter ends the run before its first step
_GATHERED_AS = "comm_dtype"  # set by DeepSpeed on the parameters of linear layers under `torch_autocast`


def zero_stage(strategy: Strategy) -> int | None:
    """The ZeRO stage of a strategy, None for the others."""
    return STRATEGIES[strategy].zero_stage


def nvme_bytes(config: RunConfig, facts: ModelFacts) -> float:
    """Bytes of the files that one rank keeps on its node's NVMe disk.

    For the optimizer: the master copy, two moments and the gradient in fp32 of each trained parameter. For offloaded
    parameters: all weights. A rule refuses quantized weights there.
    """
    zero = config.parallelism
    if not isinstance(zero, ZeroConfig):
        return 0.0
    parameters, num_bytes = count_parameters(config, facts), 0.0
    if zero.offload_optimizer is Offload.nvme:
        num_bytes += _OPTIMIZER_BYTES * parameters.trained
    if zero.offload_parameters is Offload.nvme:
        is_16_bit = is_cast_by_deepspeed(config) or config.precision.master_weights is MasterWeights.bf16
        num_bytes += (2 if is_16_bit else 4) * (parameters.trained + parameters.frozen)
    return num_bytes / world_size(config)


def deepspeed_settings(config: RunConfig) -> dict[str, Any]:
    """The DeepSpeed configuration of a resolved run with a ZeRO strategy.

    The optimizer and the schedule stay the Trainer's (torch's fused AdamW): DeepSpeed's FusedAdam would need nvcc on
    the machine. Source of the knobs: DeepSpeed 0.19 configuration reference.
    """
    zero = config.parallelism
    assert isinstance(zero, ZeroConfig)
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        **_number_format(config),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": _zero_optimization(config, zero),
    }


def uses_autocast(config: RunConfig) -> bool:
    """Whether DeepSpeed keeps fp32 weights and torch's autocast computes in bf16, as with one GPU and DDP."""
    return isinstance(config.parallelism, ZeroConfig) and mixes_formats(config) and not is_cast_by_deepspeed(config)


def forget_parameter_order(model: Any) -> None:
    """Make a ZeRO-3 engine record the parameter order of its next pass again; does nothing for other models.

    ZeRO-3 prefetches parameters in the order of the previous pass. A pass that ends differently, such as one without
    TRL's fused head, leaves parameters in flight that nothing waits for, and fails with "Cannot partition a param in
    flight". Needed until DeepSpeed has a public way to invalidate the recorded order; 0.19.8 has none.
    """
    offload = getattr(getattr(model, "optimizer", None), "parameter_offload", None)
    if offload is None:
        return
    coordinator = offload.get_param_coordinator()
    if not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()


def keep_format_of_persistent(model: Any) -> None:
    """Make a ZeRO-3 engine gather the small parameters that it keeps on every rank in their own format.

    With `torch_autocast` they are gathered in fp32 after a step, but in bf16 in a pass whose order is being recorded,
    so a resumed run would differ from an undisturbed one. Needed until DeepSpeed gathers them in one format; 0.19.8
    does not. Their gradients are then summed in that format, for which adapters have no buffer yet.
    """
    optimizer: Any = getattr(model, "optimizer", None)
    for parameter in getattr(optimizer, "persistent_parameters", []):
        if hasattr(parameter, _GATHERED_AS):
            delattr(parameter, _GATHERED_AS)
            if parameter.requires_grad and parameter.dtype not in optimizer.ipg_buckets:
                bucket = next(iter(optimizer.ipg_buckets.values()))
                buffer = bucket.buffer.new_empty(bucket.buffer.shape, dtype=parameter.dtype)
                optimizer.ipg_buckets[parameter.dtype] = type(bucket)(buffer=buffer)


def _number_format(config: RunConfig) -> dict[str, Any]:
    """The number format settings. DeepSpeed always casts to fp16 itself: its clipping ignores autocast's loss scale.

    DeepSpeed makes its fp32 copy from the cast weights, so weights published in another format are rounded to 16 bits.
    """
    if uses_autocast(config):
        # DeepSpeed sums gradients of linear layers in bf16 by default. With fp32 sums the losses were no closer.
        return {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    return {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}


def _zero_optimization(config: RunConfig, zero: ZeroConfig) -> dict[str, Any]:
    stage = STRATEGIES[zero.strategy].zero_stage
    settings: dict[str, Any] = {"stage": stage}
    values = {
        "overlap_comm": zero.overlap_comm,
        "allgather_bucket_size": zero.allgather_bucket_size,
        "reduce_bucket_size": _or_auto(zero.reduce_bucket_size),
        "round_robin_gradients": zero.round_robin_gradients,
        "sub_group_size": zero.sub_group_size,
    }
    if stage == 3:
        values |= {
            "stage3_max_live_parameters": zero.max_live_parameters,
            "stage3_max_reuse_distance": zero.max_reuse_distance,
            "stage3_prefetch_bucket_size": _or_auto(zero.prefetch_bucket_size),
            "stage3_param_persistence_threshold": _or_auto(zero.param_persistence_threshold),
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    settings |= {key: value for key, value in values.items() if value is not None}
    for key, target in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_parameters)):
        if target is not Offload.none:
            settings[key] = _offload(target, zero)
    if zero.offload_parameters is Offload.nvme and config.model.facts is not None:
        of_rank = math.ceil(largest_parameter(config.model.facts) / world_size(config))
        if of_rank > _NVME_BUFFER_ELEMENTS:
            settings["offload_param"]["buffer_size"] = of_rank
    return settings


def _or_auto(number: int | None) -> int | str:
    """A setting that the Trainer fills in if it is not set. Zero is a number of its own."""
    return "auto" if number is None else number


def _offload(target: Offload, zero: ZeroConfig) -> dict[str, Any]:
    settings: dict[str, Any] = {"device": target.value}
    if zero.pin_memory is not None:
        settings["pin_memory"] = zero.pin_memory
    if target is Offload.nvme:
        settings["nvme_path"] = zero.nvme_path and str(resolve_path(zero.nvme_path))  # DeepSpeed takes ~ for a name
    return settings
