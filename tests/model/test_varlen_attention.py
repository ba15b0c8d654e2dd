"""Our attention function for packed rows compared with sdpa; torch's kernel is replaced, since it needs a GPU."""

from __future__ import annotations

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM

from tunebook.config.choices import Attention
from tunebook.errors import RequestError
from tunebook.facts.architectures import SINK_ARCHITECTURES, VARLEN_ARCHITECTURES
from tunebook.model import varlen_attention as module
from tunebook.model.varlen_attention import register, varlen_attention

from .conftest import SMALL, daily

LENGTHS = (12, 8)
DOCUMENT_LENGTHS = (7, 1, 12)


class KernelInPlainTorch:
    """What torch's kernel computes in both directions, from the result and the sums that the backward pass is given."""

    @staticmethod
    def logits(query, key, cu_seq, scale, window):
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        logits = torch.einsum("qhd,khd->hqk", query, key) * scale
        place = torch.arange(query.shape[0])
        document = torch.bucketize(place, cu_seq[1:], right=True)
        behind = place[:, None] - place[None]  # how far a key is behind a query
        seen = (document[:, None] == document[None]) & (behind >= 0) & ((behind <= window) | (window < 0))
        return logits.masked_fill(~seen, float("-inf"))

    @classmethod
    def forward(cls, query, key, value, cu_seq, max_length, scale, window):
        logits = cls.logits(query, key, cu_seq, scale, window)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        return torch.einsum("hqk,khd->qhd", logits.softmax(-1), value), logits.logsumexp(-1).float()

    @classmethod
    def backward(cls, grad, query, key, value, attended, log_sums, cu_seq, max_length, scale, window):
        groups = query.shape[1] // key.shape[1]
        weights = (cls.logits(query, key, cu_seq, scale, window) - log_sums[..., None]).exp()
        of_weights = torch.einsum("qhd,khd->hqk", grad, value.repeat_interleave(groups, dim=1))
        of_logits = weights * (of_weights - (grad * attended).sum(-1).T[..., None]) * scale
        of_query = torch.einsum("hqk,khd->qhd", of_logits, key.repeat_interleave(groups, dim=1))
        of_key = torch.einsum("hqk,qhd->khd", of_logits, query)
        of_value = torch.einsum("hqk,qhd->khd", weights, grad)
        by_group = (gradient.unflatten(1, (-1, groups)).sum(2) for gradient in (of_key, of_value))
        return of_query, *by_group


def kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    """As torch's kernel takes it. Shapes: (num_tokens, num_heads, head_size)."""
    assert query.dtype == key.dtype == value.dtype
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert max_q == max_k == int(cu_seq_q.diff().max())
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return KernelInPlainTorch.forward(query, key, value, cu_seq_q, max_q, scale, window_size[0])[0]


def kernel_of_torch_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
    """torch's first version: it accepts groups of heads, but no window and no scale."""
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


@pytest.mark.parametrize("architecture", daily(sorted(VARLEN_ARCHITECTURES), "LlamaForCausalLM", "Qwen3MoeForCausalLM"))
@torch.no_grad()
def test_computes_what_sdpa_does_with_its_block_mask(registered, model_pair, row, architecture):
    theirs, ours = model_pair(architecture, Attention.varlen_attention)
    expected = theirs(**plain(row), use_cache=False).logits
    torch.testing.assert_close(ours(**row, use_cache=False).logits, expected, rtol=0, atol=1e-6)
    other = row | {"input_ids": row["input_ids"].clone()}
    other["input_ids"][0, : LENGTHS[0]] = 5  # another first document does not reach the second
    moved = ours(**other, use_cache=False).logits - expected
    assert moved[:, : LENGTHS[0]].abs().max() > 0.01
    assert moved[:, LENGTHS[0] :].abs().max() < 1e-6


