"""Decide row length and activation checkpointing where they are left open.

The decision depends on the estimated memory. It therefore comes after the strategy, once for each strategy that
`parallelism=auto` tries.
"""

from __future__ import annotations

import math
from dataclasses import replace

from tunebook.config.choices import (
    Checkpointing,
    Generation,
    PackingMode,
    PeftMethod,
)
from tunebook.config.schema import FsdpConfig, RunConfig, data_ranks
from tunebook.facts.attention import ATTENTIONS, attention_facts
from tunebook.facts.strategies import strategy_facts
from tunebook.model.parameters import known_facts
from tunebook.plan.auto.decisions import Decisions
from tunebook.plan.memory import USABLE_SHARE, estimate_memory, fits_into, gib_text, tensors_fit

# Compiled blocks spend less time between matrix products, and a longer row makes the products larger. Qwen2.5-3B on one
# H200 had 25,079 tokens/s in rows of 8,192 and 27,062 in rows of 16,384 (h200x4_speed.jsonl). With norms and activation
# functions recomputed it had 27,114 in rows of 16,384 and 27,808 in rows of 32,768 (h200_selective.jsonl).
_FULL_COMPILED_ROW_TOKENS = 32_768
# Minimum ratio to the longest row that fits without recomputation. With recomputation, a row twice as long was 8%
# faster under FSDP (Llama 3 8B, two H200) and 1% faster on one GPU. LoRA lost twice as much in rows of 8,192 tokens,
# and longer rows gave it no measured gain.
_WORTH_COMPUTING_AGAIN = 1.5
SHORT_ROW_TOKENS = 8192
_MUCH_LONGER = 32  # times the mean: few data sets have a document so long
_SHORTEST_ROW_TOKENS = 2  # minimum of training.max_length; its range rule refuses less


def decide_passes(decisions: Decisions) -> None:
    """Decide what depends on the memory that the strategy leaves: rows, micro batch and checkpointing."""
    resolved = decisions.config
    decisions.decide("packing.row_length", lambda: _row_length(resolved))
    decisions.decide("training.micro_batch_size", lambda: _micro_batch_size(resolved))
    if strategy_facts(resolved).within_groups and isinstance(resolved.parallelism, FsdpConfig):
        decisions.decide("parallelism.shard_group_size", lambda: _shard_group_size(resolved))
    decisions.decide("activation.checkpointing", lambda: _checkpointing(resolved))


