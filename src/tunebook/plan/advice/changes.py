"""Suggest up to three changes that make a too large run fit, fastest first, ready to paste.

Each change is tried as if it had been typed. A change that breaks a rule is left out. One that adds a warning is
offered only if too few others were found. The order of trying follows measured speeds: changes without a measured speed
come after those with one, and changes of what is learned come last. A typed key that does not apply to a change, or
would undo it, is listed as one to leave out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from tunebook.config.choices import (
    Checkpointing,
    Compute,
    Generation,
    OptimizerName,
    PackingMode,
    PeftMethod,
)
from tunebook.config.recipe_files import choice_schema, choice_values
from tunebook.config.schema import CHOICE_SCHEMAS, ParallelismConfig, RunConfig, world_size
from tunebook.errors import Problem
from tunebook.facts.architectures import VARLEN_ARCHITECTURES
from tunebook.facts.optimizers import OPTIMIZERS, RUNS_EVERYWHERE
from tunebook.facts.strategies import COPIED, DIVIDED, UNDECIDED
from tunebook.model.parameters import known_facts
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.plan.draft import Draft, draft_run
from tunebook.plan.longest import TILE_TOKENS, tiles_pay
from tunebook.plan.memory import estimate_memory
from tunebook.plan.rules.optimizing import optimizer_offloaded, optimizer_with_fsdp, optimizer_with_zero
from tunebook.plan.rules.precision import fp8_with_adapters, fp8_with_deepspeed
from tunebook.plan.speed.measured_speed import RECOMPUTED_SPEED, SELECTIVE, STORED_SPEED, rate_on_8, relative_speed

MAX_CHANGES = 3


@dataclass(frozen=True)
class Change:
    """A suggested change of the run."""

    overrides: tuple[str, ...]
    speed: float | None = None  # for ordering: relative to FSDP, as measured; None: not measured
    note: str = ""
    changes_learning: bool = False


@dataclass(frozen=True, kw_only=True)
class FittingChange:
    """A change with which the run is estimated to fit."""

    change: Change
    total_gib: float
    tokens_per_second_per_gpu: float | None = None  # estimated
    speed: float | None = None  # estimate relative to the requested run, as if that fitted
    left_out: tuple[str, ...] = ()  # typed overrides that conflict with it
    warnings: tuple[str, ...] = ()  # ids of warnings that the requested run does not have
    host_gib: float | None = None  # peak of each node's host
    is_in_host_memory: bool = False  # whether the change moves something there from the GPUs
    host_fits: bool | None = None  # None: unknown

    @property
    def cost(self) -> str:
        """The cost of the change as text."""
        if self.tokens_per_second_per_gpu is None:
            cost = "speed not estimated"
        elif self.speed is None:
            cost = f"estimated {self.tokens_per_second_per_gpu:,.0f} tokens/s per GPU"
        else:
            speed = f"{self.tokens_per_second_per_gpu:,.0f} tokens/s per GPU"
            cost = f"estimated {speed}, {self.speed:.0%} of the run as asked"
        without = f"leave out {' '.join(self.left_out)}" if self.left_out else ""
        warnings = [f"warning {problem_id}" for problem_id in self.warnings]
        return "; ".join(part for part in (without, self.change.note, *warnings, cost) if part)

    def to_json(self) -> dict[str, Any]:
        """The change as listed by `plan --json`."""
        speed = self.tokens_per_second_per_gpu
        return {
            "overrides": list(self.change.overrides),
            "leave_out": list(self.left_out),
            "total_gib": round(self.total_gib, 3),
            "host_gib": None if self.host_gib is None else round(self.host_gib, 3),
            "warnings": list(self.warnings),
            "tokens_per_second_per_gpu": None if speed is None else round(speed, 1),
            "speed": None if self.speed is None else round(self.speed, 3),
            "cost": self.cost,
        }

    @property
    def typed(self) -> str:
        """What to type after the recipe."""
        return " ".join(self.change.overrides)

    @property
    def effect(self) -> str:
        """The memory that the run then takes, and the cost, as text."""
        return f"({self.total_gib:.1f} GiB{self._of_the_host()}; {self.cost})"

    def line(self) -> str:
        """The change as a line of a log."""
        return f"{self.typed}   {self.effect}"

    def _of_the_host(self) -> str:
        """The host memory, if the change moves something there."""
        if self.host_gib is None or not self.is_in_host_memory:
            return ""
        unknown = ", whose capacity is unknown" if self.host_fits is None else ""
        return f", and {self.host_gib:,.1f} GiB of each host{unknown}"


def _sharded() -> tuple[Change, ...]:
    """The strategies whose speeds were measured under equal conditions, relative to FSDP."""
    rates = {strategy: rate_on_8(strategy) for strategy in DIVIDED}
    fsdp = rates[DIVIDED[0]]
    return tuple(
        Change((f"parallelism={strategy.name}",), rate / fsdp)
        for strategy, rate in rates.items()
        if rate is not None and fsdp is not None
    )


_SELECTIVE = Change(("activation=selective",), SELECTIVE.gain)
_CHECKPOINTING = Change(("activation=checkpointing",), RECOMPUTED_SPEED / STORED_SPEED)
_SHARDED = _sharded()
_ALONE = Change(("parallelism=single",), 1.0)  # no communication
_COPIES = Change((f"parallelism={COPIED.name}",), relative_speed(COPIED, DIVIDED[0]))
_OFFLOADED = (
    Change(("parallelism=zero2_offload",), note="optimizer state in host memory"),
    Change(("parallelism=fsdp_offload",), note="weights and optimizer state in host memory"),
    Change(("parallelism=zero3_offload",), note="weights and optimizer state in host memory"),
)
# A requested option without a measured speed; a run without it is no slower.
_KEPT_ON_GPU = Change(("activation.offload=false",), 1.0, note="activations stay on the GPU")
_SMALLER_PASSES = Change(("training.micro_batch_size=1",), note="more and smaller passes")
_IN_8_BITS = "optimizer state in 8 bits: learns slightly differently"
_OTHER_LEARNING = (
    Change(("optimizer=adamw_8bit",), note=_IN_8_BITS, changes_learning=True),
    Change(("peft=lora",), note="trains an adapter instead of the model", changes_learning=True),
    Change(("peft=qlora",), note="trains an adapter of the model in 4 bits", changes_learning=True),
)
_ADAPTERS = _OTHER_LEARNING[1:]
# The rules against optimizers that a change would need AdamW for, and against fp8 where it would need bf16.
_AGAINST_OPTIMIZERS = (optimizer_with_fsdp, optimizer_with_zero, optimizer_offloaded)
_AGAINST_FP8 = (fp8_with_deepspeed, fp8_with_adapters)
# Strategies that divide the frozen weights: the fastest one, and one with host memory. Each try takes a third of a
# second.
_WITH_ADAPTERS = (("parallelism=fsdp",), ("parallelism=fsdp_offload",))
_GROUP = "parallelism.sequence_group_size"
_TILES = "activation.mlp_tile_tokens"
_WITHOUT_STATES = {
    "activation",
    "activation.offload",
    _TILES,
    "packing.row_length",
    "training.micro_batch_size",
    _GROUP,
}
_JUDGED_ALWAYS = {"optimizer", "optimizer.name", "precision", "precision.compute"}
_WITH_OWN_KEYS = {place.partition("/")[0] for place in CHOICE_SCHEMAS}  # groups with a choice that has its own keys


def changes_that_fit(
    recipe: str | None, overrides: list[str], recipes_dirs: list[Path], draft: Draft
) -> list[FittingChange]:
    """Try each change on top of the typed overrides; return up to three. `draft` is the run that does not fit."""
    found: list[FittingChange] = []
    warned: list[FittingChange] = []  # offered if too few others fit
    refused: list[Change] = []
    for change in _candidates(draft):
        if any(set(fitting.change.overrides) <= _overrides_or_fewer(change) for fitting in found):
            continue  # a smaller change fits already
        if _exceeds_by_states(change, draft, overrides) or any(_only_adds_savings(change, other) for other in refused):
            continue
        tried, left_out = _try(change, recipe, overrides, recipes_dirs, draft)
        fitting = _fitting(change, tried, draft, left_out) if tried.fits and tried.exit_code == 0 else None
        problems = _new_problems(tried, draft)
        is_refused = tried.error is not None or any(problem.is_error for problem in problems)
        if is_refused or (fitting is not None and problems):
            refused.append(change)  # variants that only save more memory are refused too, or have the same warnings
        if fitting is not None:
            (warned if problems else found).append(fitting)
        if len(found) == MAX_CHANGES:
            break
    return sorted([*found, *warned][:MAX_CHANGES], key=_offer_order)


def _offer_order(fitting: FittingChange) -> tuple[bool, bool, float]:
    """Sort key: unchanged learning first, then no warnings, then speed."""
    return fitting.change.changes_learning, bool(fitting.warnings), -(fitting.tokens_per_second_per_gpu or 0)


def _exceeds_by_states(change: Change, asked: Draft, overrides: list[str]) -> bool:
    """Whether the states alone exceed the GPU's memory, which an estimate shows without composing the change.

    Only strategies with the settings of their files are judged: other settings may move the states. A pass that keeps
    more may peak when other states are present, and then needs even more.
    """
    assert asked.machine is not None and asked.composition is not None
    is_tuned = any(word.startswith("parallelism.") for word in overrides)
    is_tuned = is_tuned or any("parallelism" in recipe.body for recipe in asked.composition.origins.recipes)
    is_adapted = any(word.startswith("peft") for word in overrides)
    judged = {*_WITHOUT_STATES, *_JUDGED_ALWAYS, *["parallelism"] * (not is_tuned), *["peft"] * (not is_adapted)}
    if not {word.partition("=")[0] for word in change.overrides} <= judged:
        return False
    config = _with_choices(change, asked.composition.config)
    if asked.resolution is not None:  # adapters have other traces of the layers, which their states do not need
        config = replace(config, model=replace(config.model, facts=asked.resolution.config.model.facts))
    resolved = resolve_auto(config, asked.machine).config
    facts, capacity = known_facts(resolved), resolved.hardware.memory_gib
    return facts is not None and capacity is not None and estimate_memory(resolved, facts).states_gib > capacity


def _with_choices(change: Change, config: RunConfig) -> RunConfig:
    """A configuration with the strategy, optimizer, method and number format of a change, without composing it."""
    for key, _, value in (word.partition("=") for word in change.overrides):
        if key == "parallelism":
            config = replace(config, parallelism=_settings_of(value))
        elif key in ("optimizer", "optimizer.name"):
            config = replace(config, optimizer=replace(config.optimizer, name=OptimizerName[value]))
        elif key == "peft":
            config = replace(config, peft=replace(config.peft, method=PeftMethod[value]))
        elif key in ("precision", "precision.compute"):
            config = replace(config, precision=replace(config.precision, compute=Compute[value]))
    return config


@cache
def _settings_of(choice: str) -> ParallelismConfig:
    """The settings of a strategy's file."""
    kind = choice_schema("parallelism", choice)
    schema = ParallelismConfig if kind is None else CHOICE_SCHEMAS[f"parallelism/{kind}"]
    settings: Any = OmegaConf.merge(OmegaConf.structured(schema), choice_values("parallelism", choice))
    found: Any = OmegaConf.to_object(settings)
    return cast(ParallelismConfig, found)


