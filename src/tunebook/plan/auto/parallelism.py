"""`parallelism=auto`: the fastest strategy whose estimated memory fits, with the settings that it would get.

The strategies' speeds were measured on two and four H200 (benchmarks/results: h200_speed_spread.jsonl,
h200x4_speed.jsonl): the less of a model is divided, the less the GPUs wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tunebook.config.choices import Checkpointing, Generation, Strategy
from tunebook.config.frozen import PARALLELISM_SCHEMAS
from tunebook.config.schema import ParallelismConfig, RunConfig, world_size
from tunebook.facts.strategies import (
    ALONE,
    COPIED,
    FASTEST_ON_ONE_NODE,
    FASTEST_ON_SEVERAL_NODES,
    STRATEGIES,
    UNDECIDED,
)
from tunebook.model.parameters import known_facts
from tunebook.plan.auto.decisions import Decisions
from tunebook.plan.auto.passes import SHORT_ROW_TOKENS
from tunebook.plan.memory import USABLE_SHARE, estimate_memory, fits_into, gib_text
from tunebook.plan.rules import check

DecidePasses = Callable[[Decisions], None]

_RECOMPUTED = {
    Checkpointing.enabled: " with activations recomputed",
    Checkpointing.selective: " with norms and activation functions recomputed",
}


@dataclass(frozen=True, kw_only=True)
class _Tried:
    """The run as it would be with one strategy."""

    strategy: Strategy
    refusals: tuple[str, ...]  # ids of broken rules
    total_gib: float | None  # estimate; None: unknown
    fits: bool | None  # by estimate; None: memory or model size unknown
    checkpointing: Checkpointing
    row_length: int  # tokens

    @property
    def is_recomputed(self) -> bool:
        """Whether whole layers are recomputed."""
        return self.checkpointing is Checkpointing.enabled

    @property
    def concessions(self) -> int:
        """The cost of making it fit: 2 for recomputed layers, 1 for short rows, 0 for recomputed parts of blocks.

        DDP was 5% faster than FSDP of gradients and optimizer, which was 7% faster than FSDP (h200x4_speed.jsonl). That
        exceeds the cost of recomputing parts of blocks, and does not exceed what short rows lose to rows twice as long.
        """
        is_short = self.checkpointing is Checkpointing.selective and self.row_length < SHORT_ROW_TOKENS
        return 2 if self.is_recomputed else int(is_short)


def decide_strategy(decisions: Decisions, decide_passes: DecidePasses) -> None:
    """Fill in `parallelism.strategy` and give the section that strategy's schema, as if it had been typed.

    `decide_passes` decides what depends on the strategy: rows, passes and activation checkpointing.
    """
    config = decisions.config
    is_open = config.parallelism.strategy is UNDECIDED
    if is_open and type(config.parallelism) is not ParallelismConfig:
        return  # would lose the settings of a named strategy; see `strategy-settings-mismatch`
    decisions.decide("parallelism.strategy", lambda: _strategy(config, decide_passes))
    if is_open:
        config.parallelism = _settings(config, config.parallelism.strategy)


def _settings(config: RunConfig, strategy: Strategy) -> ParallelismConfig:
    return PARALLELISM_SCHEMAS[strategy](strategy=strategy, sequence_group_size=config.parallelism.sequence_group_size)


def _strategy(config: RunConfig, decide_passes: DecidePasses) -> tuple[Strategy, str]:
    is_on_cpu = config.hardware.generation is Generation.cpu
    if world_size(config) == 1:
        return ALONE, "one process on the CPU" if is_on_cpu else "one GPU has nothing to divide"
    if is_on_cpu:
        return COPIED, "several ranks on a CPU, where FSDP does not run"
    order = FASTEST_ON_SEVERAL_NODES if config.hardware.num_nodes > 1 else FASTEST_ON_ONE_NODE
    tried = [_try(config, strategy, decide_passes) for strategy in order]
    # Problems common to all strategies do not count against one; they are reported whichever is chosen.
    fewest = min(len(one.refusals) for one in tried)
    allowed = [one for one in tried if len(one.refusals) == fewest]
    # `min` takes the first of equals: the fastest of those with the fewest concessions.
    fitting = [one for one in allowed if one.fits]
    chosen = min(fitting, key=lambda one: one.concessions) if fitting else allowed[-1]
    return chosen.strategy, _why(config, chosen, tried)


def _try(config: RunConfig, strategy: Strategy, decide_passes: DecidePasses) -> _Tried:
    """Decide the other settings for a strategy, on a copy: a longer row may fit with one strategy only."""
    decisions = Decisions(replace(config, parallelism=_settings(config, strategy)))
    decide_passes(decisions)
    resolved = decisions.config
    facts, memory = known_facts(resolved), resolved.hardware.memory_gib
    total = None if facts is None else estimate_memory(resolved, facts).total_gib
    return _Tried(
        strategy=strategy,
        refusals=tuple(problem.id for problem in check(resolved) if problem.is_error),
        total_gib=total,
        fits=None if total is None or memory is None else fits_into(resolved, total, memory),
        checkpointing=resolved.activation.checkpointing,
        row_length=resolved.packing.row_length or resolved.training.max_length,
    )


def _why(config: RunConfig, chosen: _Tried, tried: list[_Tried]) -> str:
    """The reason for the chosen strategy, and the reasons against faster or refused ones."""
    place = tried.index(chosen)
    against = tried[:place]
    if not chosen.fits or chosen.is_recomputed:
        against = against + [one for one in tried[place + 1 :] if one.refusals]
    return "; ".join([_reason_for(config, chosen), *filter(None, (_reason_against(one, chosen) for one in against))])


def _reason_for(config: RunConfig, chosen: _Tried) -> str:
    what = STRATEGIES[chosen.strategy].auto_reason
    if config.hardware.memory_gib is None:
        return f"{what}; the memory is not known, and this is the safe choice"
    if chosen.total_gib is None:
        return f"{what}; the model's size is not known before it is loaded, and this is the safe choice"
    recomputed = _RECOMPUTED.get(chosen.checkpointing, "")
    verdict = f"{'fit' if chosen.fits else 'do not fit'} into {USABLE_SHARE:.0%} of {config.hardware.memory_gib:g} GiB"
    return f"{what}: estimated {gib_text(chosen.total_gib)}{recomputed} {verdict}"


def _reason_against(one: _Tried, chosen: _Tried) -> str | None:
    """The reason against a strategy; None if there is none."""
    if rules := sorted(set(one.refusals) - set(chosen.refusals)):
        return f"{one.strategy.name} is refused ({', '.join(rules)})"
    if one.fits and one.concessions < 2:
        return f"{one.strategy.name} would have to compute in rows of {one.row_length} tokens"
    if one.fits:
        return f"{one.strategy.name} would have to recompute activations"
    if one.total_gib is None or one.fits is None:
        return None
    return f"{one.strategy.name} would take {gib_text(one.total_gib)}"
