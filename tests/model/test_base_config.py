"""What a model's config.json says, and what is no causal language model."""

from __future__ import annotations

from functools import partial

import pytest

from tunebook.model.base_config import non_causal_reason, read_quantizer

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
    ("changes", "is_causal"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, False),
        ({"architectures": "LlamaForSequenceClassification"}, False),
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, False),
        ({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}, True),
        ({"architectures": "LlamaForCausalLM"}, True),
        ({"architectures": []}, True),
        ({"architectures": ["XForReward"], "auto_map": {"AutoModelForCausalLM": "modeling_x.XForReward"}}, False),
    ],
    ids=str,
)
def test_only_a_class_for_text_is_causal(model, changes, is_causal):
    named = model(**changes)
    assert (non_causal_reason(named) is None) is is_causal
    if "auto_map" in changes:
        named.trust_remote_code = True  # its own code decides what it is for
        assert non_causal_reason(named) is None