@torch.no_grad()
def test_a_sliding_window_is_as_long_as_the_models(model_pair, row, monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    register(Attention.varlen_attention)
    theirs, ours = model_pair("MistralForCausalLM", Attention.varlen_attention, sliding_window=3)
    expected = theirs(**plain(row), use_cache=False).logits
    torch.testing.assert_close(ours(**row, use_cache=False).logits, expected, rtol=0, atol=1e-6)


def test_computes_in_autocasts_format_where_the_weights_are_fp32(registered, model_pair, row):
    _, ours = model_pair("Qwen2ForCausalLM", Attention.varlen_attention)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = ours(**row, use_cache=False).logits.float().logsumexp(-1).sum()
    loss.backward()
    gradients = [parameter.grad for name, parameter in ours.named_parameters() if "q_proj.weight" in name]
    assert gradients
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 30.0},
        {"s_aux": torch.zeros(4)},  # with torch 2.10's kernel, which knows no window
        {"sliding_window": 3},
        {"dropout": 0.1},
        {"cu_seq_lens_q": None},  # the boundaries of documents
    ],
    ids=str,
)
def test_what_the_kernel_cannot_compute_is_refused(row, options):
    heads = torch.zeros(1, 4, sum(LENGTHS), 8)
    with pytest.raises(RequestError) as caught:
        varlen_attention(
            torch.nn.Linear(1, 1), heads, heads, heads, None, kernel=kernel, kernel_takes=frozenset(),
            **{"cu_seq_lens_q": row["cu_seq_lens_q"], "max_length_q": 12} | options,
        )  # fmt: skip
    assert caught.value.problem_id == "varlen-attention-not-possible"


@pytest.mark.parametrize("architecture", daily(sorted(VARLEN_ARCHITECTURES), "LlamaForCausalLM"))
def test_outputs_and_gradients_are_those_of_sdpa(model_pair, packed_row, architecture):
    register(Attention.sdpa_by_document)
    theirs, ours = model_pair(architecture, Attention.sdpa_by_document)
    inputs, places = packed_row(DOCUMENT_LENGTHS)
    expected = theirs(**inputs, use_cache=False).logits
    logits = ours(**inputs, **places, use_cache=False).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)
    for output in (expected, logits):
        output.logsumexp(-1).sum().backward()
    for (name, weight), own in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(own.grad, weight.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_with_sinks_outputs_and_gradients_are_those_of_the_models_own_attention(monkeypatch, packed_row):
    """GPT-OSS, whose eager attention adds a column of sinks; one of its two layers has a sliding window."""
    assert {GptOssForCausalLM.__name__} == SINK_ARCHITECTURES, "`auto` takes the kernel for what is compared here"
    sizes = SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 3}
    monkeypatch.setattr(module, "_varlen_forward", KernelInPlainTorch.forward)
    monkeypatch.setattr(module, "_varlen_backward", KernelInPlainTorch.backward)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    register(Attention.varlen_attention)
    inputs, places = packed_row(DOCUMENT_LENGTHS)
    torch.manual_seed(0)
    theirs = GptOssForCausalLM._from_config(GptOssConfig(**sizes), attn_implementation="eager")
    for name, parameter in theirs.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    ours = GptOssForCausalLM._from_config(GptOssConfig(**sizes), attn_implementation="varlen_attention")
    ours.load_state_dict(theirs.state_dict())
    lengths = places["cu_seq_lens_q"].diff().tolist()
    alone = [theirs(input_ids=part, use_cache=False).logits for part in inputs["input_ids"].split(lengths, dim=1)]
    expected, logits = torch.cat(alone, dim=1), ours(**inputs, **places, use_cache=False).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    for output in (expected, logits):
        output.logsumexp(-1).sum().backward()
    for (name, weight), own in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(own.grad, weight.grad, rtol=1e-3, atol=1e-4, msg=name)
        assert not name.endswith("sinks") or weight.grad.abs().min() > 1e-4
