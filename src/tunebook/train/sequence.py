"""Sequence groups: ranks that share each row, every one with an equal part of its tokens.

All but the attention works on single tokens. The attention gets whole rows: before it, the ranks of a group exchange
tokens for heads, so that each has all tokens of its share of the heads, and after it back. The kernels and the
boundaries of the documents stay those of a run without groups, and so does every loss, except for rounding. Gradients
need nothing more, with any strategy: each rank's loss is its share of the step's, and the exchange returns the
gradients of what it has moved.

Not DeepSpeed's `UlyssesSPAttentionHF` with accelerate's `sp_size`: they work with ZeRO only and with transformers' own
kernels, and their data loader makes a pass of each rank's rows in turn, so that a step would have other rows (0.19.8).

Source: Jacobs et al. 2023, DeepSpeed Ulysses, arXiv:2309.14509. Shapes: n ranks in a group, T tokens in a row, t = T/n
on each rank, H heads (of queries, or of keys and values), D numbers a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from transformers import AttentionInterface, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tunebook.config.schema import RunConfig
from tunebook.data.corpus import IGNORED_LABEL
from tunebook.errors import RequestError
from tunebook.model.varlen_attention import kernel_dtype

_BY_TOKEN = ("input_ids", "labels", "shift_labels", "position_ids", "seq_idx")  # (1, T) each
_STRETCHED = ("dynamic", "longrope")  # rotary positions that depend on the largest position that a rank sees


@dataclass(frozen=True, kw_only=True)
class SequenceGroup:
    """The group of this rank."""

    size: int
    rank: int  # in the group
    ranks: torch.distributed.ProcessGroup

    def collator(self, whole: Callable[[list[Any]], dict[str, Any]]) -> Callable[[list[Any]], dict[str, Any]]:
        """A collator that returns this rank's part of what `whole` returns, for rows that are the same in the group."""
        return lambda rows: part_of_row(whole(rows), self.rank, self.size)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """The whole (T, ...) from the parts (t, ...) of all ranks."""
        parts = [torch.empty_like(part) for _ in range(self.size)]
        torch.distributed.all_gather(parts, part.contiguous(), group=self.ranks)
        return torch.cat(parts)

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks."""
        torch.distributed.all_reduce(values, group=self.ranks)
        return values


_joined: SequenceGroup | None = None  # a process is in one group, which compiled layers cannot be given


def join_sequence_group(config: RunConfig) -> SequenceGroup | None:
    """Create the groups of all ranks; consecutive ranks are in one. None for groups of one. A collective."""
    global _joined
    size = config.parallelism.sequence_group_size
    if size == 1:
        return None
    rank, timeout = torch.distributed.get_rank(), timedelta(seconds=config.launcher.timeout_s)
    for first in range(0, torch.distributed.get_world_size(), size):
        ranks = list(range(first, first + size))
        group = torch.distributed.new_group(ranks, timeout=timeout)
        if rank in ranks:
            _joined = SequenceGroup(size=size, rank=rank - first, ranks=group)
    return _joined


def part_of_row(batch: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """A rank's tokens of one packed row; positions and boundaries of documents stay those of the whole row.

    Labels are shifted first, since the label of a part's last token is the first token of the next part.
    """
    labels = batch["labels"]
    shifted = torch.full_like(labels, IGNORED_LABEL)
    shifted[:, :-1] = labels[:, 1:]
    whole = {**batch, "shift_labels": shifted}
    num_tokens = labels.shape[1]
    assert num_tokens % size == 0, f"rows are filled up to a multiple of {size} tokens, and this one has {num_tokens}"
    return {
        name: value.chunk(size, dim=1)[rank].contiguous() if name in _BY_TOKEN else value
        for name, value in whole.items()
    }


def attend_over_group(config: RunConfig, group: SequenceGroup, architecture: PreTrainedConfig) -> None:
    """Make the run's attention exchange tokens for heads. Raises: RequestError for a model that cannot be shared."""
    name = config.attention.implementation.value
    settings = getattr(architecture.get_text_config(), "rope_parameters", None) or {}
    kinds = {str(part.get("rope_type")) for part in (settings, *settings.values()) if isinstance(part, dict)}
    if stretched := kinds.intersection(_STRETCHED):
        raise RequestError(
            f"parallelism.sequence_group_size={group.size}: the model's rotary positions ({', '.join(stretched)}) "
            "depend on all tokens of a row; try parallelism.sequence_group_size=1",
            problem_id="sequence-group-model",
        )
    whole = ALL_ATTENTION_FUNCTIONS[name]

    def attention(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **more: Any
    ) -> tuple[torch.Tensor, Any]:
        dtype = kernel_dtype(query)  # moves no wider numbers than the kernel computes with
        shared = (to_whole_row(tensor.to(dtype), group.size) for tensor in (query, key, value))
        attended, weights = whole(module, *shared, *args, **more)
        return to_all_heads(attended, group.size), weights

    AttentionInterface.register(name, attention)


def to_whole_row(part: torch.Tensor, size: int) -> torch.Tensor:
    """All tokens of this rank's share of the heads: (1, H, t, D) -> (1, H / n, T, D)."""
    _, heads, tokens, width = part.shape
    by_rank = part[0].reshape(size, heads // size, tokens, width).transpose(1, 2)
    received: torch.Tensor = exchange(by_rank)
    return received.reshape(1, size * tokens, heads // size, width).transpose(1, 2)


def to_all_heads(whole: torch.Tensor, size: int) -> torch.Tensor:
    """This rank's tokens of all heads: (1, T, H / n, D) -> (1, t, H, D)."""
    _, tokens, heads, width = whole.shape
    by_rank = whole.reshape(size, tokens // size, heads, width)
    received: torch.Tensor = exchange(by_rank)
    return received.transpose(0, 1).reshape(1, tokens // size, size * heads, width)


@torch.library.custom_op("tunebook::exchange", mutates_args=())
def exchange(by_rank: torch.Tensor) -> torch.Tensor:
    """Send each rank of the group its slice (n, ...), and return the slices that they send.

    Its gradient is the same exchange. Compiled layers call it as one operation.
    """
    assert _joined is not None, "only attention of a sequence group calls it"
    received = torch.empty(by_rank.shape, dtype=by_rank.dtype, device=by_rank.device)
    torch.distributed.all_to_all_single(received, by_rank.contiguous(), group=_joined.ranks)
    return received


@exchange.register_fake
def _(by_rank: torch.Tensor) -> torch.Tensor:
    return by_rank.new_empty(by_rank.shape)


exchange.register_autograd(lambda ctx, grad: exchange(grad))
