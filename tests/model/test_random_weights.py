"""Random weights: the model's own distributions, and the same numbers for any number of threads."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from tunebook.model import random_weights
from tunebook.model.random_weights import draw_weights

from .conftest import daily

SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 500,
         "num_attention_heads": 4, "pad_token_id": 3}  # fmt: skip


def drawn(kind="qwen2", seed=0, num_threads=None, **sizes):
    config = AutoConfig.for_model(kind, **(SIZES | sizes))
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.fill_(torch.nan)  # room that nobody has written to may hold anything
    draw_weights(model, seed, num_threads)
    return model


@pytest.mark.parametrize("kind", daily(("qwen2", "gpt_neox"), "qwen2"))
def test_every_tensor_has_the_mean_and_spread_that_the_library_would_give_it(kind):
    upstream = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES), dtype=torch.float32)
    ours, theirs = dict(drawn(kind).named_parameters()), dict(upstream.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert weight.requires_grad and torch.isfinite(weight).all(), name
        room = 6 * theirs[name].std(correction=0) / weight.numel() ** 0.5  # six standard errors
        assert abs(weight.mean() - theirs[name].mean()) <= 2 * room + 1e-8, name
        assert abs(weight.std(correction=0) - theirs[name].std(correction=0)) <= 2 * room + 1e-8, name
    if kind == "qwen2":
        padding = "model.embed_tokens.weight"
        assert not ours[padding][3].any() and not theirs[padding][3].any()


def test_weights_depend_on_the_seed_and_not_on_threads(monkeypatch):
    monkeypatch.setattr(random_weights, "_PIECE", 1000)  # 64 x 500 of the embedding are 32 pieces
    alone, four, other = (drawn(num_threads=1), drawn(num_threads=4), drawn(seed=1, num_threads=4))
    for name, weight in alone.named_parameters():
        assert torch.equal(weight, four.get_parameter(name)), name
        assert weight.dim() == 1 or not torch.equal(weight, other.get_parameter(name)), name


def test_a_head_of_its_own_is_drawn_and_a_tied_one_stays_tied():
    tied, untied = drawn(tie_word_embeddings=True), drawn(tie_word_embeddings=False)
    assert tied.lm_head.weight is tied.get_input_embeddings().weight
    assert not torch.equal(untied.lm_head.weight, untied.get_input_embeddings().weight)
