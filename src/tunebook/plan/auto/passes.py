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
from tunebook.data.batch import shortest_row
from tunebook.facts.attention import attention_facts
from tunebook.facts.compiling import CHEAP_BUDGET
from tunebook.facts.strategies import ALONE, strategy_facts
from tunebook.plan.auto.decisions import Decisions
from tunebook.plan.memory.verdict import tensors_fit

# Longer rows make matrix products larger: 3% faster than in rows of 16,384.
_FULL_COMPILED_ROW_TOKENS = 32_768
# Minimum ratio to the longest row that fits without recomputation: a row twice as long was 1% to 8% faster in spite of
# it. LoRA did not gain in rows of 8,192 tokens and more.
_WORTH_COMPUTING_AGAIN = 1.5
SHORT_ROW_TOKENS = 8192
# Of compiled blocks. On an H200 0.6 had 97 to 99% of the speed of 1, 0.4 had 95%, 0.2 had 85 to 88%
# (h200_memory_budget.jsonl), and layers recomputed whole 68 to 83%.
_BUDGETS = (1.0, 0.8, CHEAP_BUDGET, 0.4, 0.2)
# So much can be copied to the host while a block is computed (h200_adapter_variants.jsonl).
_OFFLOADED_BUDGET = 0.2


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
    is_open = resolved.activation.checkpointing is Checkpointing.auto
    decisions.decide("activation.offload", lambda: _offload(resolved))
    decisions.decide("activation.checkpointing", lambda: _checkpointing(resolved))
    if resolved.model.compile_layers:
        decisions.decide("activation.memory_budget", lambda: _memory_budget(resolved, is_open=is_open))


