"""The arguments of TRL's trainer for a resolved `RunConfig` and its batch plan. Pure functions.

Only arguments whose default in TRL or transformers differs from the run's value are set.
"""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from typing import Any

from tunebook.config.choices import (
    Checkpointing,
    Compute,
    Generation,
    MasterWeights,
    PackingMode,
    ScheduleName,
    Switch,
    TrackerName,
)
from tunebook.config.schema import RunConfig, ScheduleConfig
from tunebook.data.batch import BatchPlan
from tunebook.facts.methods import is_higher_better
from tunebook.facts.optimizers import OPTIMIZERS
from tunebook.model.fp8 import ALIGNMENT
from tunebook.parallel.ddp import ddp_arguments
from tunebook.parallel.deepspeed import deepspeed_settings, uses_autocast, zero_stage
from tunebook.parallel.fsdp import fsdp_arguments, is_fsdp


def trainer_arguments(config: RunConfig, plan: BatchPlan, folder: Path, *, has_validation: bool) -> dict[str, Any]:
    """Keyword arguments of a TRL config for a run in `folder`; `plan` is the solved batch, not an estimate."""
    assert plan.total_steps is not None and plan.accumulation is not None
    optimizer = config.optimizer
    arguments: dict[str, Any] = {
        "output_dir": str(folder / "checkpoints"),
        "max_steps": plan.total_steps,
        "per_device_train_batch_size": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.accumulation,
        "seed": config.training.seed,
        "max_grad_norm": config.training.max_grad_norm or 0.0,  # 0: the Trainer and DeepSpeed only measure the norm
        "optim": OPTIMIZERS[optimizer.name].optim,
        "learning_rate": optimizer.learning_rate,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "adam_epsilon": optimizer.epsilon,
        "full_determinism": config.training.deterministic,
        "use_liger_kernel": config.model.liger_kernel,
        "ddp_timeout": config.launcher.timeout_s,
        # Prepared documents: no tokenization, truncation or packing in the trainer.
        "max_length": None,
        "padding_free": config.packing.mode is PackingMode.isolated,
        "pad_to_multiple_of": row_multiple(config) if config.packing.mode is PackingMode.padded else None,
        "remove_unused_columns": False,
        # Our own records replace the trainer's progress bar and logs. Trackers get the same numbers.
        "disable_tqdm": True,
        "report_to": [] if config.tracking.name is TrackerName.none else [config.tracking.name.value],
        "project": config.tracking.project,
        "run_name": f"{folder.parent.name}/{folder.name}",
        "logging_strategy": "steps",
        "logging_steps": config.training.log_every_steps,
        "logging_nan_inf_filter": False,  # the default hides a loss that is not finite
    }
    arguments |= learning_rate_schedule(config.schedule, optimizer.learning_rate, plan.total_steps)
    arguments |= _numbers(config) | _saving(config, has_validation) | _parallelism(config)
    return arguments


def row_multiple(config: RunConfig) -> int | None:
    """The number of tokens of every row must be a multiple of this; None if any number is allowed."""
    multiple = ALIGNMENT if config.precision.compute is Compute.fp8 else 1
    multiple *= config.parallelism.sequence_group_size  # each rank has an equal part of a row
    return multiple if multiple > 1 else None


def optimizer_factory(config: RunConfig) -> tuple[Any, dict[str, Any]] | None:
    """The Trainer's `optimizer_cls_and_kwargs`; None if it builds the optimizer that `optim` names.

    transformers treats any callable that is not an optimizer class as a factory: it calls the result with the model.
    """
    factory = OPTIMIZERS[config.optimizer.name].factory
    if factory is None:
        return None
    module, _, function = factory.partition(":")
    build = getattr(import_module(module), function)
    return lambda: build, {"settings": config.optimizer}


def learning_rate_schedule(schedule: ScheduleConfig, learning_rate: float, total_steps: int) -> dict[str, Any]:
    """The schedule's arguments. A warm-up given as a share is rounded up to whole optimizer steps.

    A minimum is always passed as a share: for a learning rate, transformers reads the optimizer's default, which
    DeepSpeed's optimizers do not have.
    """
    warmup = schedule.warmup_steps or 0
    if schedule.warmup_share is not None:
        warmup = math.ceil(schedule.warmup_share * total_steps)
    arguments: dict[str, Any] = {"lr_scheduler_type": schedule.name.value, "warmup_steps": warmup}
    if schedule.name is ScheduleName.cosine_with_min_lr:
        share = schedule.min_learning_rate_share
        if share is None:
            share = (schedule.min_learning_rate or 0.0) / learning_rate
        arguments["lr_scheduler_kwargs"] = {"min_lr_rate": share}
    return arguments


def _numbers(config: RunConfig) -> dict[str, Any]:
    compute = config.precision.compute
    return {
        "bf16": compute in (Compute.bf16, Compute.fp8) and not _mixes_by_itself(config),  # TRL turns it on
        "fp16": compute is Compute.fp16,
        "tf32": True if config.precision.tf32 is Switch.enabled else None,
        "use_cpu": config.hardware.generation is Generation.cpu,
        "activation_checkpointing": config.activation.checkpointing is Checkpointing.enabled,  # TRL turns it on
    }


def _mixes_by_itself(config: RunConfig) -> bool:
    """True if accelerate must not get bf16: DeepSpeed would cast, and FSDP would convert bf16 weights to fp32."""
    is_all_bf16 = is_fsdp(config.parallelism.strategy) and config.precision.master_weights is MasterWeights.bf16
    return uses_autocast(config) or is_all_bf16


def _saving(config: RunConfig, has_validation: bool) -> dict[str, Any]:
    """`checkpoint.save`, not upstream, decides which checkpoints are kept."""
    training = config.training
    arguments: dict[str, Any] = {
        "save_strategy": "steps" if training.save_every_steps else "no",
        "eval_strategy": "steps" if has_validation and training.evaluate_every_steps else "no",
        "load_best_model_at_end": training.load_best_at_end,
    }
    if training.save_every_steps:
        arguments["save_steps"] = training.save_every_steps
    if training.evaluate_every_steps:
        arguments["eval_steps"] = training.evaluate_every_steps
    if training.load_best_at_end or training.early_stopping_patience:
        metric = training.best_metric
        arguments |= {"metric_for_best_model": metric, "greater_is_better": is_higher_better(metric)}
    return arguments


def _parallelism(config: RunConfig) -> dict[str, Any]:
    if zero_stage(config.parallelism.strategy) is not None:
        return {"deepspeed": deepspeed_settings(config)}
    if is_fsdp(config.parallelism.strategy):
        return fsdp_arguments(config)
    return ddp_arguments(config)