def _row_length(config: RunConfig) -> tuple[int, str]:
    length = max(_SHORTEST_ROW_TOKENS, config.training.max_length)
    if length != config.training.max_length:
        return length, "the shortest row there is: training.max_length cannot be so short"
    if config.packing.mode is PackingMode.padded:
        return length, "training.max_length: the longest a padded row can be"
    group = config.parallelism.sequence_group_size
    if group > 1:
        return -(-length // group) * group, f"the shortest row that holds every document and that {group} GPUs divide"
    target = attention_facts(config).full_row_tokens
    if config.model.compile_layers:
        target = _FULL_COMPILED_ROW_TOKENS
    if target is None or config.hardware.generation is Generation.cpu:
        return length, "training.max_length: the shortest row that holds every document"
    target = min(target, _tokens_of_a_step(config))
    row, again = _longest_row(config, target, _kept(config)), ""
    if _may_recompute_parts(config):
        longer = _longest_row(config, target, Checkpointing.selective)
        if _is_worth_recomputing_parts(config, row, longer):
            row, again = longer, " with norms and activation functions recomputed"
    if row == length:
        why = "training.max_length: a step fills no longer row, or none would divide the batch or fit into memory"
        mean = config.dataset.mean_tokens
        if mean is not None and mean * _MUCH_LONGER <= row:
            why += f"; of documents of {mean:,.0f} tokens the longest may need less of training.max_length"
        return row, why
    times = f"{row // length} x training.max_length"
    return row, f"{times}: a longer pass keeps the GPU busy, and is estimated to fit{again}"


def _tokens_of_a_step(config: RunConfig) -> int:
    """Tokens of a step's documents that can fill one row, if every GPU gets one row.

    Steps with few documents vary, so documents count as twice the stated mean length.
    """
    training, ranks = config.training, data_ranks(config)
    if training.global_samples is None:
        return training.global_tokens or training.max_length
    documents = training.global_samples / ranks
    mean = min(2 * (config.dataset.mean_tokens or training.max_length), training.max_length)
    return min(math.ceil(documents) * training.max_length, math.ceil(documents * mean) + training.max_length)


def _longest_row(config: RunConfig, target: int, checkpointing: Checkpointing) -> int:
    """The longest row up to `target` tokens, in multiples of `max_length`, that fits and divides the batch."""
    length = config.training.max_length
    rows = (documents * length for documents in range(target // length, 1, -1))
    return next(
        (row for row in rows if _divides_token_budget(config, row) and _fits(config, row, checkpointing)), length
    )


def _is_worth_recomputing_parts(config: RunConfig, row: int, longer: int) -> bool:
    """Whether recomputation allows fewer, longer passes, or the shorter row needs it as well."""
    if longer <= row or _passes(config, longer) >= _passes(config, row):
        return False
    if not _fits(config, row, Checkpointing.disabled):
        return True
    if config.peft.method is not PeftMethod.full and row >= SHORT_ROW_TOKENS:
        return False
    return longer >= _WORTH_COMPUTING_AGAIN * row


def _passes(config: RunConfig, row: int) -> int:
    """Number of passes of a step with rows of `row` tokens; unknown document lengths count as the longest."""
    training = config.training
    tokens: float = training.global_tokens or 0
    if training.global_samples is not None:
        mean = min(config.dataset.mean_tokens or training.max_length, training.max_length)
        tokens = training.global_samples * mean
    return math.ceil(tokens / (row * data_ranks(config) * (training.micro_batch_size or 1)))


def _kept(config: RunConfig) -> Checkpointing:
    """The checkpointing assumed for the longest row: selective if requested, never whole layers."""
    is_selective = config.activation.checkpointing is Checkpointing.selective
    return Checkpointing.selective if is_selective else Checkpointing.disabled


def _may_recompute_parts(config: RunConfig) -> bool:
    """Whether checkpointing is open and the blocks are compiled, which allows recomputing parts."""
    return config.activation.checkpointing is Checkpointing.auto and bool(config.model.compile_layers)


def _divides_token_budget(config: RunConfig, row: int) -> bool:
    """Whether rows of this length divide the token budget evenly among all ranks."""
    budget = config.training.global_tokens
    return budget is None or budget % (row * data_ranks(config) * (config.training.micro_batch_size or 1)) == 0


def _fits(config: RunConfig, row: int, checkpointing: Checkpointing) -> bool:
    longer = replace(config, packing=replace(config.packing, row_length=row))
    return tensors_fit(longer, checkpointing=checkpointing) is True


def _micro_batch_size(config: RunConfig) -> tuple[int | None, str]:
    kernel, row = config.attention.implementation, config.packing.row_length
    if config.packing.mode is PackingMode.padded:
        return None, "the batch solver takes the largest that divides the batch evenly"
    if not ATTENTIONS[kernel].has_mask:
        return 1, f"one packed row of {row} tokens has work enough for a GPU; more is worth it only for short rows"
    return 1, f"{kernel.name} builds a mask of all tokens of a pass squared: one row of {row} keeps it smallest"


def _shard_group_size(config: RunConfig) -> tuple[int, str]:
    return config.hardware.gpus_per_node or 1, "the GPUs of one node, which have the fastest links"


def _checkpointing(config: RunConfig) -> tuple[Checkpointing, str]:
    """The least recomputation that fits: whole layers cost up to a third of the speed, parts 1 to 3%."""
    facts, memory = known_facts(config), config.hardware.memory_gib
    if config.activation.mlp_tile_tokens is not None:
        return Checkpointing.enabled, "MLPs are computed in tiles of layers that are recomputed"
    if facts is None:
        return Checkpointing.enabled, "the model's size is not known before it is loaded, and this is the safe choice"
    if memory is None:
        return Checkpointing.enabled, "the memory is not known, and this is the safe choice"
    estimate = estimate_memory(config, facts, checkpointing=Checkpointing.disabled)
    working = estimate.buffers_gib + estimate.activations_gib
    parts = f"{gib_text(estimate.states_gib)} of states and {gib_text(working)} of activations and buffers"
    there = f"{USABLE_SHARE:.0%} of {memory:g} GiB"
    if fits_into(config, estimate.total_gib, memory):
        return Checkpointing.disabled, f"estimated {parts} fit into {there}, and it is faster"
    if estimate.total_gib <= memory * USABLE_SHARE:
        there = f"{memory:g} GiB, of which CUDA and unusable pieces take a part"
    if _may_recompute_parts(config) and tensors_fit(config, checkpointing=Checkpointing.selective):
        again = estimate_memory(config, facts, checkpointing=Checkpointing.selective)
        left = gib_text(again.buffers_gib + again.activations_gib)
        does = f"with norms and activation functions recomputed {left} of the latter do"
        is_full = config.peft.method is PeftMethod.full
        slower = "1.4% slower (Qwen2.5-3B, one H200)" if is_full else "3% slower (Llama 3 8B by LoRA, one H200)"
        return Checkpointing.selective, f"estimated {parts} do not fit into {there}; {does}, {slower}"
    return Checkpointing.enabled, f"estimated {parts} do not fit into {there}"
