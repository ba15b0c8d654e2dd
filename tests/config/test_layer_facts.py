"""Facts of layers are no setting: a run keeps them in architecture.json."""

from __future__ import annotations

import json

import pytest

from tunebook.config.frozen import architecture_json, config_to_yaml, load_config
from tunebook.config.model_facts import ARCHITECTURE_FILE
from tunebook.errors import RequestError


def test_a_run_is_read_with_what_it_recorded(sound, tmp_path):
    (tmp_path / "run.yaml").write_text(config_to_yaml(sound))
    (tmp_path / ARCHITECTURE_FILE).write_text(architecture_json(sound))
    layers = load_config(tmp_path / "run.yaml").model.facts.measured
    assert layers == sound.model.facts.measured is not None


def test_a_damaged_architecture_json_is_refused(sound, tmp_path):
    (tmp_path / "run.yaml").write_text(config_to_yaml(sound))
    (tmp_path / ARCHITECTURE_FILE).write_text(json.dumps({"num_layers": "many"}))
    with pytest.raises(RequestError):
        load_config(tmp_path / "run.yaml")
