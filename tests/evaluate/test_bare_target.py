from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tunebook.config.choices import Compute, Generation, MasterWeights
from tunebook.config.frozen import config_to_yaml, load_config
from tunebook.errors import RequestError
from tunebook.evaluate import target as target_module
from tunebook.evaluate.target import Target, bare_config, results_folder, without_overrides
from tunebook.hardware.detect import Gpu, Machine


def machine(*gpus: Generation) -> Machine:
    found = [Gpu(name="a GPU", memory_gib=80, compute_capability=(9, 0), generation=generation) for generation in gpus]
    return Machine(gpus=found, driver=None, num_cpus=2, host_memory_gib=8)


@pytest.mark.parametrize(
    ("gpus", "dtype", "weights", "compute"),
    [
        ([], "bfloat16", MasterWeights.fp32, Compute.fp32),
        ([Generation.hopper] * 2, "bfloat16", MasterWeights.bf16, Compute.fp32),
        ([Generation.volta], "bfloat16", MasterWeights.fp32, Compute.fp32),
        ([Generation.hopper], "float32", MasterWeights.fp32, Compute.fp32),
        ([Generation.hopper], "float16", MasterWeights.fp32, Compute.fp16),
    ],
)
def test_the_number_format_is_the_published_one_where_the_gpu_has_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[Generation],
    dtype: str,
    weights: MasterWeights,
    compute: Compute,
) -> None:
    monkeypatch.setattr(target_module, "detect_machine", lambda: machine(*gpus))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "dtype": dtype}))
    config = bare_config(Target(folder=tmp_path))
    assert (config.precision.master_weights, config.precision.compute) == (weights, compute)
    assert config.hardware.generation is (gpus[0] if gpus else Generation.cpu)
    assert config.hardware.gpus_per_node == max(1, len(gpus))


def test_the_configuration_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = bare_config(Target(folder=tmp_path))
    (tmp_path / "model.yaml").write_text(config_to_yaml(config))
    assert load_config(tmp_path / "model.yaml") == config
    assert config.model.path == str(tmp_path)


def test_results_of_two_folders_of_one_name_lie_apart(tmp_path: Path) -> None:
    folders = [tmp_path / "a" / "my model", tmp_path / "b" / "my model"]
    places = [results_folder(Target(folder=folder), tmp_path) for folder in folders]
    assert len(set(places)) == 2
    assert all(place.parent == tmp_path / "evaluations" for place in places)
    assert all(place.name.startswith("my-model-") for place in places)
    assert results_folder(Target(folder=folders[0]), tmp_path) == places[0]
    assert results_folder(Target(hub_name="org/name"), tmp_path) == tmp_path / "evaluations" / "org--name"


@pytest.mark.parametrize(
    ("target", "error", "expected"),
    [
        (Target(hub_name="org/name"), ("gone", "hub-out-of-reach"), "type: tunebook eval model=DIR"),
        (Target(hub_name="org/name"), ("no such model", "hub-cannot-load"), "on the hub: no such model"),
        (Target(folder=Path("/m")), ("set model.eos_token=X", "tokenizer-no-eos"), "in the model's own folder"),
        (Target(folder=Path("/m")), ("it is broken", "tokenizer-broken"), "it is broken"),
        (Target(folder=Path("/m")), ("code", "remote-code-refused"), "which is not run here"),
    ],
)
def test_what_is_told_can_be_typed_without_overrides(target: Target, error: tuple[Any, str], expected: str) -> None:
    message, problem_id = error
    told = without_overrides(RequestError(message, problem_id=problem_id), target, "tunebook eval model=")
    assert expected in told.message
    assert told.problem_id == problem_id
