"""What would make a run fit that is too large: up to three changes, the cheapest in speed first, ready to paste.

Each is tried as if it had been typed, so whatever breaks a rule is left out. Those that leave alone what is learned
come before those that change it. Speeds are ratios measured on H200s; where none was measured it says so and the change
comes after those that were.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from tunebook.config.choices import Switch
from tunebook.launch.draft import Draft, draft_run

HOW_MANY = 3


@dataclass(frozen=True, kw_only=True)
class Change:
    """Something to type, and what it costs."""

    words: tuple[str, ...]
    speed: float | None  # of the tokens per second; None: not measured
    cost: str
    changes_learning: bool = False


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """A change with which the run is estimated to fit."""

    change: Change
    total_gib: float

    def to_json(self) -> dict[str, Any]:
        """As `plan --json` lists it."""
        return {
            "overrides": list(self.change.words),
            "total_gib": round(self.total_gib, 3),
            "speed": self.change.speed,
            "cost": self.change.cost,
        }

    def line(self) -> str:
        """For a terminal."""
        return f"{' '.join(self.change.words)}   ({self.total_gib:.1f} GiB; {self.change.cost})"


_CHECKPOINTING = Change(
    words=("activation=checkpointing",),
    speed=0.80,
    cost="80% of the speed: 17,810 for 22,233 tokens/s, Qwen2.5-3B on one H200",
)
_SHARDED = (
    Change(
        words=("parallelism=fsdp",),
        speed=1.0,
        cost="as fast as ZeRO-2: 17,578 for 17,289 tokens/s per GPU, Qwen2.5-3B on 8 H200",
    ),
    Change(
        words=("parallelism=zero2",),
        speed=0.98,
        cost="98% of FSDP's speed: 17,289 for 17,578 tokens/s per GPU, Qwen2.5-3B on 8 H200",
    ),
    Change(
        words=("parallelism=zero3",),
        speed=0.45,
        cost="45% of FSDP's speed: 7,969 for 17,578 tokens/s per GPU, Qwen2.5-3B on 8 H200",
    ),
)
_OFFLOADED = (
    Change(words=("parallelism=zero2_offload",), speed=None, cost="optimizer state in host memory; speed not measured"),
    Change(
        words=("parallelism=fsdp_offload",),
        speed=None,
        cost="weights and optimizer state in host memory; speed not measured",
    ),
    Change(
        words=("parallelism=zero3_offload",),
        speed=None,
        cost="weights and optimizer state in host memory; speed not measured",
    ),
)
_SMALLER_PASSES = Change(
    words=("training.micro_batch_size=1",), speed=None, cost="more and smaller passes; speed not measured"
)
_OTHER_LEARNING = (
    Change(
        words=("optimizer=adamw_8bit",),
        speed=None,
        cost="optimizer state in 8 bits: learns slightly differently",
        changes_learning=True,
    ),
    Change(words=("peft=lora",), speed=None, cost="trains an adapter instead of the model", changes_learning=True),
)


def changes_that_fit(recipe: str | None, overrides: list[str], recipes_dirs: list[Path], draft: Draft) -> list[Fitting]:
    """Up to three changes, each tried on top of what was typed. `draft` is the run that does not fit."""
    found: list[Fitting] = []
    for change in _candidates(draft):
        if any(set(fitting.change.words) <= set(change.words) for fitting in found):
            continue  # it fits with less
        tried = draft_run(recipe, [*overrides, *change.words], recipes_dirs)
        memory = tried.memory
        if tried.exit_code == 0 and memory is not None and memory.fits and memory.memory.total is not None:
            found.append(Fitting(change=change, total_gib=memory.memory.total))
        if len(found) == HOW_MANY:
            break
    return found


def _candidates(draft: Draft) -> list[Change]:
    """Every change and every pair with checkpointing, in the order in which they are offered."""
    assert draft.resolution is not None
    config = draft.resolution.config
    strategies = chain(_SHARDED, _OFFLOADED)
    single = [change for change in strategies if change.words != (f"parallelism={config.parallelism.strategy.name}",)]
    if (config.training.micro_batch_size or 1) > 1:
        single.append(_SMALLER_PASSES)
    single += _OTHER_LEARNING
    if config.activation.checkpointing is Switch.disabled:
        single += [_CHECKPOINTING, *(_both(change, _CHECKPOINTING) for change in single)]
    return sorted(single, key=_rank)


def _both(first: Change, second: Change) -> Change:
    speeds = (first.speed, second.speed)
    return Change(
        words=first.words + second.words,
        speed=None if None in speeds else round((first.speed or 0) * (second.speed or 0), 2),
        cost=f"{first.cost}; and {second.cost}",
        changes_learning=first.changes_learning or second.changes_learning,
    )


def _rank(change: Change) -> tuple[bool, float]:
    """What is learned first, then the speed."""
    return change.changes_learning, -(change.speed or 0)