def _only_adds_savings(change: Change, refused: Change) -> bool:
    """Whether a change is a refused one plus settings that only save memory."""
    more = set(change.overrides) - set(refused.overrides)
    return (
        set(refused.overrides) < set(change.overrides) and {word.partition("=")[0] for word in more} <= _WITHOUT_STATES
    )


def _try(
    change: Change, recipe: str | None, overrides: list[str], recipes_dirs: list[Path], asked: Draft
) -> tuple[Draft, tuple[str, ...]]:
    """Draft the run with a change; also return the typed overrides that were left out because they conflict."""
    groups = {word.partition("=")[0] for word in change.overrides} & _WITH_OWN_KEYS
    below = [word for word in overrides if word.partition(".")[0] in groups]
    tried = draft_run(recipe, [*overrides, *change.overrides], recipes_dirs)
    is_wrong = bool(tried.error or _new_problems(tried, asked))
    if not below or (not is_wrong and (tried.fits or not any(_choice_at(word, tried) for word in below))):
        return tried, ()
    bare = draft_run(recipe, [*(word for word in overrides if word not in below), *change.overrides], recipes_dirs)
    named = {problem.key for problem in _new_problems(tried, asked)}
    unwanted = tuple(
        word
        for word in below
        if word.partition("=")[0] in named
        or not _is_known(word, bare)
        or _choice_at(word, tried) != _choice_at(word, bare)  # it undoes the change
    )
    if not unwanted:
        return tried, ()
    kept = [word for word in overrides if word not in unwanted]
    return draft_run(recipe, [*kept, *change.overrides], recipes_dirs), unwanted


