"""Rules about the optimizer and the learning rate schedule."""

from __future__ import annotations

from collections.abc import Iterator

from tunebook.config.choices import Compute, Generation, ScheduleName
from tunebook.config.identity import default_of
from tunebook.config.schema import RunConfig, ZeroConfig
from tunebook.facts.generations import GENERATIONS
from tunebook.facts.optimizers import OPTIMIZERS, RUNS_EVERYWHERE
from tunebook.facts.sharing import offloaded_states
from tunebook.facts.strategies import COPIED, SPARING_THE_HOST, strategy_facts
from tunebook.plan.rules.frame import Finding, rule

_ADAMW = f"optimizer.name={RUNS_EVERYWHERE.name}"


@rule("optimizer-without-gpu", "optimizer.name")
def optimizer_without_gpu(config: RunConfig) -> Finding | None:
    """Refuse a GPU optimizer on a CPU: bitsandbytes' 8-bit and paged optimizers are GPU kernels."""
    name = config.optimizer.name
    if not OPTIMIZERS[name].needs_gpu or config.hardware.generation is not Generation.cpu:
        return None
    return Finding(f"{name.name} needs a GPU", _ADAMW)


@rule("optimizer-without-bf16", "optimizer.name")
def optimizer_without_bf16(config: RunConfig) -> Finding | None:
    """Refuse an optimizer that needs bf16 on a GPU without it; CPUs compute bf16 slowly but correctly.

    torch's Muon orthogonalizes each update by products in bf16.
    """
    name, generation = config.optimizer.name, config.hardware.generation
    has_bf16 = generation in (Generation.auto, Generation.cpu) or GENERATIONS[generation].has_bf16
    if not OPTIMIZERS[name].needs_bf16 or has_bf16:
        return None
    return Finding(f"{name.name} needs bf16, which {generation.name} lacks", _ADAMW)


@rule("optimizer-with-fsdp", "optimizer.name")
def optimizer_with_fsdp(config: RunConfig) -> Finding | None:
    """Refuse an optimizer without DTensor support under FSDP.

    bitsandbytes does not support sharded tensors: an illegal memory access in the optimizer step is reported.
    Adafactor mixes them with plain tensors.
    """
    name, strategy = config.optimizer.name, config.parallelism.strategy
    facts = OPTIMIZERS[name]
    if facts.takes_dtensors or not strategy_facts(config).is_fsdp:
        return None
    message = f"{name.name} does not work on the sharded tensors of {strategy.name}"
    may_use_zero = facts.takes_flat_pieces and config.precision.compute is not Compute.fp8  # see fp8-with-deepspeed
    return Finding(message, _ADAMW + (" or parallelism=zero3" if may_use_zero else ""))


@rule("optimizer-with-zero", "optimizer.name")
def optimizer_with_zero(config: RunConfig) -> Finding | None:
    """Refuse an optimizer of matrices with ZeRO's flat slices.

    DeepSpeed joins all parameters and passes flat slices. Muon's update and Adafactor's state are defined for
    matrices only.
    """
    name, strategy = config.optimizer.name, config.parallelism.strategy
    facts = OPTIMIZERS[name]
    if facts.takes_flat_pieces or not strategy_facts(config).is_zero:
        return None
    message = f"{name.name} needs whole matrices, and {strategy.name} passes it flat slices of them"
    other = SPARING_THE_HOST if facts.takes_dtensors else COPIED
    return Finding(message, f"{_ADAMW} or parallelism={other.name}")


@rule("optimizer-offloaded", "optimizer.name")
def optimizer_offloaded(config: RunConfig) -> Finding | None:
    """Refuse an optimizer on the GPU with parameters or states on the host.

    Offloaded parameters are updated on the host. bitsandbytes has only GPU kernels, and Muon's products would take
    minutes a step there.
    """
    name, settings = config.optimizer.name, config.parallelism
    if OPTIMIZERS[name].can_be_offloaded:
        return None
    field = "offload_optimizer" if isinstance(settings, ZeroConfig) else "offload_parameters"
    if field not in offloaded_states(config) or optimizer_with_fsdp.find(config) is not None:
        return None
    message = f"{name.name} runs on the GPU, and parallelism.{field} moves its states to the host"
    return Finding(message, f"{_ADAMW} or parallelism.{field}=none")