def _row_length(config: RunConfig) -> tuple[int, str]:
    side, length, group = config.training.max_length, shortest_row(config), config.parallelism.sequence_group_size
    if config.packing.mode is PackingMode.padded:
        return side, "training.max_length, the longest a padded row can be"
    shortest = "training.max_length" if side == length else f"{length // side} x training.max_length"
    if group > 1:
        return -(-length // group) * group, f"the shortest row for every document that {group} GPUs can share"
    full = _FULL_COMPILED_ROW_TOKENS if config.model.compile_layers else attention_facts(config).full_row_tokens
    if full is None or config.hardware.generation is Generation.cpu:
        return length, f"{shortest}, the shortest row that holds every document"
    row = _longest_useful_row(config, full)
    if row == length:
        return row, f"{shortest}; longer rows would not fit, or would be filled only in part"
    return row, f"{row // side} x training.max_length: long rows keep the GPU busy, and this one fits"


def _longest_useful_row(config: RunConfig, full: int) -> int:
    """The longest row that fits, up to `full` tokens, in multiples of `max_length` that divide the batch.

    What is cheap to recompute is recomputed for it if that saves passes.
    """
    training, activation, length = config.training, config.activation, shortest_row(config)
    rows_per_pass = data_ranks(config) * (training.micro_batch_size or 1)  # rows in a pass of all GPUs
    needed, filled = _tokens_of_a_step(config, rows_per_pass)
    budget = training.global_tokens
    multiples = (documents * length for documents in range(int(min(full, filled)) // length, 1, -1))
    rows = [*(row for row in multiples if budget is None or budget % (row * rows_per_pass) == 0), length]
    asked, fitting = activation.memory_budget, _longest(config, rows, 1.0)
    row = fitting or (None if asked is None else _longest(config, rows, asked)) or length
    is_open = activation.checkpointing is Checkpointing.auto and asked is None
    if not is_open or not config.model.compile_layers or row == rows[0]:
        return row
    if fitting is not None and config.peft.method is not PeftMethod.full and row >= SHORT_ROW_TOKENS:
        return row
    longer = _longest(config, rows, CHEAP_BUDGET) or length
    saves_passes = math.ceil(needed / longer) < math.ceil(needed / row)
    return longer if saves_passes and (fitting is None or longer >= _WORTH_COMPUTING_AGAIN * row) else row


def _tokens_of_a_step(config: RunConfig, rows_per_pass: int) -> tuple[float, float]:
    """Tokens of a step for each row of a pass: by the documents' mean length, and the most that one row may get.

    Steps with few documents vary, so the latter counts documents as twice the stated mean length.
    """
    training, length = config.training, shortest_row(config)
    if training.global_samples is None:
        tokens = (training.global_tokens or length) / rows_per_pass
        return tokens, tokens
    documents, mean = (
        math.ceil(training.global_samples / rows_per_pass),
        min(config.dataset.mean_tokens or length, length),
    )
    return documents * mean, min(documents * length, documents * min(2 * mean, length) + length)


def _longest(config: RunConfig, rows: list[int], memory_budget: float) -> int | None:
    """The first of these row lengths, longest first, that fits by estimate."""

    def fits(row: int) -> bool:
        longer = replace(config, packing=replace(config.packing, row_length=row))
        return bool(tensors_fit(longer, memory_budget=memory_budget))

    return next(iter(rows[bisect_left(rows, True, key=fits) :]), None)


def _micro_batch_size(config: RunConfig) -> tuple[int | None, str]:
    if config.packing.mode is PackingMode.padded:
        return None, "the largest that divides the batch evenly"
    return 1, "one packed row keeps a GPU busy"


def _offload(config: RunConfig) -> tuple[bool, str]:
    """Where layers would be recomputed whole otherwise, if that was measured."""
    activation = config.activation
    is_open = activation.checkpointing is Checkpointing.auto and activation.memory_budget is None
    is_measured = config.peft.method is not PeftMethod.full and config.parallelism.strategy is ALONE
    is_compiled = config.model.compile_layers and activation.mlp_tile_tokens is None
    if is_open and is_measured and is_compiled and _highest_budget(config) is None:
        offloaded = replace(config, activation=replace(activation, offload=True))
        if _highest_budget(offloaded) is not None:
            return True, "a quarter faster than layers recomputed whole, in less memory (Llama 3.1 8B, one H200)"
    return False, "copies between GPU and host take time"


def _checkpointing(config: RunConfig) -> tuple[Checkpointing, str]:
    """The least recomputation that fits."""
    asked = config.activation.memory_budget
    if config.activation.mlp_tile_tokens is not None:
        return Checkpointing.enabled, "MLP tiles need recomputed layers"
    if asked is not None and asked < 1:
        return Checkpointing.disabled, "activation.memory_budget says what is recomputed"
    is_budget_open = asked is None and config.model.compile_layers
    if is_budget_open and config.activation.offload and _highest_budget(config) is not None:
        return Checkpointing.disabled, "compiled blocks fit with a part of their activations in host memory"
    fits = tensors_fit(config, memory_budget=1.0)
    if fits is None:
        return Checkpointing.enabled, "the memory or the model's size is not known, and this is the safe choice"
    if fits:
        return Checkpointing.disabled, "all activations fit, and nothing is computed twice"
    if is_budget_open and _highest_budget(config) is not None:
        return Checkpointing.disabled, "compiled blocks fit with a part of their activations"
    return Checkpointing.enabled, "without it the activations do not fit"


def _highest_budget(config: RunConfig) -> float | None:
    budgets = (_OFFLOADED_BUDGET,) if config.activation.offload else _BUDGETS
    return next((budget for budget in budgets if tensors_fit(config, memory_budget=budget)), None)


def _memory_budget(config: RunConfig, *, is_open: bool) -> tuple[float, str]:
    """The highest that fits, where nobody chose how much is recomputed."""
    if config.activation.checkpointing is Checkpointing.enabled:
        return 1.0, "whole layers are recomputed"
    highest = _highest_budget(config) if is_open else None
    if highest is None or highest == 1:
        return 1.0, "all that the compiler keeps"
    if config.activation.offload:
        return highest, "the rest is copied while the next block is computed; more would take longer"
    cost = "1 to 3%" if highest >= CHEAP_BUDGET else "5 to 15%"
    return highest, f"the highest of {', '.join(map(str, _BUDGETS))} that fits; costs {cost} of the speed"
