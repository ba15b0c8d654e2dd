"""The number of trained parameters for settings of an adapter."""

from __future__ import annotations

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from tunebook.config.choices import PeftMethod
from tunebook.model.parameters import count_parameters

from ..plan.memory.layers import llama_layers

HIDDEN, INNER, WORDS, LAYERS, RANK = 896, 4864, 151_936, 24, 8
KEYS = 128  # 2 of 14 heads
ALL = 4 * HIDDEN + 2 * (HIDDEN + KEYS) + 3 * (HIDDEN + INNER)


@pytest.fixture
def adapted(sound):
    sound.peft.method, sound.peft.rank = PeftMethod.lora, RANK
    return sound


@pytest.mark.parametrize(
    ("targets", "of_a_layer"),
    [
        ([], ALL),
        (["q_proj"], 2 * HIDDEN),
        (["self_attn.q_proj", "v_proj"], 2 * HIDDEN + HIDDEN + KEYS),
        (["down_proj"], HIDDEN + INNER),
        (["q_proj", "of_another_model"], 2 * HIDDEN),  # PEFT ignores the second
        (["of_another_model"], ALL),  # which PEFT refuses
    ],
)
def test_an_adapter_is_counted_where_it_is_put(adapted, targets, of_a_layer):
    adapted.peft.target_modules = targets
    assert count_parameters(adapted, adapted.model.facts).trained == RANK * of_a_layer * LAYERS


def test_modules_to_save_are_trained_whole(adapted):
    adapted.peft.modules_to_save = ["lm_head", "model.embed_tokens"]
    parameters = count_parameters(adapted, adapted.model.facts)
    assert parameters.trained == RANK * ALL * LAYERS + 2 * WORDS * HIDDEN
    assert (parameters.trained_embeddings, parameters.trained_head) == (WORDS * HIDDEN, WORDS * HIDDEN)
    adapted.peft.modules_to_save = ["embed_tokens"]  # leaves the head frozen
    parameters = count_parameters(adapted, adapted.model.facts)
    assert (parameters.trained_embeddings, parameters.trained_head) == (WORDS * HIDDEN, 0)


SIZES = {
    "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100,
}  # fmt: skip


@pytest.fixture
def small(adapted):
    """The configuration of a Llama of three layers with adapters of rank 4."""
    facts, adapted.peft.rank = adapted.model.facts, 4
    facts.num_layers = SIZES["num_hidden_layers"]
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size"):
        setattr(facts, name, SIZES[name])
    facts.measured = llama_layers(facts)
    return adapted


def trained_by_peft(*, targets, saved=None, **settings):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", pad_token_id=0, **SIZES))
    modules = {"target_modules": targets or "all-linear", "modules_to_save": saved}
    lora = LoraConfig(r=4, task_type="CAUSAL_LM", **modules, **settings)
    wrapped = get_peft_model(model, lora)
    return sum(parameter.numel() for parameter in wrapped.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("targets", [[], ["q_proj", "down_proj"]], ids=["all", "two"])
@pytest.mark.parametrize("saved", [["down_proj"], ["q_proj", "lm_head"]], ids="-".join)
def test_parts_of_layers_that_are_saved_whole_are_counted_as_peft_trains_them(small, targets, saved):
    """Trained whole, without adapters inside."""
    small.peft.target_modules, small.peft.modules_to_save = targets, saved
    expected = trained_by_peft(targets=targets, saved=saved)
    assert count_parameters(small, small.model.facts).trained == expected


@pytest.mark.parametrize("targets", [[], ["q_proj", "down_proj"], ["q_proj", "embed_tokens"]], ids="-".join)
@pytest.mark.parametrize(
    "settings",
    [{"rank_pattern": {"q_proj": 7}}, {"use_dora": True, "rank_pattern": {"q_proj": 2}}],
    ids=["ranks", "dora"],
)
def test_dora_and_other_ranks_are_counted_as_peft_trains_them(small, targets, settings):
    small.peft.target_modules = targets
    for name, value in settings.items():
        setattr(small.peft, name, value)
    assert count_parameters(small, small.model.facts).trained == trained_by_peft(targets=targets, **settings)
