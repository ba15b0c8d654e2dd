"""Rules about the optimizer and the learning rate schedule."""

from __future__ import annotations

from collections.abc import Iterator

from tunebook.config.choices import Generation, ScheduleName
from tunebook.config.schema import RunConfig, ZeroConfig
from tunebook.facts.generations import GENERATIONS
from tunebook.facts.optimizers import OPTIMIZERS
from tunebook.facts.sharing import offloaded_states
from tunebook.facts.strategies import strategy_facts
from tunebook.plan.rules.frame import Finding, rule

_KEY = "optimizer.name"
_ADAMW = "optimizer.name=adamw"


@rule("optimizer-without-bf16", _KEY, _ADAMW)
def optimizer_without_bf16(config: RunConfig) -> Iterator[str]:
    """Refuse an optimizer that needs bf16 on a GPU without it; CPUs compute bf16 slowly but correctly.

    torch's Muon orthogonalizes each update by products in bf16.
    """
    name, generation = config.optimizer.name, config.hardware.generation
    has_bf16 = generation in (Generation.auto, Generation.cpu) or GENERATIONS[generation].has_bf16
    if OPTIMIZERS[name].needs_bf16 and not has_bf16:
        yield f"{name.name} needs bf16, which {generation.name} lacks"


@rule("optimizer-with-fsdp", _KEY, f"{_ADAMW} or parallelism=ddp")
def optimizer_with_fsdp(config: RunConfig) -> Iterator[str]:
    """Refuse an optimizer without DTensor support under FSDP.

    bitsandbytes does not support sharded tensors: an illegal memory access in the optimizer step is reported.
    Adafactor mixes them with plain tensors.
    """
    name = config.optimizer.name
    if strategy_facts(config).is_fsdp and not OPTIMIZERS[name].takes_dtensors:
        yield f"{name.name} does not work on the sharded tensors of {config.parallelism.strategy.name}"


@rule("optimizer-with-zero", _KEY, f"{_ADAMW} or parallelism=ddp")
def optimizer_with_zero(config: RunConfig) -> Iterator[str]:
    """Refuse an optimizer of matrices with ZeRO's flat slices.

    DeepSpeed joins all parameters and passes flat slices. Muon's update and Adafactor's state are defined for
    matrices only.
    """
    name = config.optimizer.name
    if strategy_facts(config).is_zero and not OPTIMIZERS[name].takes_flat_pieces:
        yield f"{name.name} needs whole matrices, and {config.parallelism.strategy.name} passes it flat slices of them"


@rule("optimizer-offloaded", _KEY, f"{_ADAMW}, or a strategy without offloading")
def optimizer_offloaded(config: RunConfig) -> Iterator[str]:
    """Refuse an optimizer on the GPU with parameters or states on the host.

    Offloaded parameters are updated on the host. bitsandbytes has only GPU kernels, and Muon's products would take
    minutes a step there.
    """
    facts, settings = OPTIMIZERS[config.optimizer.name], config.parallelism
    field = "offload_optimizer" if isinstance(settings, ZeroConfig) else "offload_parameters"
    is_refused_by_fsdp = strategy_facts(config).is_fsdp and not facts.takes_dtensors
    if field in offloaded_states(config) and not facts.can_be_offloaded and not is_refused_by_fsdp:
        yield f"{config.optimizer.name.name} runs on the GPU, and parallelism.{field} moves its states to the host"


@rule("floor-without-its-schedule", fix="schedule=cosine_with_min_lr schedule.min_learning_rate_share=0.1")
def floor_without_its_schedule(config: RunConfig) -> Iterator[Finding]:
    """Require a floor of the learning rate with cosine_with_min_lr, and refuse it with other schedules.

    transformers refuses cosine_with_min_lr without one. Other schedules end at zero or never fall.
    """
    schedule = config.schedule
    key = f"schedule.min_learning_rate{'_share' if schedule.min_learning_rate_share is not None else ''}"
    has_floor = schedule.min_learning_rate is not None or schedule.min_learning_rate_share is not None
    if has_floor and schedule.name is not ScheduleName.cosine_with_min_lr:
        yield Finding(f"schedule.name={schedule.name.name} has no floor", key, f"{key}=null")
    if not has_floor and schedule.name is ScheduleName.cosine_with_min_lr:
        yield Finding("cosine_with_min_lr needs the learning rate that it ends at", key)


@rule("schedule-set-twice")
def schedule_set_twice(config: RunConfig) -> Iterator[Finding]:
    """Allow at most one of the two settings of the warm-up, and of the two of the floor."""
    schedule = config.schedule
    if schedule.warmup_steps is not None and schedule.warmup_share is not None:
        message = "warmup_steps and warmup_share both set the warm-up"
        yield Finding(message, "schedule.warmup_steps", "schedule.warmup_share=null")
    if schedule.min_learning_rate is not None and schedule.min_learning_rate_share is not None:
        message = "min_learning_rate and min_learning_rate_share both set the floor"
        yield Finding(message, "schedule.min_learning_rate", "schedule.min_learning_rate_share=null")
