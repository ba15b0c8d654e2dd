"""Traced layers are no setting: a run keeps them in architecture.json."""

from __future__ import annotations

import json

import pytest

from tunebook.config.frozen import architecture_json, config_to_yaml, load_config
from tunebook.config.model_facts import ARCHITECTURE_FILE, ModelFacts
from tunebook.config.walk import all_keys
from tunebook.errors import RequestError

from ..plan.memory.layers import measured


@pytest.fixture
def layers():
    return measured(num_layers=2, parameters=7, saved={"fp32/full/sdpa": [0, 1, 2, 3, 4, 5]})


def test_nobody_types_them(sound):
    assert not [key for key in all_keys() if "measured" in key]
    assert "measured" not in config_to_yaml(sound)


def test_the_books_are_known_by_the_sizes_of_a_layer(sound):
    facts = sound.model.facts
    assert facts.measured is not None and facts.measured.is_of_the_book
    sizes = {name: value for name, value in vars(facts).items() if name != "measured"}
    assert ModelFacts(**sizes | {"num_layers": 3}).measured is not None
    assert ModelFacts(**sizes | {"hidden_size": 1024}).measured is None


def test_a_run_is_read_with_what_it_recorded(sound, layers, tmp_path):
    sound.model.facts.measured = layers
    (tmp_path / "run.yaml").write_text(config_to_yaml(sound))
    (tmp_path / ARCHITECTURE_FILE).write_text(architecture_json(sound))
    assert load_config(tmp_path / "run.yaml").model.facts.measured == layers


def test_a_damaged_architecture_json_is_refused(sound, tmp_path):
    (tmp_path / "run.yaml").write_text(config_to_yaml(sound))
    (tmp_path / ARCHITECTURE_FILE).write_text(json.dumps({"num_layers": "many"}))
    with pytest.raises(RequestError):
        load_config(tmp_path / "run.yaml")
