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


@pytest.mark.parametrize(
    "settings",
    [
        {"modules_to_save": ["down_proj"]},  # trained whole, without adapters inside
        {"modules_to_save": ["q_proj", "lm_head"], "target_modules": ["q_proj", "down_proj"]},
        {"rank_pattern": {"q_proj": 7}},
        {"rank_pattern": {"q_proj": 7}, "target_modules": ["q_proj", "embed_tokens"]},
        {"use_dora": True, "rank_pattern": {"q_proj": 2}},
        {"use_dora": True, "rank_pattern": {"q_proj": 2}, "target_modules": ["q_proj", "embed_tokens"]},
    ],
    ids=str,
)
def test_adapters_are_counted_as_peft_trains_them(adapted, settings):
    facts, adapted.peft.rank = adapted.model.facts, 4
    facts.num_layers = SIZES["num_hidden_layers"]
    for name in SIZES.keys() - {"num_hidden_layers"}:
        setattr(facts, name, SIZES[name])
    facts.measured = llama_layers(facts)
    for name, value in settings.items():
        setattr(adapted.peft, name, value)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", pad_token_id=0, **SIZES))
    lora = LoraConfig(**{"r": 4, "task_type": "CAUSAL_LM", "target_modules": "all-linear"} | settings)
    wrapped = get_peft_model(model, lora)
    trained = sum(parameter.numel() for parameter in wrapped.parameters() if parameter.requires_grad)
    assert count_parameters(adapted, facts).trained == trained
