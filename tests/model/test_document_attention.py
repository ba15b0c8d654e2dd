"""Packed documents one after the other against sdpa with its block mask, in whole models and in training."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tunebook.config.choices import Attention
from tunebook.errors import RequestError
from tunebook.facts.architectures import VARLEN_ARCHITECTURES
from tunebook.model import document_attention
from tunebook.model.document_attention import sdpa_by_document
from tunebook.model.varlen_attention import register

LENGTHS = (7, 1, 12)


@pytest.fixture(autouse=True)
def registered():
    register(Attention.sdpa_by_document)


@pytest.fixture
def row(packed_row):
    return packed_row(LENGTHS)


@pytest.mark.parametrize("architecture", sorted(VARLEN_ARCHITECTURES))
def test_outputs_and_gradients_are_those_of_sdpa(model_pair, row, architecture):
    theirs, ours = model_pair(architecture, Attention.sdpa_by_document)
    inputs, places = row
    expected = theirs(**inputs, use_cache=False).logits
    found = ours(**inputs, **places, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    for logits in (expected, found):
        logits.logsumexp(-1).sum().backward()
    for (name, one), two in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_another_document_in_the_row_changes_nothing(model_pair, row):
    _, ours = model_pair("Qwen2ForCausalLM", Attention.sdpa_by_document)
    inputs, places = row
    with torch.no_grad():
        before = ours(**inputs, **places, use_cache=False).logits
        inputs["input_ids"][0, : LENGTHS[0]] = 5
        moved = (ours(**inputs, **places, use_cache=False).logits - before).abs()
    assert moved[:, : LENGTHS[0]].max() > 0.01
    assert moved[:, LENGTHS[0] :].max() < 1e-6  # two passes, whose sums may be in another order


def test_no_call_sees_more_than_a_document_or_is_given_a_mask(row, monkeypatch):
    """With a mask, sdpa in fp32 has no kernel but the one that keeps all scores."""
    seen = []

    def watched(query, key, value, **more):
        seen.append((query.shape, key.shape, set(more)))
        return functional.scaled_dot_product_attention(query, key, value, **more)

    monkeypatch.setattr(document_attention, "scaled_dot_product_attention", watched)
    query, key = torch.rand(sum(LENGTHS), 4, 8), torch.rand(sum(LENGTHS), 2, 8)
    ends = row[1]["cu_seq_lens_q"]
    assert sdpa_by_document(query, key, key, ends, ends, 12, 12, scale=0.5).shape == query.shape
    assert seen == [((1, 4, length, 8), (1, 4, length, 8), {"is_causal", "scale"}) for length in LENGTHS]


def test_lengths_are_read_once_for_all_layers_of_a_pass(model_pair, row, monkeypatch):
    read = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: read.append(1) or tolist(tensor))
    _, ours = model_pair("LlamaForCausalLM", Attention.sdpa_by_document, num_hidden_layers=3)
    inputs, places = row
    with torch.no_grad():
        ours(**inputs, **places, use_cache=False)
    assert len(read) == 1


def test_a_sliding_window_is_refused_by_its_name(model_pair, row):
    _, ours = model_pair("MistralForCausalLM", Attention.sdpa_by_document, sliding_window=3)
    inputs, places = row
    with pytest.raises(RequestError, match="attention=sdpa_by_document cannot compute this: the model has a sliding"):
        ours(**inputs, **places, use_cache=False)
