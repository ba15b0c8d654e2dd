"""Search for the longest row that fits a planned run: `tunebook plan --longest`.

A row holds one document as long as itself, which is the worst case for memory. Everything else stays as planned, except
how much of a pass is kept, if that is left to `auto`: each way has a row of its own in the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from tunebook.config.choices import Checkpointing
from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import RunConfig
from tunebook.model.parameters import known_facts
from tunebook.plan.auto.decisions import AS_ASKED
from tunebook.plan.auto.resolve import Resolution
from tunebook.plan.memory import estimate_memory, fits_into, gib_text, unknown_size
from tunebook.plan.memory.host_memory import plan_host_memory

_STEP_TOKENS = 128  # rows are multiples of this for each GPU that shares them
_MOST_STEPS = 2**17  # 16 million tokens for each GPU: longer rows are not searched
_CHECKPOINTING = "activation.checkpointing"


@dataclass(frozen=True, kw_only=True)
class LongestRow:
    """The longest row with one way of keeping activations."""

    checkpointing: str
    tokens: int  # 0: not even the shortest row that was tried fits
    tokens_by_memory: int  # the same without the limit of the model's positions
    memory_gib: float | None  # estimated tensors of one GPU with `tokens`
    overrides: list[str]  # what to type


@dataclass(frozen=True, kw_only=True)
class Longest:
    """The answer, and why there is none if `rows` is empty."""

    rows: list[LongestRow]
    capacity_gib: float | None
    max_position_embeddings: int | None
    sequence_group_size: int
    why_unknown: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The `longest` part of `plan --json`."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The answer as lines of text."""
        if self.why_unknown is not None:
            return [f"Longest row: not known: {self.why_unknown}"]
        group = self.sequence_group_size
        shared = f" shared by {group} GPUs" if group > 1 else ""
        lines = [f"Longest row{shared} (estimated, one document in each row, {self.capacity_gib:g} GiB a GPU)"]
        for row in self.rows:
            if not row.tokens:
                lines.append(f"  none with {_CHECKPOINTING}={row.checkpointing}: the rest of the plan does not fit")
                continue
            held = f"{gib_text(row.memory_gib)} of tensors" if row.memory_gib is not None else ""
            if row.tokens < row.tokens_by_memory:
                held += f"; memory would hold {row.tokens_by_memory:,}, and the model has no more positions"
            lines.append(f"  {row.tokens:,} tokens with {_CHECKPOINTING}={row.checkpointing}: {held}")
            lines.append(f"      {' '.join(row.overrides)}")
        return lines


def longest_rows(resolution: Resolution) -> Longest:
    """The longest rows of a resolved run, by estimate; a fraction of a second."""
    config = resolution.config
    facts, capacity = known_facts(config), config.hardware.memory_gib
    positions = config.model.facts.max_position_embeddings if config.model.facts is not None else None
    group = max(1, config.parallelism.sequence_group_size)
    found = Longest(rows=[], capacity_gib=capacity, max_position_embeddings=positions, sequence_group_size=group)
    if positions is None:
        return replace(found, why_unknown="the model's size is not known before it is loaded")
    if facts is None or capacity is None:
        return replace(found, why_unknown=unknown_size(config) if facts is None else "hardware.memory_gib is not set")
    rows = [_longest(resolution, facts, positions, way) for way in _ways(resolution)]
    return replace(found, rows=rows)


def _ways(resolution: Resolution) -> list[Checkpointing]:
    """The typed way of keeping activations, or all that are possible, from the fastest on."""
    config = resolution.config
    is_asked = any(choice.key == _CHECKPOINTING and choice.why == AS_ASKED for choice in resolution.choices)
    if is_asked:
        return [config.activation.checkpointing]
    parts = [Checkpointing.selective] if config.model.compile_layers else []
    return [Checkpointing.disabled, *parts, Checkpointing.enabled]


def _longest(resolution: Resolution, facts: ModelFacts, positions: int, way: Checkpointing) -> LongestRow:
    config, capacity = resolution.config, resolution.config.hardware.memory_gib
    assert capacity is not None
    unit = _STEP_TOKENS * max(1, config.parallelism.sequence_group_size)

    def fits(steps: int) -> bool:
        longer = _with_rows(config, steps * unit, way)
        tensors = estimate_memory(longer, facts).total_gib
        host = plan_host_memory(longer, resolution.host_memory_gib)
        return fits_into(longer, tensors, capacity) and host.fits is not False

    by_memory = _most(fits) * unit
    tokens = min(by_memory, positions // unit * unit)
    overrides = [f"training.max_length={tokens}", f"packing.row_length={tokens}", "training.micro_batch_size=1"]
    return LongestRow(
        checkpointing=way.name,
        tokens=tokens,
        tokens_by_memory=by_memory,
        memory_gib=round(estimate_memory(_with_rows(config, tokens, way), facts).total_gib, 3) if tokens else None,
        overrides=[*overrides, f"{_CHECKPOINTING}={way.name}"] if tokens else [],
    )


def _with_rows(config: RunConfig, tokens: int, way: Checkpointing) -> RunConfig:
    dataset = config.dataset
    return replace(
        config,
        dataset=replace(dataset, synthetic=replace(dataset.synthetic, max_tokens=tokens)),
        training=replace(config.training, max_length=tokens, micro_batch_size=1),
        packing=replace(config.packing, row_length=tokens),
        activation=replace(config.activation, checkpointing=way),
    )


def _most(fits: Callable[[int], bool]) -> int:
    """The largest number of steps that fits, by bisection; 0 if one does not fit."""
    low, high = 0, 1
    while high < _MOST_STEPS and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
