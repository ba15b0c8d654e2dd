"""`tunebook plan --longest`: the longest row that fits a run, by estimate."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from tunebook.model.positions import positions_of
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.plan.draft import Draft
from tunebook.plan.memory.verdict import plan_host_memory, tensors_fit

_UNIT_TOKENS = 128  # rows are multiples of this for each GPU that shares them


@dataclass(frozen=True, kw_only=True)
class LongestRow:
    """The longest row that fits, up to the model's positions, and what to type after the recipe."""

    tokens: int  # 0: not even the shortest row fits
    has_all_positions: bool  # a longer row needs model.yarn_factor
    overrides: list[str]


def longest_row(draft: Draft) -> LongestRow | None:
    """Search the longest row of one document, the worst case for memory; `auto` decides for each length.

    None if the memory, or the model's size or positions, are unknown. `draft` has a memory plan.
    """
    positions = positions_of(draft.config.model)
    if positions is None or draft.memory is None or None in (draft.memory.total, draft.memory.capacity):
        return None
    unit = _UNIT_TOKENS * draft.config.parallelism.sequence_group_size
    rows = range(unit, positions + 1, unit)
    num_fitting = bisect_left(rows, True, key=lambda tokens: not _fits(draft, tokens))
    tokens = num_fitting * unit
    overrides = [f"training.max_length={tokens}", f"packing.row_length={tokens}", "training.micro_batch_size=1"]
    return LongestRow(tokens=tokens, has_all_positions=num_fitting == len(rows), overrides=overrides if tokens else [])


def _fits(draft: Draft, tokens: int) -> bool:
    assert draft.composition is not None and draft.machine is not None
    config = draft.composition.config
    config = replace(
        config,
        dataset=replace(config.dataset, synthetic=replace(config.dataset.synthetic, max_tokens=tokens)),
        training=replace(config.training, max_length=tokens, micro_batch_size=1),
        packing=replace(config.packing, row_length=tokens),
    )
    resolved = resolve_auto(config, draft.machine)
    host = plan_host_memory(resolved.config, resolved.host_memory_gib)
    return bool(tensors_fit(resolved.config)) and host.fits is not False