def _is_known(word: str, bare: Draft) -> bool:
    """Whether the group's new choice has the key of a typed override, judged by a run without it."""
    if bare.composition is None:
        return True  # another error
    group, _, name = word.partition("=")[0].partition(".")
    return name.partition(".")[0] in {field.name for field in fields(getattr(bare.composition.config, group))}


def _choice_at(word: str, draft: Draft) -> Enum | None:
    """The enum value of a run at an override's key; None for numbers and switches, which only tune a choice."""
    if draft.composition is None:
        return None
    group, _, name = word.partition("=")[0].partition(".")
    value = getattr(getattr(draft.composition.config, group), name, None)
    return value if isinstance(value, Enum) else None


def _new_problems(tried: Draft, asked: Draft) -> list[Problem]:
    """Problems of the changed run that the original run does not have."""
    before = {problem.id for problem in asked.problems}
    return [problem for problem in tried.problems if problem.id not in before]


def _overrides_or_fewer(change: Change) -> set[str]:
    """The overrides of a change, and those of the variants that recompute less or divide rows among fewer GPUs."""
    overrides = set(change.overrides)
    overrides |= set(_SELECTIVE.overrides) if overrides & set(_CHECKPOINTING.overrides) else set()
    sizes = [int(word.partition("=")[2]) for word in change.overrides if word.startswith(f"{_GROUP}=")]
    return overrides | {f"{_GROUP}={size}" for most in sizes for size in range(2, most)}


