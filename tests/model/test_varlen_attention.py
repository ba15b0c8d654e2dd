"""Our attention function for packed rows against sdpa, with torch's kernel replaced: that one needs a GPU."""

from __future__ import annotations

import pytest
import torch

from tunebook.config.choices import Attention
from tunebook.errors import RequestError
from tunebook.facts.architectures import VARLEN_ARCHITECTURES
from tunebook.model.varlen_attention import register, varlen_attention

LENGTHS = (12, 8)


def kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    """What torch's does, one document after the other. Shapes: (num_tokens, num_heads, head_size)."""
    assert query.dtype == key.dtype == value.dtype
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert max_q == max_k == int(cu_seq_q.diff().max())
    attended = []
    for start, end in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        positions = torch.arange(end - start)
        behind = positions[:, None] - positions[None]  # how far a key is behind a query
        allowed = (behind >= 0) & ((behind <= window_size[0]) if window_size[0] >= 0 else True)
        parts = [tensor[start:end].transpose(0, 1)[None] for tensor in (query, key, value)]
        found = torch.nn.functional.scaled_dot_product_attention(
            *parts, attn_mask=allowed, scale=scale, enable_gqa=enable_gqa
        )
        attended.append(found[0].transpose(0, 1))
    return torch.cat(attended)


def kernel_of_torch_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
    """The first version: groups of heads without a word, no window, no scale."""
    assert is_causal
    return kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, enable_gqa=query.shape[1] != key.shape[1])


@pytest.fixture(params=[kernel, kernel_of_torch_2_10], ids=["torch_2_13", "torch_2_10"])
def registered(request, monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", request.param)
    register(Attention.varlen_attention)


@pytest.fixture
def row(packed_row):
    inputs, places = packed_row(LENGTHS)
    return inputs | places


def plain(inputs):
    return {name: inputs[name] for name in ("input_ids", "position_ids")}


@pytest.mark.parametrize("architecture", sorted(VARLEN_ARCHITECTURES))
@torch.no_grad()
def test_computes_what_sdpa_does_with_its_block_mask(registered, model_pair, row, architecture):
    theirs, ours = model_pair(architecture, Attention.varlen_attention)
    inputs = row
    expected = theirs(**plain(inputs), use_cache=False).logits
    torch.testing.assert_close(ours(**inputs, use_cache=False).logits, expected, rtol=0, atol=1e-6)
    other = inputs | {"input_ids": inputs["input_ids"].clone()}
    other["input_ids"][0, : LENGTHS[0]] = 5  # another first document does not reach the second
    moved = ours(**other, use_cache=False).logits - expected
    assert moved[:, : LENGTHS[0]].abs().max() > 0.01
    assert moved[:, LENGTHS[0] :].abs().max() < 1e-6


@torch.no_grad()
def test_a_sliding_window_is_as_long_as_the_models(model_pair, row, monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    register(Attention.varlen_attention)
    theirs, ours = model_pair("MistralForCausalLM", Attention.varlen_attention, sliding_window=3)
    inputs = row
    expected = theirs(**plain(inputs), use_cache=False).logits
    torch.testing.assert_close(ours(**inputs, use_cache=False).logits, expected, rtol=0, atol=1e-6)


def test_a_window_is_not_left_out_where_the_kernel_knows_none(model_pair, row, monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel_of_torch_2_10)
    register(Attention.varlen_attention)
    _, ours = model_pair("MistralForCausalLM", Attention.varlen_attention, sliding_window=3)
    with pytest.raises(RequestError, match="sliding window"):
        ours(**row, use_cache=False)


def test_computes_in_autocasts_format_where_the_weights_are_fp32(registered, model_pair, row):
    _, ours = model_pair("Qwen2ForCausalLM", Attention.varlen_attention)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = ours(**row, use_cache=False).logits.float().logsumexp(-1).sum()
    loss.backward()
    gradients = [parameter.grad for name, parameter in ours.named_parameters() if "q_proj.weight" in name]
    assert gradients
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)


class TestRefuses:
    def test_rows_without_the_places_of_their_documents(self, registered, model_pair, row):
        _, ours = model_pair("Qwen2ForCausalLM", Attention.varlen_attention)
        with pytest.raises(RequestError, match="places of their documents; try packing=isolated"):
            ours(**plain(row), use_cache=False)

    @pytest.mark.parametrize(
        ("asked", "says"),
        [
            ({"softcap": 30.0}, "caps its attention logits; try attention=sdpa"),
            ({"s_aux": torch.zeros(4)}, "has attention sinks"),
            ({"dropout": 0.1}, "a dropout of 0.1 of the attention"),
        ],
    )
    def test_what_the_kernel_cannot_compute(self, row, asked, says):
        heads = torch.zeros(1, 4, sum(LENGTHS), 8)
        ends = row["cu_seq_lens_q"]
        with pytest.raises(RequestError, match=says):
            varlen_attention(
                torch.nn.Linear(1, 1), heads, heads, heads, None, cu_seq_lens_q=ends, max_length_q=12,
                kernel=kernel, kernel_takes=frozenset(), **asked,
            )  # fmt: skip
