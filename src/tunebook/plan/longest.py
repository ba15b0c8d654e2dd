"""`tunebook plan --longest`: the longest row that fits a planned run, for each way of keeping activations.

A row holds one document as long as itself, which is the worst case for memory. Everything else stays as planned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tunebook.config.choices import Checkpointing
from tunebook.config.schema import ActivationConfig, RunConfig
from tunebook.model.parameters import known_facts
from tunebook.model.positions import positions_of
from tunebook.plan.auto.decisions import asked_keys
from tunebook.plan.auto.resolve import COMPILING, Resolution
from tunebook.plan.memory import estimate_memory, tensors_fit
from tunebook.plan.memory.host_memory import plan_host_memory
from tunebook.plan.rules import check

_STEP_TOKENS = 128  # rows are multiples of this for each GPU that shares them
_CHECKPOINTING = (Checkpointing.disabled, Checkpointing.selective, Checkpointing.enabled)
TILE_TOKENS = 4096  # of an MLP's tile: enough rows to keep a GPU busy


@dataclass(frozen=True, kw_only=True)
class LongestRow:
    """The longest row with one way of keeping activations, up to the model's positions."""

    activation: list[str]  # the overrides of the way
    overrides: list[str]  # what to type after the recipe
    tokens: int  # 0: not even the shortest row fits
    has_all_positions: bool  # a longer row needs model.yarn_factor
    memory_gib: float  # estimated tensors of one GPU

    def line(self) -> str:
        """The row as a line of text."""
        if not self.tokens:
            return f"  none with {' '.join(self.activation)}"
        end = ", all positions of the model" if self.has_all_positions else ""
        return f"  {self.tokens:,} tokens{end}, in {self.memory_gib:.1f} GiB of tensors: {' '.join(self.overrides)}"


def longest_rows(resolution: Resolution) -> list[LongestRow]:
    """The longest rows of a resolved run by estimate, from the fastest way on; empty if its size is unknown."""
    config, positions = resolution.config, positions_of(resolution.config.model)
    if known_facts(config) is None or config.hardware.memory_gib is None or positions is None:
        return []
    rows: list[LongestRow] = []
    for way in _ways(resolution):
        rows.append(_longest(way, positions, resolution.host_memory_gib))
        if rows[-1].has_all_positions:  # slower ways gain nothing
            break
    return rows


def _ways(resolution: Resolution) -> list[RunConfig]:
    """The run with each way that no rule refuses: the typed one, or all, and less kept where layers are recomputed."""
    config, typed, now = resolution.config, asked_keys(resolution.choices), resolution.config.activation
    is_typed = "activation.checkpointing" in typed or now.mlp_tile_tokens is not None
    plain = [replace(now, checkpointing=each) for each in _CHECKPOINTING if not is_typed or each is now.checkpointing]
    ways = [replace(config, activation=activation) for activation in plain]
    if any(activation.checkpointing is Checkpointing.enabled for activation in plain):
        tiled = replace(now, checkpointing=Checkpointing.enabled, mlp_tile_tokens=now.mlp_tile_tokens or TILE_TOKENS)
        model = replace(config.model, compile_layers=bool(config.model.compile_layers) and COMPILING in typed)
        ways += [replace(config, model=model, activation=each) for each in (tiled, replace(tiled, offload=True))]
    unique = {str(way.activation): way for way in reversed(ways)}.values()
    allowed = [way for way in unique if not any(p.is_error and p.key.startswith("activation.") for p in check(way))]
    return allowed[::-1]


def _longest(config: RunConfig, positions: int, host_memory_gib: float | None) -> LongestRow:
    unit = _STEP_TOKENS * config.parallelism.sequence_group_size

    def fits(steps: int) -> bool:
        longer = _with_rows(config, steps * unit)
        return bool(tensors_fit(longer)) and plan_host_memory(longer, host_memory_gib).fits is not False

    low, high = 0, positions // unit + 1  # bisection: `low` fits, `high` does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    tokens, facts = low * unit, known_facts(config)
    assert facts is not None
    activation = _overrides(config.activation)
    rows = [f"training.max_length={tokens}", f"packing.row_length={tokens}", "training.micro_batch_size=1"]
    return LongestRow(
        activation=activation,
        overrides=[*rows, *activation],
        tokens=tokens,
        has_all_positions=low == positions // unit,
        memory_gib=round(estimate_memory(_with_rows(config, max(tokens, unit)), facts).total_gib, 3),
    )


def _overrides(activation: ActivationConfig) -> list[str]:
    tiles, offload = activation.mlp_tile_tokens, activation.offload
    return [
        f"activation.checkpointing={activation.checkpointing.name}",
        *([f"activation.mlp_tile_tokens={tiles}"] if tiles is not None else []),
        *(["activation.offload=true"] if offload else []),
    ]


def _with_rows(config: RunConfig, tokens: int) -> RunConfig:
    return replace(
        config,
        dataset=replace(config.dataset, synthetic=replace(config.dataset.synthetic, max_tokens=tokens)),
        training=replace(config.training, max_length=tokens, micro_batch_size=1),
        packing=replace(config.packing, row_length=tokens),
    )