def _fitting(change: Change, tried: Draft, asked: Draft, left_out: tuple[str, ...]) -> FittingChange:
    """Describe a change. `tried` is the run with it, which fits."""
    assert tried.memory is not None and tried.memory.memory.total is not None and tried.host is not None
    speed = tried.time.tokens_per_second_per_gpu if tried.time else None
    before = asked.time.tokens_per_second_per_gpu if asked.time else None
    if _is_compiled(asked) and not _is_compiled(tried):  # which is most of what it costs
        change = replace(change, note="; ".join(filter(None, [change.note, "blocks are not compiled with it"])))
    return FittingChange(
        change=change,
        total_gib=tried.memory.memory.total,
        tokens_per_second_per_gpu=speed,
        speed=speed / before if speed and before else None,
        left_out=left_out,
        warnings=tuple(dict.fromkeys(problem.id for problem in _new_problems(tried, asked))),
        host_gib=tried.host.memory.total,
        is_in_host_memory=bool(tried.host.memory.offload),
        host_fits=tried.host.fits,
    )


def _is_compiled(draft: Draft) -> bool:
    return draft.resolution is not None and bool(draft.resolution.config.model.compile_layers)


def _candidates(draft: Draft) -> list[Change]:
    """Every change and every pair with one that keeps less, in the order in which they are offered."""
    assert draft.resolution is not None
    config = draft.resolution.config
    single = _strategies(draft, config)
    smaller = [_SMALLER_PASSES] * ((config.training.micro_batch_size or 1) > 1)
    single += smaller or _groups(config)
    strategies_of_adapters = [change for change in single if change.overrides in _WITH_ADAPTERS]
    single += _OTHER_LEARNING if OPTIMIZERS[config.optimizer.name].in_8bit else _ADAPTERS
    single += [_combined(strategy, adapter) for adapter in _ADAPTERS for strategy in strategies_of_adapters]
    single = [_as_rules_allow(_with_effective_optimizer(change, draft), draft, config) for change in single]
    sparing = _without_host_memory(config) if draft.host is not None and draft.host.fits is False else []
    sparing = [_with_effective_optimizer(change, draft) for change in sparing]
    shorter, less = _shorter_rows(draft), _keeping_less(config)
    pairs = [_combined(change, other) for change in (*sparing, *single) for other in (*shorter, *less)]
    pairs += [_combined(change, other) for change in single if change not in smaller for other in smaller]
    pairs += [_combined(change, other) for change in shorter for other in less]
    # Alone they come first: if they are enough, no other strategy is offered with them.
    return [*sparing, *shorter, *sorted([*single, *less, *pairs], key=_sort_key)]


