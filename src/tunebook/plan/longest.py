"""Ways to keep less of a pass, and the longest row that fits a planned run with each: `tunebook plan --longest`.

A row holds one document as long as itself, which is the worst case for memory. Everything else stays as planned, except
what is kept of a pass, if that is left to `auto`: each way has a row of its own in the answer. If whole layers are
recomputed, tiled MLPs and offloading are tried in addition, unless they are set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from tunebook.config.choices import Checkpointing, PackingMode
from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import ActivationConfig, RunConfig
from tunebook.model.parameters import known_facts
from tunebook.model.positions import positions_of, why_not_stretched
from tunebook.plan.auto.decisions import asked_keys
from tunebook.plan.auto.resolve import COMPILING, Resolution
from tunebook.plan.memory import estimate_memory, gib_text, tensors_fit, unknown_size
from tunebook.plan.memory.host_memory import plan_host_memory
from tunebook.plan.rules import check

_STEP_TOKENS = 128  # rows are multiples of this for each GPU that shares them
_MOST_STEPS = 2**17  # 16 million tokens for each GPU: longer rows are not searched
_CHECKPOINTING = "activation.checkpointing"
# Tokens of an MLP's tile. Products of so many rows keep a GPU busy, and a tile of Llama 3.1 8B needs about 1 GiB.
TILE_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class LongestRow:
    """The longest row with one way of keeping activations."""

    checkpointing: str
    mlp_tile_tokens: int | None
    offload: bool
    tokens: int  # 0: not even the shortest row that was tried fits
    tokens_by_memory: int  # the same without the limit of the model's positions
    memory_gib: float | None  # estimated tensors of one GPU with `tokens`
    is_limited_by_host: bool  # the GPUs would hold a longer row
    overrides: list[str]  # what to type


@dataclass(frozen=True, kw_only=True)
class Longest:
    """The answer, and why there is none if `rows` is empty."""

    rows: list[LongestRow]
    capacity_gib: float | None
    max_position_embeddings: int | None
    sequence_group_size: int
    can_be_stretched: bool = False  # the positions, by `model.yarn_factor`
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
            way = " ".join(_words(row.checkpointing, row.mlp_tile_tokens, is_offloaded=row.offload))
            if not row.tokens:
                what = "the host" if row.is_limited_by_host else "the GPUs"
                lines.append(f"  none with {way}: the rest of the plan does not fit into the memory of {what}")
                continue
            held = f"{gib_text(row.memory_gib)} of tensors" if row.memory_gib is not None else ""
            if row.tokens < row.tokens_by_memory:
                held += f"; memory would hold {row.tokens_by_memory:,}, and the model has no more positions"
                held += ": model.yarn_factor stretches them" if self.can_be_stretched else ""
            elif row.is_limited_by_host:
                held += "; a longer row would not fit into the host's memory"
            lines.append(f"  {row.tokens:,} tokens with {way}: {held}")
            lines.append(f"      {' '.join(row.overrides)}")
            if row.tokens < row.tokens_by_memory:  # so slower ways of keeping activations gain nothing
                break
        return lines


def _words(checkpointing: str, mlp_tile_tokens: int | None, *, is_offloaded: bool) -> list[str]:
    tiles = [] if mlp_tile_tokens is None else [f"activation.mlp_tile_tokens={mlp_tile_tokens}"]
    return [f"{_CHECKPOINTING}={checkpointing}", *tiles, *(["activation.offload=true"] if is_offloaded else [])]


def longest_rows(resolution: Resolution) -> Longest:
    """The longest rows of a resolved run, by estimate; a fraction of a second."""
    config = resolution.config
    facts, capacity = known_facts(config), config.hardware.memory_gib
    positions = positions_of(config.model)
    group = max(1, config.parallelism.sequence_group_size)
    found = Longest(
        rows=[],
        capacity_gib=capacity,
        max_position_embeddings=positions,
        sequence_group_size=group,
        can_be_stretched=why_not_stretched(config.model) is None,
    )
    if positions is None:
        return replace(found, why_unknown="the model's size is not known before it is loaded")
    if facts is None or capacity is None:
        return replace(found, why_unknown=unknown_size(config) if facts is None else "hardware.memory_gib is not set")
    rows = [_longest(resolution, facts, positions, way) for way in _ways(resolution)]
    return replace(found, rows=rows)


def _ways(resolution: Resolution) -> list[RunConfig]:
    """The run with the typed way of keeping activations, or with all that are possible, from the fastest on."""
    config = resolution.config
    now, typed = config.activation, asked_keys(resolution.choices)
    every = _fastest_first(config)
    if _CHECKPOINTING in typed or now.mlp_tile_tokens is not None:
        every = [now.checkpointing]
    ways = [_kept_so(config, replace(now, checkpointing=each)) for each in every]
    if Checkpointing.enabled not in every:
        return ways
    return ways + [way for way in _further_ways(resolution) if way not in ways]


def _fastest_first(config: RunConfig) -> list[Checkpointing]:
    parts = [Checkpointing.selective] if config.model.compile_layers else []
    return [Checkpointing.disabled, *parts, Checkpointing.enabled]


def _further_ways(resolution: Resolution) -> list[RunConfig]:
    """The run with layers recomputed and MLPs in tiles, and with activations in host memory too, as rules allow."""
    config = resolution.config
    now, typed = config.activation, asked_keys(resolution.choices)
    tiled = replace(now, checkpointing=Checkpointing.enabled, mlp_tile_tokens=now.mlp_tile_tokens or TILE_TOKENS)
    is_compiled = bool(config.model.compile_layers) and COMPILING in typed  # else `auto` does not compile tiles
    further = [replace(tiled, offload=is_offloaded) for is_offloaded in dict.fromkeys((now.offload, True))]
    ways = [_kept_so(config, activation, is_compiled=is_compiled) for activation in further]
    return [way for way in ways if not any(each.is_error and each.key.startswith("activation.") for each in check(way))]


def ways_to_keep_less(resolution: Resolution) -> list[str]:
    """What to type if the run's pass keeps too much, whatever was typed: from the fastest way on."""
    config, now = resolution.config, resolution.config.activation
    order = _fastest_first(config)
    later = order[order.index(now.checkpointing) + 1 :] if now.checkpointing in order else []
    ways = [replace(now, checkpointing=each) for each in later]
    ways += [way.activation for way in _further_ways(resolution) if tiles_pay(config)]
    present = _words_of(now)
    typed = [" ".join(word for word in _words_of(way) if word not in present) for way in ways]
    return [words for words in typed if words]


