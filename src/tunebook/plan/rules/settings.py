"""The rule about numbers outside of their ranges, and the one about settings that a run does not read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from tunebook.config.choices import Compute, Format, LauncherName, PeftMethod, ScheduleName, Source
from tunebook.config.identity import default_of
from tunebook.config.override_text import as_typed
from tunebook.config.ranges import demand
from tunebook.config.schema import RunConfig
from tunebook.errors import RulesError
from tunebook.facts.optimizers import OPTIMIZERS
from tunebook.facts.sharing import uses_nvme
from tunebook.facts.strategies import strategy_facts
from tunebook.plan.rules.frame import Finding, rule


@rule("out-of-range")
def out_of_range(config: RunConfig) -> Iterator[Finding]:
    """Require every number to be in its range of the schema.

    Others crash deep inside a library, or train something other than what was meant.
    """
    for key, value, setting in _numbers("", config):
        if (wanted := demand(setting, value)) is not None:
            yield Finding(f"must be {wanted}, not {value}", key, f"a number that is {wanted}")


def require_ranges(config: RunConfig) -> None:
    """Refuse numbers outside their ranges before anything is computed from them. Raises: RulesError."""
    problems = out_of_range.problems(config)
    if problems:
        raise RulesError(problems)


def _numbers(above: str, section: Any) -> Iterator[tuple[str, Any, dataclasses.Field[Any]]]:
    """The key, value and field of every number that is not null, and of each entry of a mapping of numbers."""
    for setting in dataclasses.fields(section):
        key, value = f"{above}{setting.name}", getattr(section, setting.name)
        entries = {f"{key}.{name}": entry for name, entry in value.items()} if isinstance(value, dict) else {key: value}
        for place, entry in entries.items():
            if isinstance(entry, int | float) or (isinstance(value, dict) and "limits" in setting.metadata):
                yield place, entry, setting
            elif dataclasses.is_dataclass(entry):
                yield from _numbers(f"{place}.", entry)


_OF_A_PART = (
    "format", "text_field", "ignore_keys", "chat_template_kwargs", "question_template", "answer_template"
)  # fmt: skip
_OF_ADAPTERS = (
    *("rank", "alpha", "dropout", "target_modules", "modules_to_save", "target_parameters", "rank_pattern"),
    *("alpha_pattern", "use_dora", "use_rslora"),
)
_OF_ZERO3 = (
    *("max_live_parameters", "max_reuse_distance", "prefetch_bucket_size", "param_persistence_threshold"),
    "sub_group_size",
)
_OF_ADAM = ("beta1", "beta2", "epsilon")
_OF_NODES = ("node_rank", "master_address", "master_port")


@rule("setting-ignored", is_error=False)
def setting_ignored(config: RunConfig) -> Iterator[Finding]:
    """Warn about settings that this run does not read, because they belong to another choice.

    Examples are adapter settings in a full fine-tune, ZeRO-3's settings under ZeRO-2, and a warm-up with the constant
    schedule. The run is the same as without them.
    """
    data, launcher, strategy = config.dataset, config.launcher, strategy_facts(config)
    is_mixture = data.source is Source.mixture
    has_turns = data.format not in (Format.text, Format.pretokenized) and data.source is not Source.synthetic
    has_warm_up = config.schedule.name is not ScheduleName.constant
    has_container = getattr(launcher, "container_image", None) is not None
    picks_best = config.training.load_best_at_end or config.training.early_stopping_patience is not None
    has_scaling = config.precision.compute is Compute.fp8 and config.peft.method is PeftMethod.full
    groups = (  # whether this run reads them, what else would, and the keys
        (config.model.path is None, "model.name", "model", ("revision",)),
        (data.source is Source.files, "dataset.source=files", "dataset", ("path",)),
        (data.source is Source.hub, "dataset.source=hub", "dataset", ("name", "subset", "revision", "train_split")),
        (is_mixture, "dataset.source=mixture", "dataset", ("parts",)),
        (not is_mixture or bool(data.validation_path), "a part (dataset.parts.NAME)", "dataset", _OF_A_PART),
        (has_turns, "a data set of conversations", "dataset", ("system_prompt",)),
        (has_scaling, "precision.compute=fp8 peft=full", "precision", ("fp8_scaling",)),
        (config.peft.method is not PeftMethod.full, "peft=lora", "peft", _OF_ADAPTERS),
        (OPTIMIZERS[config.optimizer.name].is_adam, "optimizer.name=adamw", "optimizer", _OF_ADAM),
        (has_warm_up, "schedule.name=constant_with_warmup", "schedule", ("warmup_steps", "warmup_share")),
        (not strategy.keeps_whole_weights, "parallelism=zero3", "parallelism", _OF_ZERO3),
        (uses_nvme(config), "parallelism=zero3_nvme", "parallelism", ("nvme_path",)),
        (strategy.within_groups, "parallelism=hsdp", "parallelism", ("shard_group_size",)),
        (launcher.name is LauncherName.local, "launcher=local", "launcher", _OF_NODES),
        (has_container, "launcher.container_image", "launcher", ("container_mounts",)),
        (picks_best, "training.load_best_at_end or training.early_stopping_patience", "training", ("best_metric",)),
        (bool(config.evaluation.tasks), "evaluation.tasks", "evaluation", ("before",)),
    )
    for is_read, reader, group, fields in groups:
        for field in fields if not is_read else ():
            key = f"{group}.{field}"
            value, default = getattr(getattr(config, group), field, None), default_of(key)
            if value and getattr(value, "name", value) != default:
                yield Finding(f"this run does not read it; it is for {reader}", key, f"{key}={as_typed(default)}")
