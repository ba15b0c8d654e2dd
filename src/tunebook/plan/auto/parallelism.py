"""`parallelism=auto`: the fastest strategy whose estimated memory fits, with the settings that it would get.

The less of a model is divided, the less the GPUs wait for each other (h200_speed_spread.jsonl, h200x4_speed.jsonl).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tunebook.config.choices import Checkpointing, Generation, Strategy
from tunebook.config.schema import CHOICE_SCHEMAS, ParallelismConfig, RunConfig, world_size
from tunebook.facts.compiling import CHEAP_BUDGET
from tunebook.facts.strategies import (
    ALONE,
    COPIED,
    FASTEST_ON_ONE_NODE,
    FASTEST_ON_SEVERAL_NODES,
    STRATEGIES,
    UNDECIDED,
)
from tunebook.plan.auto.decisions import Decisions
from tunebook.plan.auto.passes import SHORT_ROW_TOKENS, decide_passes
from tunebook.plan.memory.verdict import MemoryPlan, plan_memory
from tunebook.plan.rules import check


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    """The run as it would be with one strategy."""

    strategy: Strategy
    refusals: frozenset[str]  # ids of broken rules
    memory: MemoryPlan
    concessions: int  # 3 for recomputed layers, 2 for a low memory budget, 1 for short rows


def decide_strategy(decisions: Decisions) -> None:
    """Fill in `parallelism.strategy` and give the section that strategy's schema, as if it had been typed."""
    config = decisions.config
    is_open = config.parallelism.strategy is UNDECIDED
    if is_open and not _is_free(config):
        return  # would lose the settings of a named strategy; see `strategy-settings-mismatch`
    decisions.decide("parallelism.strategy", lambda: _strategy(config))
    if is_open:
        config.parallelism = _settings(config, config.parallelism.strategy)


def assume_copies(config: RunConfig) -> None:
    """Set the strategy that allows the most, if none was decided."""
    if _is_free(config):
        config.parallelism = _settings(config, COPIED)


def _is_free(config: RunConfig) -> bool:
    return config.parallelism.strategy is UNDECIDED and type(config.parallelism) is ParallelismConfig


def _settings(config: RunConfig, strategy: Strategy) -> ParallelismConfig:
    schema: type[ParallelismConfig] = CHOICE_SCHEMAS["parallelism"][strategy.name]
    return schema(strategy=strategy, sequence_group_size=config.parallelism.sequence_group_size)


def _strategy(config: RunConfig) -> tuple[Strategy, str]:
    if world_size(config) == 1:
        return ALONE, "one process has nothing to divide"
    if config.hardware.generation is Generation.cpu:
        return COPIED, "FSDP does not run on CPUs"
    attempts: list[_Attempt] = []
    for strategy in FASTEST_ON_SEVERAL_NODES if config.hardware.num_nodes > 1 else FASTEST_ON_ONE_NODE:
        attempts.append(attempt := _try(config, strategy))
        if attempt.memory.fits and not attempt.refusals and not attempt.concessions:
            break  # the others are slower
    # Problems common to all strategies do not count against one; they are reported whichever is chosen.
    fewest = min(len(attempt.refusals) for attempt in attempts)
    allowed = [attempt for attempt in attempts if len(attempt.refusals) == fewest]
    # `min` takes the first of equals: the fastest of those with the fewest concessions.
    fitting = [attempt for attempt in allowed if attempt.memory.fits]
    chosen = min(fitting, key=lambda attempt: attempt.concessions) if fitting else allowed[-1]
    return chosen.strategy, "; ".join([_reason_for(chosen), *_reasons_against(attempts, chosen)])


def _try(config: RunConfig, strategy: Strategy) -> _Attempt:
    """Decide the other settings for a strategy, on a copy: a longer row may fit with one strategy only."""
    decisions = Decisions(replace(config, parallelism=_settings(config, strategy)))
    decide_passes(decisions)
    resolved = decisions.config
    is_whole = resolved.activation.checkpointing is Checkpointing.enabled
    budget = 1.0 if resolved.activation.memory_budget is None else resolved.activation.memory_budget
    row = resolved.packing.row_length or resolved.training.max_length
    is_short = budget < 1 and row < SHORT_ROW_TOKENS
    return _Attempt(
        strategy=strategy,
        refusals=frozenset(problem.id for problem in check(resolved) if problem.is_error),
        memory=plan_memory(resolved),
        concessions=3 if is_whole else 2 if budget < CHEAP_BUDGET else int(is_short),
    )


def _reason_for(chosen: _Attempt) -> str:
    reason, memory = STRATEGIES[chosen.strategy].auto_reason, chosen.memory
    if memory.fits:
        return reason
    if memory.total is None or memory.capacity is None:
        return f"{reason}; the memory or the model's size is not known, and this is the safe choice"
    return f"nothing that was tried is sure to fit; {reason} ({memory.verdict})"


def _reasons_against(attempts: list[_Attempt], chosen: _Attempt) -> Iterator[str]:
    """Why faster strategies were not chosen, and which ones are refused."""
    for place, attempt in enumerate(attempts):
        if rules := sorted(attempt.refusals - chosen.refusals):
            yield f"not {attempt.strategy.name} (refused: {', '.join(rules)})"
        elif place < attempts.index(chosen) and attempt.memory.total is not None:
            slower = "fits only if more is recomputed, or with short rows"
            yield f"not {attempt.strategy.name} ({slower if attempt.memory.fits else attempt.memory.verdict})"
