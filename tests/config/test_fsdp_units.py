"""Units by size from a model's facts, against those that are found in the model itself."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tunebook.config.base_model import read_facts
from tunebook.config.fsdp_units import units_by_size
from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import ModelConfig
from tunebook.errors import RequestError
from tunebook.parallel.units import classes_by_size

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
NAMES = {"layer": "DecoderLayer", "attention": "Attention", "mlp": "MLP", "linear": "Linear", "norm": "RMSNorm"}


@pytest.fixture(params=KINDS)
def model_and_facts(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, ModelFacts]:
    (tmp_path / "config.json").write_text(json.dumps(SIZES | KINDS[request.param]))
    facts = read_facts(ModelConfig(path=str(tmp_path)))
    assert facts is not None and facts.measured is None
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)), facts


def largest_by_kind(model: Any) -> dict[str, list[int]]:
    """Parameters of every part of a kind, but for the output head, from the smallest to the largest."""
    found: dict[str, list[int]] = {}
    for module in model.modules():
        kind = re.sub("Llama|Mistral|Qwen2", "", type(module).__name__)
        if module is not model.get_output_embeddings():
            found.setdefault(kind, []).append(sum(each.numel() for each in module.parameters()))
    return {kind: sorted(sizes) for kind, sizes in found.items()}


def test_the_same_kinds_are_found_whatever_the_minimum(model_and_facts):
    model, facts = model_and_facts
    sizes = largest_by_kind(model)
    edges = {size + more for name in NAMES.values() for size in sizes[name] for more in (0, 1)}
    assert len(edges) >= 14
    for minimum in sorted(edges)[:-1]:
        units = units_by_size(facts, minimum)
        names = sorted(re.sub("Llama|Mistral|Qwen2", "", name) for name in classes_by_size(model, minimum))
        assert names == sorted(NAMES[unit] for unit in units), minimum


def test_the_parameters_of_a_unit_are_counted(model_and_facts):
    model, facts = model_and_facts
    sizes = largest_by_kind(model)
    found: dict[str, int] = {}
    for minimum in sorted({size for name in NAMES.values() for size in sizes[name]}):
        found |= units_by_size(facts, minimum)
    del found["linear"]  # with its bias, which facts do not tell from those of others
    assert found == {unit: sizes[NAMES[unit]][-1] for unit in found}
    assert found.keys() == NAMES.keys() - {"linear"}
    assert units_by_size(facts, 1)["norm"] == 64
    assert units_by_size(facts, 65) == {"linear": 64 * 96}


def test_nothing_is_a_unit_where_no_part_is_so_large(model_and_facts):
    model, facts = model_and_facts
    (layer,) = {*largest_by_kind(model)["DecoderLayer"]}
    assert units_by_size(facts, layer) == {"layer": layer}
    assert units_by_size(facts, layer + 1) == {}
    with pytest.raises(RequestError) as caught:
        classes_by_size(model, layer + 1)
    assert caught.value.problem_id == "units-too-large"