def _strategies(draft: Draft, config: RunConfig) -> list[Change]:
    """Strategies that gain from this many GPUs, except the requested one or the one that auto chose."""
    asked = draft.composition.groups["parallelism"] if draft.composition is not None else UNDECIDED.name
    taken = config.parallelism.strategy.name if asked == UNDECIDED.name else asked
    offloaded = () if config.hardware.generation is Generation.cpu else _OFFLOADED  # a CPU trains in host memory
    strategies = chain((_COPIES,), _SHARDED, offloaded) if world_size(config) > 1 else (_ALONE, *offloaded)
    return [change for change in strategies if change.overrides != (f"parallelism={taken}",)]


def _groups(config: RunConfig) -> list[Change]:
    """Larger groups of GPUs that can share a row of one long document, as the rules sequence-group-* allow."""
    facts, gpus, row = config.model.facts, config.hardware.gpus_per_node or 1, config.packing.row_length or 0
    is_shortest = config.packing.mode is PackingMode.isolated and row < 2 * config.training.max_length
    is_on_gpus = config.hardware.generation is not Generation.cpu
    if facts is None or facts.architecture not in VARLEN_ARCHITECTURES or not (is_shortest and is_on_gpus):
        return []
    whole = math.gcd(gpus, facts.num_attention_heads, facts.num_key_value_heads)
    sizes = (size for size in range(config.parallelism.sequence_group_size + 1, whole + 1) if whole % size == 0)
    return [Change((f"{_GROUP}={size}",), note=f"{size} GPUs share each row") for size in sizes]


def _with_effective_optimizer(change: Change, draft: Draft) -> Change:
    """Set the optimizer by `optimizer.name` if that key was set.

    The group's choice would have no effect then.
    """
    overrides = tuple(
        _to_type("optimizer", "name", OptimizerName[word.partition("=")[2]], draft)
        if word.startswith("optimizer=")
        else word
        for word in change.overrides
    )
    return replace(change, overrides=overrides)


