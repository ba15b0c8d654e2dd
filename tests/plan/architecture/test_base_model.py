"""What is read from a model's config.json, and what is no model's."""

from __future__ import annotations

import re
from functools import partial

import pytest

from tunebook.config.choices import Weights
from tunebook.errors import RequestError
from tunebook.model.base_config import read_dtype
from tunebook.plan import architecture
from tunebook.plan.architecture import read_facts

from ...base_models import write_model


@pytest.fixture
def model(tmp_path):
    """`model(hidden_size=0)`, `model(text="{")`."""
    return partial(write_model, tmp_path)


@pytest.fixture
def built(monkeypatch):
    """The files for which a model would have been built on the meta device."""
    files = []
    monkeypatch.setattr(architecture, "facts_of_file", lambda file, **_: files.append(file))
    return files


@pytest.mark.parametrize("kind", ["chatglm9", "t5"], ids=["unknown", "encoder-decoder"])
def test_what_transformers_has_no_causal_model_for_is_refused(model, monkeypatch, tmp_path, kind):
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path))
    with pytest.raises(RequestError, match=rf"config\.json: .*model_type={kind}") as caught:
        read_facts(model(model_type=kind, architectures=None, vocab_size=None))
    assert caught.value.problem_id == "unknown-architecture"


@pytest.mark.parametrize(
    "text", ['{"model_type": "llama", "hid', "[1, 2]", '{"model_type": "x", "text_config": 3}', "{}"]
)
def test_a_file_that_is_no_config(model, built, text):
    with pytest.raises(RequestError, match=r"config\.json") as caught:
        read_facts(model(text=text))
    assert (caught.value.problem_id, caught.value.exit_code, built) == ("model-config", 2, [])


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 0},
        {"num_attention_heads": 3},
        {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 20},
        {"hidden_act": "nonsense"},
        {"dtype": "float8_e4m3fn"},
    ],
    ids=str,
)
def test_a_config_of_which_no_model_can_be_built(model, monkeypatch, tmp_path, changes):
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))
    with pytest.raises(RequestError, match=re.escape(str(tmp_path / "config.json"))) as caught:
        read_facts(model(**changes))
    assert caught.value.problem_id == "model-config"


def test_weights_of_no_stated_format_are_fp32_as_transformers_has_it(model, built):
    named = model(dtype=None)
    read_facts(named)
    assert read_dtype(named) == "float32" and len(built) == 1


def test_the_format_may_be_stated_with_the_language_part(model, built):
    assert read_dtype(model(dtype=None, text_config={"dtype": "bfloat16"})) == "bfloat16"
    quantized = model(dtype="float8_e4m3fn", quantization_config={"quant_method": "fp8"})
    quantized.weights = Weights.pretrained
    assert read_facts(quantized) is None and built == []  # a rule says more