def tiles_pay(config: RunConfig) -> bool:
    """Whether the rows of a pass are long enough for tiles: packed rows, of which each GPU has more than two tiles."""
    on_each_gpu = (config.packing.row_length or 0) // config.parallelism.sequence_group_size
    return config.packing.mode is PackingMode.isolated and on_each_gpu > 2 * TILE_TOKENS


def _words_of(activation: ActivationConfig) -> list[str]:
    return _words(activation.checkpointing.name, activation.mlp_tile_tokens, is_offloaded=activation.offload)


def _kept_so(config: RunConfig, activation: ActivationConfig, *, is_compiled: bool | None = None) -> RunConfig:
    compiles = config.model.compile_layers if is_compiled is None else is_compiled
    return replace(config, activation=activation, model=replace(config.model, compile_layers=compiles))


def _longest(resolution: Resolution, facts: ModelFacts, positions: int, config: RunConfig) -> LongestRow:
    activation = config.activation
    unit = _STEP_TOKENS * max(1, config.parallelism.sequence_group_size)

    def fits(steps: int) -> bool:
        longer = _with_rows(config, steps * unit)
        return bool(tensors_fit(longer)) and plan_host_memory(longer, resolution.host_memory_gib).fits is not False

    by_memory = _most(fits) * unit
    has_room = by_memory < _MOST_STEPS * unit and bool(tensors_fit(_with_rows(config, by_memory + unit)))
    tokens = min(by_memory, positions // unit * unit)
    overrides = [f"training.max_length={tokens}", f"packing.row_length={tokens}", "training.micro_batch_size=1"]
    return LongestRow(
        checkpointing=activation.checkpointing.name,
        mlp_tile_tokens=activation.mlp_tile_tokens,
        offload=activation.offload,
        tokens=tokens,
        tokens_by_memory=by_memory,
        memory_gib=round(estimate_memory(_with_rows(config, tokens), facts).total_gib, 3) if tokens else None,
        is_limited_by_host=has_room,
        overrides=[*overrides, *_words_of(activation)] if tokens else [],
    )


def _with_rows(config: RunConfig, tokens: int) -> RunConfig:
    dataset = config.dataset
    return replace(
        config,
        dataset=replace(dataset, synthetic=replace(dataset.synthetic, max_tokens=tokens)),
        training=replace(config.training, max_length=tokens, micro_batch_size=1),
        packing=replace(config.packing, row_length=tokens),
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