def _as_rules_allow(change: Change, draft: Draft, config: RunConfig) -> Change:
    """Add AdamW if the optimizer conflicts with the change, and bf16 if fp8 conflicts with it."""
    changed = _with_choices(change, config)
    if changed.optimizer is config.optimizer and any(rule.find(changed) for rule in _AGAINST_OPTIMIZERS):
        adamw = (_to_type("optimizer", "name", RUNS_EVERYWHERE, draft),)
        change = _combined(change, Change(adamw, 1.0, **_effect_of_adamw(config.optimizer.name)))
    if any(rule.find(changed) for rule in _AGAINST_FP8):
        bf16 = (_to_type("precision", "compute", Compute.bf16, draft),)
        change = _combined(change, Change(bf16, note="computes in bf16 instead of fp8: more exactly"))
    return change


def _effect_of_adamw(name: OptimizerName) -> dict[str, Any]:
    """The effect of replacing an optimizer with AdamW."""
    facts = OPTIMIZERS[name]
    if facts.same_steps_unpaged is RUNS_EVERYWHERE:
        return {"note": "the same steps"}
    if facts.is_8bit:
        return {"note": "optimizer state in 32 bits instead of 8: learns no less exactly"}
    return {"note": f"AdamW in place of {name.name}: learns differently", "changes_learning": True}


def _to_type(group: str, field: str, value: Enum, draft: Draft) -> str:
    """The override for a group's choice; sets the key itself if that was set and would undo the choice."""
    assert draft.composition is not None
    origins = draft.composition.origins
    bodies = [recipe.body.get(group) for recipe in origins.recipes]
    is_set = any(isinstance(body, dict) and field in body for body in bodies)
    is_set = is_set or origins.override(f"{group}.{field}") is not None
    return f"{group}.{field}={value.name}" if is_set else f"{group}={value.name}"


def _without_host_memory(config: RunConfig) -> list[Change]:
    """Changes that remove requested uses of host memory without changing what is learned."""
    changes = [_KEPT_ON_GPU] if config.activation.offload else []
    if (name := OPTIMIZERS[config.optimizer.name].same_steps_unpaged) is not None:
        note = "the same steps, with the optimizer's state on the GPU"
        changes.append(Change((f"optimizer={name.name}",), 1.0, note=note))
    return changes


def _shorter_rows(draft: Draft) -> list[Change]:
    """Reduce requested longer rows to the longest document; a step then has the same documents in more rows."""
    asked = draft.composition.config if draft.composition is not None else None
    if asked is None or (asked.packing.row_length or 0) <= asked.training.max_length:
        return []
    counted = "tokens" if asked.training.global_samples is None else "documents"
    note = f"shorter rows, as many {counted} in each step"
    return [Change((f"packing.row_length={asked.training.max_length}",), 1.0, note=note)]


def _keeping_less(config: RunConfig) -> list[Change]:
    """Changes that keep less of the forward pass in memory than the requested run."""
    now = config.activation.checkpointing
    can_be_selective = bool(config.model.compile_layers) and now is Checkpointing.disabled
    recomputing = [_CHECKPOINTING] * (now is not Checkpointing.enabled)
    return [_SELECTIVE] * can_be_selective + recomputing + _tiles(config, recomputing)


def _tiles(config: RunConfig, recomputing: list[Change]) -> list[Change]:
    """MLPs in tiles, for packed rows that one long document may fill."""
    if not tiles_pay(config) or config.activation.mlp_tile_tokens is not None:
        return []
    again = [word for change in recomputing for word in change.overrides]
    return [Change((*again, f"{_TILES}={TILE_TOKENS}"), note="MLPs in tiles")]


def _combined(first: Change, second: Change) -> Change:
    speeds = (first.speed, second.speed)
    return Change(
        overrides=first.overrides + second.overrides,
        speed=None if None in speeds else (first.speed or 0) * (second.speed or 0),
        note="; ".join(note for note in (first.note, second.note) if note),
        changes_learning=first.changes_learning or second.changes_learning,
    )


def _sort_key(change: Change) -> tuple[bool, float]:
    """Sort key: unchanged learning first, then speed."""
    return change.changes_learning, -(change.speed or 0)
