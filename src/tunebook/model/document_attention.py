"""Attention over packed documents by torch's sdpa, one document after the other: on every GPU, and in fp32.

Given a row as a whole, sdpa needs a mask of all its tokens squared, which every layer keeps, and computes what the mask
then hides. A document by itself needs no mask: any of sdpa's kernels can take it, and nothing is computed between
documents.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.weak import WeakIdKeyDictionary

_lengths_of = WeakIdKeyDictionary()


def sdpa_by_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    is_causal: bool = True,
    scale: float | None = None,
) -> torch.Tensor:
    """Causal attention of each document to itself, called as torch's `varlen_attn` is.

    Shapes: query (num_tokens, num_heads, head_size), key and value the same with their own number of heads, cu_seq_q
    (num_documents + 1,); the result as the query. Heads in groups are repeated, as transformers does for sdpa: not all
    of its kernels take groups.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    lengths = _document_lengths(cu_seq_q)
    by_head = (torch.split(tensor.transpose(0, 1), lengths, dim=1) for tensor in (query, key, value))
    attended = [
        scaled_dot_product_attention(of_query[None], of_key[None], of_value[None], is_causal=is_causal, scale=scale)[0]
        for of_query, of_key, of_value in zip(*by_head, strict=True)
    ]
    return torch.cat(attended, dim=1).transpose(0, 1)


def _document_lengths(cu_seq_lens: torch.Tensor) -> list[int]:
    """On the host. All layers of a pass are given the same tensor: only the first of them waits for the GPU."""
    if cu_seq_lens not in _lengths_of:
        _lengths_of[cu_seq_lens] = cu_seq_lens.diff().tolist()
    lengths: list[int] = _lengths_of[cu_seq_lens]
    return lengths