@rule("optimizer-settings-ignored", is_error=False)
def optimizer_settings_ignored(config: RunConfig) -> Iterator[Finding]:
    """Warn about settings that the optimizer does not use and that differ from their defaults."""
    optimizer = config.optimizer
    for field in ("beta1", "beta2", "epsilon"):
        default = default_of(f"optimizer.{field}")
        if field not in OPTIMIZERS[optimizer.name].settings and getattr(optimizer, field) != default:
            message = f"{optimizer.name.name} does not use {field}"
            yield Finding(message, f"optimizer.{field}={default:g} or {_ADAMW}", key=f"optimizer.{field}")


@rule("two-warm-ups", "schedule.warmup_steps")
def two_warm_ups(config: RunConfig) -> Finding | None:
    """Allow at most one of the two warm-up settings: both set the same number."""
    steps, share = config.schedule.warmup_steps, config.schedule.warmup_share
    if steps is None or share is None:
        return None
    message = f"warmup_steps={steps} and warmup_share={share:g} both set the warm-up"
    return Finding(message, "schedule.warmup_share=null or schedule.warmup_steps=null")


@rule("two-floors", "schedule.min_learning_rate")
def two_floors(config: RunConfig) -> Finding | None:
    """Allow at most one of the two floor settings: both set the same number."""
    floor, share = config.schedule.min_learning_rate, config.schedule.min_learning_rate_share
    if floor is None or share is None:
        return None
    message = f"min_learning_rate={floor:g} and min_learning_rate_share={share:g} both set the floor"
    return Finding(message, "schedule.min_learning_rate=null")


@rule("floor-without-its-schedule")
def floor_without_its_schedule(config: RunConfig) -> Iterator[Finding]:
    """Refuse floors of other schedules, which end at zero or never fall."""
    name = config.schedule.name
    if name is ScheduleName.cosine_with_min_lr:
        return
    for field in ("min_learning_rate", "min_learning_rate_share"):
        if getattr(config.schedule, field) is not None:
            key = f"schedule.{field}"
            fix = f"{key}=null or schedule.name=cosine_with_min_lr"
            yield Finding(f"schedule.name={name.name} has no floor", fix, key=key)


@rule("schedule-without-floor", "schedule.min_learning_rate")
def schedule_without_floor(config: RunConfig) -> Finding | None:
    """Require the floor of cosine_with_min_lr, which transformers refuses without one."""
    schedule = config.schedule
    if schedule.name is not ScheduleName.cosine_with_min_lr:
        return None
    if schedule.min_learning_rate is not None or schedule.min_learning_rate_share is not None:
        return None
    return Finding("cosine_with_min_lr needs the learning rate it ends at", "schedule.min_learning_rate_share=0.1")


@rule("warm-up-longer-than-run", "schedule.warmup_steps", is_error=False)
def warm_up_longer_than_run(config: RunConfig) -> Finding | None:
    """Warn about a warm-up of `max_steps` or more: the learning rate would never reach its peak."""
    steps, total = config.schedule.warmup_steps, config.training.max_steps
    if steps is None or total is None or steps < total:
        return None
    message = f"{steps} steps of warm-up do not fit into training.max_steps={total}"
    return Finding(message, f"schedule.warmup_steps={max(0, total // 10)}")


@rule("warm-up-ignored", is_error=False)
def warm_up_ignored(config: RunConfig) -> Iterator[Finding]:
    """Warn about a warm-up with the constant schedule, which starts at the full learning rate."""
    if config.schedule.name is not ScheduleName.constant:
        return
    for field in ("warmup_steps", "warmup_share"):
        if getattr(config.schedule, field):
            key = f"schedule.{field}"
            fix = f"schedule.name=constant_with_warmup or {key}=null"
            yield Finding("schedule.name=constant has no warm-up", fix, key=key)
