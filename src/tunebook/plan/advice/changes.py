"""What would make a run fit that is too large: up to three changes, the fastest first, ready to paste.

Each change is tried as if it had been typed. One that breaks a rule is left out; one that brings a new warning is
offered only where too few others were found. The order of trying follows from measured speeds: changes without a
measured speed come after those with one, and changes of what is learned come last. A typed key that a change has no use
for, or that would undo it, is named as one to leave out.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Any

from tunebook.config.choices import Checkpointing, Compute, Generation, Offload, OptimizerName, Strategy
from tunebook.config.frozen import PARALLELISM_SCHEMAS
from tunebook.config.schema import CHOICE_SCHEMAS, ParallelismConfig, RunConfig, ZeroConfig, world_size
from tunebook.errors import Problem
from tunebook.facts.optimizers import OPTIMIZERS, RUNS_EVERYWHERE, OptimizerFacts
from tunebook.facts.strategies import COPIED, DIVIDED, OFFLOADING_OPTIMIZER, UNDECIDED
from tunebook.model.parameters import known_facts
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.plan.draft import Draft, draft_run
from tunebook.plan.memory import estimate_memory
from tunebook.plan.speed.measured_speed import RECOMPUTED, SELECTIVE, STORED, rate_on_8, relative_speed

HOW_MANY = 3


@dataclass(frozen=True)
class Change:
    """Something to type."""

    words: tuple[str, ...]
    speed: float | None = None  # by which changes are ordered: of FSDP's, as measured; None: not measured
    note: str = ""
    changes_learning: bool = False


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """A change with which the run is estimated to fit."""

    change: Change
    total_gib: float
    tokens_per_second_per_gpu: float | None = None  # estimated
    speed: float | None = None  # of the run as asked, by estimate, as if that fitted
    left_out: tuple[str, ...] = ()  # words that were typed and that do not go with it
    warnings: tuple[str, ...] = ()  # ids of those that the run as asked does not have
    host_gib: float | None = None  # of each node's host, at the peak
    is_in_host_memory: bool = False  # whether something is moved there from the GPUs
    host_fits: bool | None = None  # None: not known

    @property
    def cost(self) -> str:
        """What it costs, in words."""
        if self.tokens_per_second_per_gpu is None:
            words = "speed not estimated"
        elif self.speed is None:
            words = f"estimated {self.tokens_per_second_per_gpu:,.0f} tokens/s per GPU"
        else:
            speed = f"{self.tokens_per_second_per_gpu:,.0f} tokens/s per GPU"
            words = f"estimated {speed}, {self.speed:.0%} of the run as asked"
        without = f"leave out {' '.join(self.left_out)}" if self.left_out else ""
        warnings = [f"warning {problem_id}" for problem_id in self.warnings]
        return "; ".join(part for part in (without, self.change.note, *warnings, words) if part)

    def to_json(self) -> dict[str, Any]:
        """As `plan --json` lists it."""
        speed = self.tokens_per_second_per_gpu
        return {
            "overrides": list(self.change.words),
            "leave_out": list(self.left_out),
            "total_gib": round(self.total_gib, 3),
            "host_gib": None if self.host_gib is None else round(self.host_gib, 3),
            "warnings": list(self.warnings),
            "tokens_per_second_per_gpu": None if speed is None else round(speed, 1),
            "speed": None if self.speed is None else round(self.speed, 3),
            "cost": self.cost,
        }

    def line(self) -> str:
        """For a terminal."""
        return f"{' '.join(self.change.words)}   ({self.total_gib:.1f} GiB{self._of_the_host()}; {self.cost})"

    def _of_the_host(self) -> str:
        """What decides about what was moved there."""
        if self.host_gib is None or not self.is_in_host_memory:
            return ""
        unknown = ", which is not known to have them" if self.host_fits is None else ""
        return f", and {self.host_gib:,.1f} GiB of each host{unknown}"


def _sharded() -> tuple[Change, ...]:
    """The strategies whose speeds were measured side by side, as shares of FSDP's."""
    rates = {strategy: rate_on_8(strategy) for strategy in DIVIDED}
    fsdp = rates[DIVIDED[0]]
    return tuple(
        Change((f"parallelism={strategy.name}",), rate / fsdp)
        for strategy, rate in rates.items()
        if rate is not None and fsdp is not None
    )


