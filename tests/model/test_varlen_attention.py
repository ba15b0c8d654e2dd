"""Our attention function for packed rows against sdpa, with torch's kernel replaced: that one needs a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tunebook.config.choices import Attention
from tunebook.config.rules.attention import VARLEN_ARCHITECTURES
from tunebook.errors import RequestError
from tunebook.model.varlen_attention import register, varlen_attention

LENGTHS = (12, 8)
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TYPES = {
    "GPTNeoXForCausalLM": "gpt_neox", "LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral",
    "OlmoForCausalLM": "olmo", "Olmo2ForCausalLM": "olmo2", "Phi3ForCausalLM": "phi3", "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3", "SmolLM3ForCausalLM": "smollm3",
}  # fmt: skip


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


def model_pair(kind: str, **sizes: object) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same small model twice: with sdpa, and with ours."""
    config = AutoConfig.for_model(kind, **(SIZES | sizes))
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa").eval()
    ours = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="varlen_attention").eval()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def row() -> dict[str, torch.Tensor | int]:
    """Two documents in a row, as the collator gives them."""
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    return {
        "input_ids": torch.randint(3, SIZES["vocab_size"], (1, sum(LENGTHS)), generator=torch.manual_seed(1)),
        "position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None],
        "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS),
    }  # fmt: skip


def plain(inputs):
    return {name: inputs[name] for name in ("input_ids", "position_ids")}


def test_every_architecture_that_auto_takes_it_for_is_tried_here():
    assert set(TYPES) == VARLEN_ARCHITECTURES


@pytest.mark.parametrize("architecture", TYPES)
@torch.no_grad()
def test_computes_what_sdpa_does_with_its_block_mask(registered, architecture):
    theirs, ours = model_pair(TYPES[architecture])
    assert type(ours).__name__ == architecture
    inputs = row()
    expected = theirs(**plain(inputs), use_cache=False).logits
    torch.testing.assert_close(ours(**inputs, use_cache=False).logits, expected, rtol=0, atol=1e-6)
    other = inputs | {"input_ids": inputs["input_ids"].clone()}
    other["input_ids"][0, : LENGTHS[0]] = 5  # another first document does not reach the second
    moved = ours(**other, use_cache=False).logits - expected
    assert moved[:, : LENGTHS[0]].abs().max() > 0.01
    assert moved[:, LENGTHS[0] :].abs().max() < 1e-6


@torch.no_grad()
def test_a_sliding_window_is_as_long_as_the_models(monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    register(Attention.varlen_attention)
    theirs, ours = model_pair("mistral", sliding_window=3)
    inputs = row()
    expected = theirs(**plain(inputs), use_cache=False).logits
    torch.testing.assert_close(ours(**inputs, use_cache=False).logits, expected, rtol=0, atol=1e-6)


def test_a_window_is_not_left_out_where_the_kernel_knows_none(monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel_of_torch_2_10)
    register(Attention.varlen_attention)
    _, ours = model_pair("mistral", sliding_window=3)
    with pytest.raises(RequestError, match="sliding window"):
        ours(**row(), use_cache=False)


def test_computes_in_autocasts_format_where_the_weights_are_fp32(registered):
    _, ours = model_pair("qwen2")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = ours(**row(), use_cache=False).logits.float().logsumexp(-1).sum()
    loss.backward()
    gradients = [parameter.grad for name, parameter in ours.named_parameters() if "q_proj.weight" in name]
    assert gradients
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)


class TestRefuses:
    def test_rows_without_the_places_of_their_documents(self, registered):
        _, ours = model_pair("qwen2")
        with pytest.raises(RequestError, match="places of their documents; try packing=isolated"):
            ours(**plain(row()), use_cache=False)

    @pytest.mark.parametrize(
        ("asked", "says"),
        [
            ({"softcap": 30.0}, "caps its attention logits; try attention=sdpa"),
            ({"s_aux": torch.zeros(4)}, "has attention sinks"),
            ({"dropout": 0.1}, "a dropout of 0.1 of the attention"),
            ({"scaling": 0.5}, "scales its attention by 0.5, and this version"),
        ],
    )
    def test_what_the_kernel_cannot_compute(self, asked, says):
        """The kernel here knows neither scale nor window, as torch 2.10's."""
        heads = torch.zeros(1, 4, sum(LENGTHS), 8)
        ends = row()["cu_seq_lens_q"]
        with pytest.raises(RequestError, match=says):
            varlen_attention(
                torch.nn.Linear(1, 1), heads, heads, heads, None, cu_seq_lens_q=ends, max_length_q=12,
                kernel=kernel, kernel_takes=frozenset(), **asked,
            )  # fmt: skip
