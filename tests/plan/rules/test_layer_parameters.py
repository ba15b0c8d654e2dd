"""The largest unit by size from a model's facts, against what is found in the model itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import ModelConfig
from tunebook.errors import RequestError
from tunebook.model.parameters import layer_parameters
from tunebook.parallel.units import classes_by_size
from tunebook.plan.architecture.base_model import read_facts

SIZES = {
    "dtype": "float32", "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 64,
}  # fmt: skip
KINDS = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "llama_with_biases": {"model_type": "llama", "attention_bias": True, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "tie_word_embeddings": False},
}


@pytest.fixture(params=KINDS)
def model_and_facts(
    request: pytest.FixtureRequest, tmp_path: Path, traces_no_activations: None
) -> tuple[Any, ModelFacts]:
    (tmp_path / "config.json").write_text(json.dumps(SIZES | KINDS[request.param]))
    facts = read_facts(ModelConfig(path=str(tmp_path)), ways=("fp32/full",))
    assert facts is not None and facts.measured is not None
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)), facts


def test_the_layer_is_counted_to_the_last_parameter(model_and_facts):
    model, facts = model_and_facts
    layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    assert layer_parameters(facts) == layer
    assert classes_by_size(model, layer) == [type(model.model.layers[0]).__name__]
    with pytest.raises(RequestError) as caught:
        classes_by_size(model, layer + 1)
    assert caught.value.problem_id == "units-too-large"