_SELECTIVE = Change(("activation=selective",), SELECTIVE.gain)
_CHECKPOINTING = Change(("activation=checkpointing",), RECOMPUTED / STORED)
_SHARDED = _sharded()
_ALONE = Change(("parallelism=single",), 1.0)  # nothing waits for anything
_COPIES = Change((f"parallelism={COPIED.name}",), relative_speed(COPIED, DIVIDED[0]))
_OFFLOADED = (
    Change(("parallelism=zero2_offload",), note="optimizer state in host memory"),
    Change(("parallelism=fsdp_offload",), note="weights and optimizer state in host memory"),
    Change(("parallelism=zero3_offload",), note="weights and optimizer state in host memory"),
)
# What was asked for on top. Its speed was not measured; without it a run is no slower.
_KEPT_ON_GPU = Change(("activation.offload=false",), 1.0, note="activations stay on the GPU")
_SMALLER_PASSES = Change(("training.micro_batch_size=1",), note="more and smaller passes")
_IN_8_BITS = "optimizer state in 8 bits: learns slightly differently"
_OTHER_LEARNING = (
    Change(("optimizer=adamw_8bit",), note=_IN_8_BITS, changes_learning=True),
    Change(("peft=lora",), note="trains an adapter instead of the model", changes_learning=True),
    Change(("peft=qlora",), note="trains an adapter of the model in 4 bits", changes_learning=True),
)
_ADAPTERS = _OTHER_LEARNING[1:]
# See the rules optimizer-with-fsdp, -with-zero and -offloaded, fp8-with-deepspeed and fp8-with-adapters.
_OFFLOADED_WORDS = {word for change in _OFFLOADED for word in change.words}
_NEED_PLAIN_ADAMW = {"parallelism=fsdp"} | _OFFLOADED_WORDS
_ZERO_WORDS = {f"parallelism={name}" for name in ("zero2", "zero3", "zero2_offload", "zero3_offload")}
_REFUSE_FP8 = _ZERO_WORDS | {word for change in _ADAPTERS for word in change.words}
# What divides the frozen weights, the fastest way and with the host's memory. Each try takes a third of a second.
_WITH_ADAPTERS = (("parallelism=fsdp",), ("parallelism=fsdp_offload",))
_WITHOUT_STATES = {"activation", "activation.offload", "packing.row_length", "training.micro_batch_size"}
_WITH_OWN_KEYS = {place.partition("/")[0] for place in CHOICE_SCHEMAS}  # groups of which one answer has keys of its own


def changes_that_fit(recipe: str | None, overrides: list[str], recipes_dirs: list[Path], draft: Draft) -> list[Fitting]:
    """Up to three changes, each tried on top of what was typed. `draft` is the run that does not fit."""
    found: list[Fitting] = []
    warned: list[Fitting] = []  # a second choice
    refused: list[Change] = []
    for change in _candidates(draft):
        if any(set(fitting.change.words) <= _words_or_less(change) for fitting in found):
            continue  # it fits with less
        if _exceeds_by_states(change, draft, overrides) or any(_only_adds_savings(change, other) for other in refused):
            continue
        tried, left_out = _try(change, recipe, overrides, recipes_dirs, draft)
        fitting = _fitting(change, tried, draft, left_out) if tried.fits and tried.exit_code == 0 else None
        problems = _new_problems(tried, draft)
        is_refused = tried.error is not None or any(problem.is_error for problem in problems)
        if is_refused or (fitting is not None and problems):
            refused.append(change)  # and what takes less memory still is refused too, or has the same warnings
        if fitting is not None:
            (warned if problems else found).append(fitting)
        if len(found) == HOW_MANY:
            break
    return sorted([*found, *warned][:HOW_MANY], key=_offered)


