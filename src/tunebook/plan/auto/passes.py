"""Decide row length and activation checkpointing where they are left open.

The decision depends on the estimated memory. It therefore comes after the strategy, once for each strategy that
`parallelism=auto` tries.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import replace

from tunebook.config.choices import Checkpointing, Generation, PackingMode, PeftMethod
from tunebook.config.schema import FsdpConfig, RunConfig, data_ranks
from tunebook.facts.attention import attention_facts
from tunebook.facts.strategies import strategy_facts
from tunebook.plan.auto.decisions import Decisions
from tunebook.plan.memory.verdict import tensors_fit

# Longer rows make matrix products larger: 3% faster than in rows of 16,384 (h200_selective.jsonl).
_FULL_COMPILED_ROW_TOKENS = 32_768
# Minimum ratio to the longest row that fits without recomputation: a row twice as long was 1% to 8% faster in spite of
# it. LoRA did not gain in rows of 8,192 tokens and more.
_WORTH_COMPUTING_AGAIN = 1.5
SHORT_ROW_TOKENS = 8192


def decide_passes(decisions: Decisions) -> None:
    """Decide what depends on the memory that the strategy leaves: rows, micro batch and checkpointing."""
    resolved = decisions.config
    decisions.decide("packing.row_length", lambda: _row_length(resolved))
    decisions.decide("training.micro_batch_size", lambda: _micro_batch_size(resolved))
    if strategy_facts(resolved).within_groups and isinstance(resolved.parallelism, FsdpConfig):
        per_node = resolved.hardware.gpus_per_node or 1
        decisions.decide(
            "parallelism.shard_group_size", lambda: (per_node, "the GPUs of a node have the fastest links")
        )
    decisions.decide("activation.checkpointing", lambda: _checkpointing(resolved))


def _row_length(config: RunConfig) -> tuple[int, str]:
    length, group = config.training.max_length, config.parallelism.sequence_group_size
    if config.packing.mode is PackingMode.padded:
        return length, "training.max_length, the longest a padded row can be"
    if group > 1:
        return -(-length // group) * group, f"the shortest row for every document that {group} GPUs can share"
    full = _FULL_COMPILED_ROW_TOKENS if config.model.compile_layers else attention_facts(config).full_row_tokens
    if full is None or config.hardware.generation is Generation.cpu:
        return length, "training.max_length, the shortest row that holds every document"
    row = _longest_useful_row(config, full)
    if row == length:
        return row, "training.max_length; longer rows would not fit, or would be filled only in part"
    return row, f"{row // length} x training.max_length: long rows keep the GPU busy, and this one fits"


def _longest_useful_row(config: RunConfig, full: int) -> int:
    """The longest row that fits, up to `full` tokens, in multiples of `max_length` that divide the batch.

    Norms and activation functions are recomputed for it if that saves passes.
    """
    training, requested, length = config.training, config.activation.checkpointing, config.training.max_length
    rows_per_pass = data_ranks(config) * (training.micro_batch_size or 1)  # rows in a pass of all GPUs
    needed, filled = _tokens_of_a_step(config, rows_per_pass)
    budget = training.global_tokens
    multiples = (documents * length for documents in range(int(min(full, filled)) // length, 1, -1))
    rows = [*(row for row in multiples if budget is None or budget % (row * rows_per_pass) == 0), length]
    is_selective = requested is Checkpointing.selective
    fitting = _longest(config, rows, Checkpointing.selective if is_selective else Checkpointing.disabled)
    row = fitting or length
    if requested is not Checkpointing.auto or not config.model.compile_layers or row == rows[0]:
        return row
    if fitting is not None and config.peft.method is not PeftMethod.full and row >= SHORT_ROW_TOKENS:
        return row
    longer = _longest(config, rows, Checkpointing.selective) or length
    saves_passes = math.ceil(needed / longer) < math.ceil(needed / row)
    return longer if saves_passes and (fitting is None or longer >= _WORTH_COMPUTING_AGAIN * row) else row


def _tokens_of_a_step(config: RunConfig, rows_per_pass: int) -> tuple[float, float]:
    """Tokens of a step for each row of a pass: by the documents' mean length, and the most that one row may get.

    Steps with few documents vary, so the latter counts documents as twice the stated mean length.
    """
    training, length = config.training, config.training.max_length
    if training.global_samples is None:
        tokens = (training.global_tokens or length) / rows_per_pass
        return tokens, tokens
    documents, mean = (
        math.ceil(training.global_samples / rows_per_pass),
        min(config.dataset.mean_tokens or length, length),
    )
    return documents * mean, min(documents * length, documents * min(2 * mean, length) + length)


def _longest(config: RunConfig, rows: list[int], checkpointing: Checkpointing) -> int | None:
    """The first of these row lengths, longest first, that fits by estimate."""

    def fits(row: int) -> bool:
        longer = replace(config, packing=replace(config.packing, row_length=row))
        return bool(tensors_fit(longer, checkpointing=checkpointing))

    return next(iter(rows[bisect_left(rows, True, key=fits) :]), None)


def _micro_batch_size(config: RunConfig) -> tuple[int | None, str]:
    if config.packing.mode is PackingMode.padded:
        return None, "the largest that divides the batch evenly"
    return 1, "one packed row keeps a GPU busy"


def _checkpointing(config: RunConfig) -> tuple[Checkpointing, str]:
    """The least recomputation that fits: whole layers cost up to a third of the speed, parts 1 to 3%."""
    if config.activation.mlp_tile_tokens is not None:
        return Checkpointing.enabled, "MLP tiles need recomputed layers"
    fits = tensors_fit(config, checkpointing=Checkpointing.disabled)
    if fits is None:
        return Checkpointing.enabled, "the memory or the model's size is not known, and this is the safe choice"
    if fits:
        return Checkpointing.disabled, "all activations fit, and nothing is computed twice"
    if config.model.compile_layers and tensors_fit(config, checkpointing=Checkpointing.selective):
        return (
            Checkpointing.selective,
            "not all activations fit; recomputing parts costs 1 to 3% of the speed",
        )
    return Checkpointing.enabled, "without it the activations do not fit"
