"""Packed documents one after the other against sdpa with its block mask, in whole models and in training."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from tunebook.config.choices import Attention
from tunebook.config.rules.attention import VARLEN_ARCHITECTURES
from tunebook.errors import RequestError
from tunebook.model import document_attention
from tunebook.model.document_attention import sdpa_by_document
from tunebook.model.varlen_attention import register

LENGTHS = (7, 1, 12)
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TYPES = ("gpt_neox", "llama", "mistral", "olmo", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")


@pytest.fixture(autouse=True)
def registered():
    register(Attention.sdpa_by_document)


def model_pair(kind, **sizes):
    """The same small model twice: with sdpa, and document by document."""
    config = AutoConfig.for_model(kind, **(SIZES | sizes))
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa")
    ours = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa_by_document")
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def row():
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    tokens = torch.randint(3, SIZES["vocab_size"], (1, sum(LENGTHS)), generator=torch.manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    places = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}
    return {"input_ids": tokens, "position_ids": positions}, places


@pytest.mark.parametrize("kind", TYPES)
def test_outputs_and_gradients_are_those_of_sdpa(kind):
    theirs, ours = model_pair(kind)
    assert type(ours).__name__ in VARLEN_ARCHITECTURES
    inputs, places = row()
    expected = theirs(**inputs, use_cache=False).logits
    found = ours(**inputs, **places, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    for logits in (expected, found):
        logits.logsumexp(-1).sum().backward()
    for (name, one), two in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_another_document_in_the_row_changes_nothing():
    _, ours = model_pair("qwen2")
    inputs, places = row()
    with torch.no_grad():
        before = ours(**inputs, **places, use_cache=False).logits
        inputs["input_ids"][0, : LENGTHS[0]] = 5
        moved = (ours(**inputs, **places, use_cache=False).logits - before).abs()
    assert moved[:, : LENGTHS[0]].max() > 0.01
    assert moved[:, LENGTHS[0] :].max() == 0


def test_no_call_sees_more_than_a_document_or_is_given_a_mask(monkeypatch):
    """With a mask, sdpa in fp32 has no kernel but the one that keeps all scores."""
    seen = []

    def watched(query, key, value, **more):
        seen.append((query.shape, key.shape, set(more)))
        return functional.scaled_dot_product_attention(query, key, value, **more)

    monkeypatch.setattr(document_attention, "scaled_dot_product_attention", watched)
    query, key = torch.rand(sum(LENGTHS), 4, 8), torch.rand(sum(LENGTHS), 2, 8)
    ends = row()[1]["cu_seq_lens_q"]
    assert sdpa_by_document(query, key, key, ends, ends, 12, 12, scale=0.5).shape == query.shape
    assert seen == [((1, 4, length, 8), (1, 4, length, 8), {"is_causal", "scale"}) for length in LENGTHS]


def test_lengths_are_read_once_for_all_layers_of_a_pass(monkeypatch):
    read = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: read.append(1) or tolist(tensor))
    _, ours = model_pair("llama", num_hidden_layers=3)
    inputs, places = row()
    with torch.no_grad():
        ours(**inputs, **places, use_cache=False)
    assert len(read) == 1


def test_a_sliding_window_is_refused_by_its_name():
    _, ours = model_pair("mistral", sliding_window=3)
    inputs, places = row()
    with pytest.raises(RequestError, match="attention=sdpa_by_document cannot compute this: the model has a sliding"):
        ours(**inputs, **places, use_cache=False)
