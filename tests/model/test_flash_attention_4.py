"""flash-attn 4's kernels as one operation: what it hands to them, and what the compiler and autograd make of it.

The kernels need a Hopper GPU. In their place stand the formulas, with the same names and arguments.
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from tunebook.model import varlen_attention as ours
from tunebook.model.varlen_attention import flash_attention_4

HEADS, GROUPS, SIZE = 4, 2, 8
CALLS: list[dict] = []


def documents(cu_seqlens):
    return [slice(*pair) for pair in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)]


def probabilities(query, key, scale):
    """(heads, T, T) of one document, and the logarithms of their sums."""
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(HEADS // GROUPS, 1)) * scale
    scores = scores.masked_fill(~torch.ones(scores.shape[1:]).tril().bool(), float("-inf"))
    return scores.softmax(-1), scores.logsumexp(-1)


def forward(query, key, value, *, softmax_scale, return_lse, causal, cu_seqlens_q, **more):
    assert return_lse and causal
    CALLS.append(more)
    attended, sums = torch.empty_like(query), torch.empty(query.shape[1], query.shape[0])
    for place in documents(cu_seqlens_q):
        likely, sums[:, place] = probabilities(query[place], key[place], softmax_scale)
        attended[place] = torch.einsum("hqk,khd->qhd", likely, value[place].repeat_interleave(HEADS // GROUPS, 1))
    return attended, sums, None, None, None


def backward(query, key, value, attended, grad, sums, *, softmax_scale, causal, cu_seqlens_q, **more):
    assert causal and grad.is_contiguous()
    found = [torch.empty_like(one) for one in (query, key, value)]
    for place in documents(cu_seqlens_q):
        likely, logarithms = probabilities(query[place], key[place], softmax_scale)
        torch.testing.assert_close(logarithms, sums[:, place])  # of the forward pass of the same row
        whole = value[place].repeat_interleave(HEADS // GROUPS, 1)
        shifted = torch.einsum("qhd,khd->hqk", grad[place], whole) - (grad * attended)[place].sum(-1).T.unsqueeze(-1)
        scores = likely * shifted * softmax_scale
        by_head = torch.einsum("hqk,qhd->khd", scores, query[place]), torch.einsum("hqk,qhd->khd", likely, grad[place])
        found[0][place] = torch.einsum("hqk,khd->qhd", scores, key[place].repeat_interleave(HEADS // GROUPS, 1))
        for one, summed in zip(found[1:], by_head, strict=True):
            one[place] = summed.unflatten(1, (GROUPS, -1)).sum(2)
    return *found, None


@pytest.fixture(autouse=True)
def _formulas(monkeypatch):
    interface = ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd, interface._flash_attn_bwd = forward, backward
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    CALLS.clear()


def inputs(*lengths, seed=0):
    """Query, key and value of a row of documents, and the offsets of the documents."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((sum(lengths), heads, SIZE) for heads in (HEADS, GROUPS, GROUPS))
    tensors = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    return tensors, torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32), max(lengths)


def by_sdpa(query, key, value, cu_seq):
    rows = []
    for place in documents(cu_seq):
        one = [tensor[place].transpose(0, 1).unsqueeze(0) for tensor in (query, key, value)]
        found = torch.nn.functional.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)
        rows.append(found[0].transpose(0, 1))
    return torch.cat(rows)


def gradients(found, tensors):
    return torch.autograd.grad((found * torch.arange(found.numel()).view_as(found).sin()).sum(), tensors)


def test_gradients_of_every_input_are_those_of_the_documents():
    tensors, cu_seq, longest = inputs(4, 1, 7)
    found = flash_attention_4(*tensors, cu_seq, cu_seq, longest, longest, scale=SIZE**-0.5)
    expected = by_sdpa(*tensors, cu_seq)
    torch.testing.assert_close(found, expected)
    for one, other in zip(gradients(found, tensors), gradients(expected, tensors), strict=True):
        torch.testing.assert_close(one, other)
    assert [{"cu_seqlens_k": cu_seq, "max_seqlen_q": 7, "max_seqlen_k": 7, "window_size_left": None}] == CALLS


def test_a_window_is_handed_on():
    tensors, cu_seq, longest = inputs(4)
    flash_attention_4(*tensors, cu_seq, cu_seq, longest, longest, scale=1.0, window_size=(2, 0))
    assert CALLS[0]["window_size_left"] == 2


@pytest.mark.usefixtures("own_compiler")
def test_it_is_part_of_one_graph_for_rows_of_any_length():
    graphs = []

    def counting(module, _):
        graphs.append(module)
        return module

    def block(query, key, value, cu_seq, longest):
        return flash_attention_4(query * 2, key, value, cu_seq, cu_seq, longest, longest, scale=SIZE**-0.5) + 1

    compiled = torch.compile(block, backend=counting, dynamic=True, fullgraph=True)
    for lengths in ((4, 6), (3, 2, 8), (5, 4)):
        tensors, cu_seq, longest = inputs(*lengths)
        expected, found = block(*tensors, cu_seq, longest), compiled(*tensors, cu_seq, longest)
        torch.testing.assert_close(found, expected)
        for one, other in zip(gradients(found, tensors), gradients(expected, tensors), strict=True):
            torch.testing.assert_close(one, other)
    assert len(graphs) == 1


def test_real_shapes_equal_those_for_the_compiler():
    tensors, cu_seq, longest = inputs(4, 6)
    settings = (cu_seq, longest, SIZE**-0.5, -1)
    torch.library.opcheck(ours._fa4_forward, (*tensors, *settings))
    tensors = [one.detach() for one in tensors]
    attended, sums = ours._fa4_forward(*tensors, *settings)
    torch.library.opcheck(ours._fa4_backward, (torch.ones_like(attended), *tensors, attended, sums, *settings))