def _offered(fitting: Fitting) -> tuple[bool, bool, float]:
    """What is learned first, then the warnings, then the speed."""
    return fitting.change.changes_learning, bool(fitting.warnings), -(fitting.tokens_per_second_per_gpu or 0)


def _exceeds_by_states(change: Change, asked: Draft, overrides: list[str]) -> bool:
    """Whether the states alone are more than each GPU has, which an estimate tells without composing the change.

    Of strategies as their files have them, without keys of their own: what else is set of one may move its states. A
    pass that keeps more may have its peak when other states are there, and then needs even more.
    """
    assert asked.machine is not None and asked.composition is not None
    config = asked.composition.config
    is_tuned = any(word.startswith("parallelism.") for word in overrides)
    is_tuned = is_tuned or any("parallelism" in recipe.body for recipe in asked.composition.origins.recipes)
    for key, _, value in (word.partition("=") for word in change.words):
        if key == "parallelism" and not is_tuned and (settings := _settings(value)) is not None:
            config = replace(config, parallelism=settings)
        elif key in ("optimizer", "optimizer.name"):
            config = replace(config, optimizer=replace(config.optimizer, name=OptimizerName[value]))
        elif key in ("precision", "precision.compute"):
            config = replace(config, precision=replace(config.precision, compute=Compute[value]))
        elif key not in _WITHOUT_STATES:
            return False
    resolved = resolve_auto(config, asked.machine).config
    facts, capacity = known_facts(resolved), resolved.hardware.memory_gib
    return facts is not None and capacity is not None and estimate_memory(resolved, facts).states_gib > capacity


def _settings(name: str) -> ParallelismConfig | None:
    """What decides about the states of a strategy as its file has it; None where few are left on the GPUs."""
    if name == "zero2_offload":
        return ZeroConfig(strategy=OFFLOADING_OPTIMIZER, offload_optimizer=Offload.cpu)
    if name not in Strategy.__members__:
        return None
    return PARALLELISM_SCHEMAS[Strategy[name]](strategy=Strategy[name])


def _only_adds_savings(change: Change, refused: Change) -> bool:
    """Whether a change is a refused one and something that only takes less memory."""
    more = set(change.words) - set(refused.words)
    return set(refused.words) < set(change.words) and {word.partition("=")[0] for word in more} <= _WITHOUT_STATES


def _try(
    change: Change, recipe: str | None, overrides: list[str], recipes_dirs: list[Path], asked: Draft
) -> tuple[Draft, tuple[str, ...]]:
    """The run with a change, and the typed words that it was tried without because they do not go with it."""
    groups = {word.partition("=")[0] for word in change.words} & _WITH_OWN_KEYS
    below = [word for word in overrides if word.partition(".")[0] in groups]
    tried = draft_run(recipe, [*overrides, *change.words], recipes_dirs)
    is_wrong = bool(tried.error or _new_problems(tried, asked))
    if not below or (not is_wrong and (tried.fits or not any(_choice_at(word, tried) for word in below))):
        return tried, ()
    bare = draft_run(recipe, [*(word for word in overrides if word not in below), *change.words], recipes_dirs)
    named = {problem.key for problem in _new_problems(tried, asked)}
    unwanted = tuple(
        word
        for word in below
        if word.partition("=")[0] in named
        or not _is_known(word, bare)
        or _choice_at(word, tried) != _choice_at(word, bare)  # it undoes what the change is for
    )
    if not unwanted:
        return tried, ()
    kept = [word for word in overrides if word not in unwanted]
    return draft_run(recipe, [*kept, *change.words], recipes_dirs), unwanted


def _is_known(word: str, bare: Draft) -> bool:
    """Whether the key of a typed word is one of its group's answer in a run without it."""
    if bare.composition is None:
        return True  # something else is wrong
    group, _, name = word.partition("=")[0].partition(".")
    return name.partition(".")[0] in {field.name for field in fields(getattr(bare.composition.config, group))}


