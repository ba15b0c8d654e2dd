"""What would make a run fit that is too large: up to three changes, the cheapest in speed first, ready to paste.

Each is tried as if it had been typed, so whatever breaks a rule is left out, and its cost is its own estimate beside
that of the run as asked. In which order they are tried follows from the speeds that were measured; what was not comes
after what was, and what changes what is learned comes last.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from tunebook.config.choices import Checkpointing, Strategy
from tunebook.config.schema import RunConfig
from tunebook.launch.draft import Draft, draft_run
from tunebook.plan.measured_speed import RECOMPUTED, SELECTIVE, STORED, rate_on_8

HOW_MANY = 3


@dataclass(frozen=True, kw_only=True)
class Change:
    """Something to type."""

    words: tuple[str, ...]
    speed: float | None  # by which changes are ordered: of FSDP's, as measured; None: not measured
    note: str = ""
    changes_learning: bool = False


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """A change with which the run is estimated to fit."""

    change: Change
    total_gib: float
    tokens_per_second_per_gpu: float | None = None  # estimated
    speed: float | None = None  # of the run as asked, by estimate, as if that fitted

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
        return "; ".join(part for part in (self.change.note, words) if part)

    def to_json(self) -> dict[str, Any]:
        """As `plan --json` lists it."""
        speed = self.tokens_per_second_per_gpu
        return {
            "overrides": list(self.change.words),
            "total_gib": round(self.total_gib, 3),
            "tokens_per_second_per_gpu": None if speed is None else round(speed, 1),
            "speed": None if self.speed is None else round(self.speed, 3),
            "cost": self.cost,
        }

    def line(self) -> str:
        """For a terminal."""
        return f"{' '.join(self.change.words)}   ({self.total_gib:.1f} GiB; {self.cost})"


def _sharded() -> tuple[Change, ...]:
    """The strategies whose speeds were measured side by side, as shares of FSDP's."""
    rates = {strategy: rate_on_8(strategy) for strategy in (Strategy.fsdp, Strategy.zero2, Strategy.zero3)}
    fsdp = rates[Strategy.fsdp]
    return tuple(
        Change(words=(f"parallelism={strategy.name}",), speed=rate / fsdp)
        for strategy, rate in rates.items()
        if rate is not None and fsdp is not None
    )


_SELECTIVE = Change(words=("activation=selective",), speed=SELECTIVE.gain)
_CHECKPOINTING = Change(words=("activation=checkpointing",), speed=RECOMPUTED / STORED)
_SHARDED = _sharded()
_OFFLOADED = (
    Change(words=("parallelism=zero2_offload",), speed=None, note="optimizer state in host memory"),
    Change(words=("parallelism=fsdp_offload",), speed=None, note="weights and optimizer state in host memory"),
    Change(words=("parallelism=zero3_offload",), speed=None, note="weights and optimizer state in host memory"),
)
_SMALLER_PASSES = Change(words=("training.micro_batch_size=1",), speed=None, note="more and smaller passes")
_OTHER_LEARNING = (
    Change(
        words=("optimizer=adamw_8bit",),
        speed=None,
        note="optimizer state in 8 bits: learns slightly differently",
        changes_learning=True,
    ),
    Change(words=("peft=lora",), speed=None, note="trains an adapter instead of the model", changes_learning=True),
    Change(
        words=("peft=qlora",),
        speed=None,
        note="trains an adapter of the model in 4 bits",
        changes_learning=True,
    ),
)
_ADAPTERS = _OTHER_LEARNING[1:]
# What divides the frozen weights, the fastest way and with the host's memory. Each try takes a tenth of a second.
_WITH_ADAPTERS = (("parallelism=fsdp",), ("parallelism=fsdp_offload",))


def changes_that_fit(recipe: str | None, overrides: list[str], recipes_dirs: list[Path], draft: Draft) -> list[Fitting]:
    """Up to three changes, each tried on top of what was typed. `draft` is the run that does not fit."""
    found: list[Fitting] = []
    for change in _candidates(draft):
        if any(set(fitting.change.words) <= _with_less(change) for fitting in found):
            continue  # it fits with less
        tried = draft_run(recipe, [*overrides, *change.words], recipes_dirs)
        memory = tried.memory
        if tried.exit_code == 0 and memory is not None and memory.fits and memory.memory.total is not None:
            found.append(_fitting(change, memory.memory.total, tried, draft))
        if len(found) == HOW_MANY:
            break
    return sorted(found, key=lambda fitting: (fitting.change.changes_learning, -(fitting.speed or 0)))


def _with_less(change: Change) -> set[str]:
    """The words of a change, and of one that recomputes less."""
    words = set(change.words)
    return words | set(_SELECTIVE.words) if words & set(_CHECKPOINTING.words) else words


def _fitting(change: Change, total_gib: float, tried: Draft, asked: Draft) -> Fitting:
    speed = tried.time.tokens_per_second_per_gpu if tried.time else None
    before = asked.time.tokens_per_second_per_gpu if asked.time else None
    return Fitting(
        change=change,
        total_gib=total_gib,
        tokens_per_second_per_gpu=speed,
        speed=speed / before if speed and before else None,
    )


def _candidates(draft: Draft) -> list[Change]:
    """Every change and every pair with one that keeps less, in the order in which they are offered."""
    assert draft.resolution is not None
    config = draft.resolution.config
    strategies = chain(_SHARDED, _OFFLOADED)
    single = [change for change in strategies if change.words != (f"parallelism={config.parallelism.strategy.name}",)]
    if (config.training.micro_batch_size or 1) > 1:
        single.append(_SMALLER_PASSES)
    strategies_of_adapters = [change for change in single if change.words in _WITH_ADAPTERS]
    single += _OTHER_LEARNING
    single += [_both(strategy, adapter) for adapter in _ADAPTERS for strategy in strategies_of_adapters]
    less = _keeping_less(config)
    pairs = [_both(change, other) for change in single for other in less]
    return sorted([*single, *less, *pairs], key=_rank)


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
