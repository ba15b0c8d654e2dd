"""Answers about models: asked once, kept in the cache folder, and asked again if the cache is damaged."""

from __future__ import annotations

import json

import pytest

from tunebook.config.model_facts import LayerFacts, ModelFacts
from tunebook.config.schema import ModelConfig
from tunebook.errors import RequestError
from tunebook.plan import answers
from tunebook.plan.architecture import build, facts_of_file, read_facts, with_layers

STATED = {
    "architecture": "XForCausalLM", "num_parameters": 1000, "num_layers": 2, "hidden_size": 8, "intermediate_size": 16,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
LAYERS = {
    "num_layers": 2, "parameters": 400, "linear_parameters": 300, "active_parameters": 350, "largest_parameter": 200,
    "attention": ["eager", "sdpa"], "adapters": {"q_proj": [16, 24]},
}  # fmt: skip
FACTS = ModelFacts(**STATED, unreached=["model.tower"], measured=LayerFacts(**LAYERS))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "architectures"


@pytest.fixture
def file(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    return tmp_path / "config.json"


@pytest.fixture
def asked(monkeypatch):
    """Every time that a model would have been built."""
    calls = []
    monkeypatch.setattr(build, "describe_file", lambda file, **how: calls.append(file) or FACTS)
    monkeypatch.setattr(build, "describe_stated", lambda facts: calls.append(facts) or FACTS)
    return calls


def forget(monkeypatch):
    """As in another process."""
    monkeypatch.setattr(answers, "_known", {})


def test_the_same_question_is_asked_once(file, asked, cache, monkeypatch):
    assert facts_of_file(file) == facts_of_file(file) == FACTS
    forget(monkeypatch)
    assert facts_of_file(file) == FACTS
    assert asked == [file]
    file.write_text('{"model_type": "x", "vocab_size": 33}')
    facts_of_file(file)
    monkeypatch.setattr(answers, "installed_version", lambda package: "99.0")
    facts_of_file(file)
    assert len(asked) == len(list(cache.iterdir())) == 3


def test_stated_sizes_get_the_facts_of_their_layers(asked):
    facts = with_layers(ModelFacts(**STATED))
    assert facts == FACTS
    assert with_layers(ModelFacts(**STATED, unreached=["mine"])).unreached == ["mine"]
    assert len(asked) == 2
    assert read_facts(ModelConfig(name="organization/model", facts=facts)) is facts and len(asked) == 2


def test_a_damaged_answer_is_asked_for_again(file, asked, cache, monkeypatch):
    facts_of_file(file)
    (kept,) = cache.iterdir()
    kept.write_text('{"num_parameters": 10')
    forget(monkeypatch)
    assert facts_of_file(file) == FACTS
    assert len(asked) == 2
    assert json.loads(kept.read_text())["num_parameters"] == 1000


def test_stated_sizes_that_cannot_be_built_are_refused():
    with pytest.raises(RequestError) as caught:
        with_layers(ModelFacts(**STATED))
    assert caught.value.problem_id == "unknown-architecture"
    with pytest.raises(RequestError) as caught:
        with_layers(ModelFacts(**STATED | {"architecture": "LlamaForCausalLM", "num_attention_heads": 3}))
    assert caught.value.problem_id == "model-config"


# Published models that the book does not have (sizes as in benchmarks/gpu_models.py).
GRANITE = {
    "model_type": "granite", "architectures": ["GraniteForCausalLM"], "torch_dtype": "bfloat16", "hidden_size": 2048,
    "intermediate_size": 8192, "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
    "vocab_size": 49155, "max_position_embeddings": 131072, "tie_word_embeddings": True,
}  # fmt: skip


def test_a_model_that_is_not_in_the_book_needs_its_config_json_only(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GRANITE))
    facts = read_facts(ModelConfig(path=str(tmp_path)))
    assert facts.num_parameters == 2_533_531_648  # as published
    assert {*facts.measured.adapters} == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