def _choice_at(word: str, draft: Draft) -> Enum | None:
    """What a run has at a typed word's key, where that names one of several answers: numbers and switches tune one."""
    if draft.composition is None:
        return None
    group, _, name = word.partition("=")[0].partition(".")
    value = getattr(getattr(draft.composition.config, group), name, None)
    return value if isinstance(value, Enum) else None


def _new_problems(tried: Draft, asked: Draft) -> list[Problem]:
    """What a change makes unwise or wrong that was neither before."""
    before = {problem.id for problem in asked.problems}
    return [problem for problem in tried.problems if problem.id not in before]


def _words_or_less(change: Change) -> set[str]:
    """The words of a change, and of one that recomputes less."""
    words = set(change.words)
    return words | set(_SELECTIVE.words) if words & set(_CHECKPOINTING.words) else words


def _fitting(change: Change, tried: Draft, asked: Draft, left_out: tuple[str, ...]) -> Fitting:
    """`tried` is the run with the change, which fits."""
    assert tried.memory is not None and tried.memory.memory.total is not None and tried.host is not None
    speed = tried.time.tokens_per_second_per_gpu if tried.time else None
    before = asked.time.tokens_per_second_per_gpu if asked.time else None
    return Fitting(
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


def _candidates(draft: Draft) -> list[Change]:
    """Every change and every pair with one that keeps less, in the order in which they are offered."""
    assert draft.resolution is not None
    config = draft.resolution.config
    single = _strategies(draft, config)
    smaller = [_SMALLER_PASSES] * ((config.training.micro_batch_size or 1) > 1)
    single += smaller
    strategies_of_adapters = [change for change in single if change.words in _WITH_ADAPTERS]
    single += _OTHER_LEARNING if OPTIMIZERS[config.optimizer.name].in_8bit else _ADAPTERS
    single += [_both(strategy, adapter) for adapter in _ADAPTERS for strategy in strategies_of_adapters]
    single = [_as_rules_allow(_with_effective_optimizer(change, draft), draft, config) for change in single]
    sparing = _sparing_the_host(config) if draft.host is not None and draft.host.fits is False else []
    sparing = [_with_effective_optimizer(change, draft) for change in sparing]
    shorter, less = _shorter_rows(draft), _keeping_less(config)
    pairs = [_both(change, other) for change in (*sparing, *single) for other in (*shorter, *less)]
    pairs += [_both(change, other) for change in single if change not in smaller for other in smaller]
    pairs += [_both(change, other) for change in shorter for other in less]
    # Alone they come first: where they are enough, no other strategy is offered with them.
    return [*sparing, *shorter, *sorted([*single, *less, *pairs], key=_rank)]


def _strategies(draft: Draft, config: RunConfig) -> list[Change]:
    """Those that this many GPUs gain from, but for the one that is asked for or that auto took."""
    asked = draft.composition.groups["parallelism"] if draft.composition is not None else UNDECIDED.name
    taken = config.parallelism.strategy.name if asked == UNDECIDED.name else asked
    offloaded = () if config.hardware.generation is Generation.cpu else _OFFLOADED  # a CPU's memory is the host's
    strategies = chain((_COPIES,), _SHARDED, offloaded) if world_size(config) > 1 else (_ALONE, *offloaded)
    return [change for change in strategies if change.words != (f"parallelism={taken}",)]


def _with_effective_optimizer(change: Change, draft: Draft) -> Change:
    """With another optimizer by its name, where one was set by that: the group's answer would not count."""
    words = tuple(
        _to_type("optimizer", "name", OptimizerName[word.partition("=")[2]], draft)
        if word.startswith("optimizer=")
        else word
        for word in change.words
    )
    return replace(change, words=words)


def _as_rules_allow(change: Change, draft: Draft, config: RunConfig) -> Change:
    """With AdamW where the optimizer does not go with the change, and in bf16 instead of fp8 where that does not."""
    words = set(change.words)
    if _refuses_optimizer(words, OPTIMIZERS[config.optimizer.name]):
        adamw = (_to_type("optimizer", "name", RUNS_EVERYWHERE, draft),)
        change = _both(change, Change(adamw, 1.0, **_effect_of_adamw(config.optimizer.name)))
    if config.precision.compute is Compute.fp8 and words & _REFUSE_FP8:
        bf16 = (_to_type("precision", "compute", Compute.bf16, draft),)
        change = _both(change, Change(bf16, note="computes in bf16 instead of fp8: more exactly"))
    return change


def _refuses_optimizer(words: set[str], facts: OptimizerFacts) -> bool:
    """See the rules optimizer-with-fsdp, -with-zero and -offloaded."""
    refused = set() if facts.takes_dtensors else _NEED_PLAIN_ADAMW
    refused = refused if facts.can_be_offloaded else refused | _OFFLOADED_WORDS
    refused = refused if facts.takes_flat_pieces else refused | _ZERO_WORDS
    return bool(words & refused)


def _effect_of_adamw(name: OptimizerName) -> dict[str, Any]:
    """What changes with AdamW in place of an optimizer."""
    facts = OPTIMIZERS[name]
    if facts.same_steps_unpaged is RUNS_EVERYWHERE:
        return {"note": "the same steps"}
    if facts.is_8bit:
        return {"note": "optimizer state in 32 bits instead of 8: learns no less exactly"}
    return {"note": f"AdamW in place of {name.name}: learns differently", "changes_learning": True}


def _to_type(group: str, field: str, value: Enum, draft: Draft) -> str:
    """The word for a group's answer, by its one key where that was set on its own and would undo the answer."""
    assert draft.composition is not None
    origins = draft.composition.origins
    bodies = [recipe.body.get(group) for recipe in origins.recipes]
    is_set = any(isinstance(body, dict) and field in body for body in bodies)
    is_set = is_set or origins.override(f"{group}.{field}") is not None
    return f"{group}.{field}={value.name}" if is_set else f"{group}={value.name}"


def _sparing_the_host(config: RunConfig) -> list[Change]:
    """Without what was asked for that takes host memory and changes nothing that is learned."""
    changes = [_KEPT_ON_GPU] if config.activation.offload else []
    if (name := OPTIMIZERS[config.optimizer.name].same_steps_unpaged) is not None:
        note = "the same steps, with the optimizer's state on the GPU"
        changes.append(Change((f"optimizer={name.name}",), 1.0, note=note))
    return changes


def _shorter_rows(draft: Draft) -> list[Change]:
    """Rows as short as the longest document, where longer ones were asked for: a step has the same in more of them."""
    asked = draft.composition.config if draft.composition is not None else None
    if asked is None or (asked.packing.row_length or 0) <= asked.training.max_length:
        return []
    counted = "tokens" if asked.training.global_samples is None else "documents"
    note = f"shorter rows, as many {counted} in each step"
    return [Change((f"packing.row_length={asked.training.max_length}",), 1.0, note=note)]


def _keeping_less(config: RunConfig) -> list[Change]:
    """What leaves less of the forward pass in memory than a run as asked does."""
    now = config.activation.checkpointing
    can_be_selective = bool(config.model.compile_layers) and now is Checkpointing.disabled
    return [_SELECTIVE] * can_be_selective + [_CHECKPOINTING] * (now is not Checkpointing.enabled)


def _both(first: Change, second: Change) -> Change:
    speeds = (first.speed, second.speed)
    return Change(
        words=first.words + second.words,
        speed=None if None in speeds else (first.speed or 0) * (second.speed or 0),
        note="; ".join(note for note in (first.note, second.note) if note),
        changes_learning=first.changes_learning or second.changes_learning,
    )


def _rank(change: Change) -> tuple[bool, float]:
    """What is learned first, then the speed."""
    return change.changes_learning, -(change.speed or 0)
