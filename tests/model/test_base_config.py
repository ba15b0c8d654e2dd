"""What a model's config.json says, and what is no causal language model."""

from __future__ import annotations

from functools import partial

import pytest

from tunebook.model.base_config import ENCODERS, non_causal_reason, read_quantizer

from ..base_models import write_model


@pytest.fixture
def model(tmp_path):
    """`model(hidden_size=0)`, `model(text="{")`."""
    return partial(write_model, tmp_path)


@pytest.mark.parametrize(
    ("stated", "quantizer"),
    [
        ({}, None),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "bitsandbytes_4bit"),
        ({"quantization_config": {"load_in_8bit": True}}, "bitsandbytes_8bit"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "fp8"),
    ],
    ids=str,
)
def test_what_quantized_the_weights(model, stated, quantizer):
    assert read_quantizer(model(**stated)) == quantizer


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, "is made for SequenceClassification"),
        ({"architectures": "LlamaForSequenceClassification"}, "is made for SequenceClassification"),
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "BertForMaskedLM is made for MaskedLM"),
        ({"architectures": ["BertModel"], "model_type": "bert"}, "BertModel is an encoder: its attention looks both"),
        ({"architectures": ["BertLMHeadModel"], "model_type": "bert"}, "BertLMHeadModel is an encoder"),
        ({"architectures": None, "model_type": "roberta"}, "roberta is an encoder"),
        ({"architectures": ["BertLMHeadModel"], "model_type": "bert", "is_decoder": True}, None),
        ({}, None),
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, None),
        ({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}, None),
        ({"architectures": "LlamaForCausalLM"}, None),
        ({"architectures": []}, None),
    ],
    ids=str,
)
def test_only_what_continues_a_text_is_causal(model, changes, said):
    found = non_causal_reason(model(**changes))
    assert found is None if said is None else said in found


def test_code_of_its_own_decides_what_a_model_is_for(model):
    named = model(architectures=["XForReward"], auto_map={"AutoModelForCausalLM": "modeling_x.XForReward"})
    assert non_causal_reason(named) is not None
    named.trust_remote_code = True
    assert non_causal_reason(named) is None


def test_no_encoder_that_transformers_has_a_causal_head_for_is_forgotten():
    """By what they say of themselves: they are no decoders, and are trained on masked words."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )

    both = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() & MODEL_FOR_MASKED_LM_MAPPING_NAMES.keys()
    assert both - MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.keys() == ENCODERS - {"bert-generation", "xlnet"}
    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() >= ENCODERS
