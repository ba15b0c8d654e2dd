"""The model that a name or folder means."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.evaluate.conftest import model_folder, write_origin
from tunebook.config.choices import Compute, Generation, MasterWeights
from tunebook.config.schema import ModelConfig
from tunebook.errors import DataError, RequestError
from tunebook.evaluate import target as target_module
from tunebook.evaluate.target import (
    Target,
    bare_config,
    choose_run,
    find_target,
    names_model,
    results_folder,
)
from tunebook.hardware.detect import Gpu, Machine
from tunebook.record.model_origin import ORIGIN_FILE

MakeRun = Callable[..., Path]


@pytest.fixture
def run(make_run: MakeRun) -> Path:
    return make_run("tiny", 5)


def test_a_run_is_found_by_folder_recipe_time_and_latest(run: Path, outputs: Path) -> None:
    model = model_folder(run / "model")
    for text in (str(run), "tiny", f"tiny/{run.name}", "latest", str(outputs / "tiny")):
        assert find_target(text, outputs) == Target(run=run, folder=model), text


@pytest.mark.parametrize(
    ("word", "is_name"),
    [("tiny", True), ("latest", True), ("quikstart", True), ("org/name", True), ("Hello", False), ("What?", False),
     ("\u4e2d" * 120, False)],
)  # fmt: skip
def test_the_first_word_of_a_chat_may_name_a_model(run: Path, outputs: Path, word: str, is_name: bool) -> None:
    assert names_model(word, outputs) == is_name


def test_a_model_that_is_not_what_its_run_wrote_is_refused_however_it_is_named(run: Path, outputs: Path) -> None:
    model = model_folder(run / "model")
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["model_files"] = {"model.safetensors": {"size": 7, "sha256": "0" * 64}}
    (run / "manifest.json").write_text(json.dumps(manifest))
    for text in ("tiny", str(model)):
        with pytest.raises(DataError, match=r"model\.safetensors has 0 bytes and was written with 7"):
            find_target(text, outputs)


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_a_checkpoint_belongs_to_its_run(run: Path, outputs: Path, weights: str) -> None:
    checkpoint = model_folder(run / "checkpoints" / "checkpoint-20", weights)
    assert find_target(str(checkpoint), outputs) == Target(run=run, folder=checkpoint)


def test_a_model_folder_or_a_name_on_the_hub_needs_no_run(run: Path, tmp_path: Path, outputs: Path) -> None:
    own, exported = model_folder(run / "model"), model_folder(tmp_path / "exported")
    assert find_target(str(exported), outputs) == Target(folder=exported)
    for is_model in (False, True):  # the run of a recipe called the same is another
        assert find_target("some-org/tiny", outputs, is_model=is_model) == Target(hub_name="some-org/tiny")
        assert find_target("tiny", outputs, is_model=is_model) == Target(run=run, folder=own)
    assert find_target("gpt2", outputs, is_model=True) == Target(hub_name="gpt2")
    for text in ("./gpt2", str(tmp_path / "gone"), "a b"):
        with pytest.raises(RequestError) as raised:
            find_target(text, outputs, is_model=True)
        assert raised.value.problem_id == "unknown-run"


@pytest.mark.parametrize("text", ["tinny", "./someone/model", "one/two/three", "someone/"])
def test_names_that_cannot_be_on_the_hub_are_unknown_runs(run: Path, outputs: Path, text: str) -> None:
    with pytest.raises(RequestError) as raised:
        find_target(text, outputs)
    assert raised.value.problem_id == "unknown-run"


def test_a_sharded_checkpoint_is_refused(run: Path, outputs: Path) -> None:
    sharded = run / "checkpoints" / "checkpoint-20"
    sharded.mkdir(parents=True)
    for has_config in (False, True):
        if has_config:
            (sharded / "config.json").write_text("{}")
        with pytest.raises(RequestError) as raised:
            find_target(str(sharded), outputs)
        assert raised.value.problem_id == "model-without-weights"


def test_an_exported_folder_may_say_where_it_comes_from(run: Path, tmp_path: Path, outputs: Path) -> None:
    exported = model_folder(tmp_path / "exported")
    write_origin(exported)
    target = find_target(str(exported), outputs)
    assert target.run is None
    assert target.origin is not None
    assert (target.origin.run, target.origin.system_prompt) == ("tiny/x", "Be short.")
    inside = model_folder(run / "model")
    (inside / ORIGIN_FILE).write_text("not read, because the run itself is there")
    assert find_target("tiny", outputs).origin is None
    assert find_target(str(inside), outputs).origin is None


def test_a_recipe_and_latest_are_the_newest_finished_run(
    make_run: MakeRun, outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    oldest, newest = make_run("a", 1), make_run("b", 2)
    model_folder(oldest / "model")
    model_folder(newest / "model")
    failed = make_run("a", 3, "failed")
    make_run("c", 4, "running")
    model_folder(make_run("a", 5, "stopped") / "model")
    assert choose_run("latest", outputs) == newest
    assert capsys.readouterr().err == f"the newest finished run: {newest}\n"
    assert choose_run("a", outputs) == oldest
    assert choose_run(str(failed), outputs) == choose_run(f"a/{failed.name}", outputs) == failed  # as it is named
    shutil.rmtree(oldest)
    shutil.rmtree(newest)
    for target in ("latest", "a"):
        with pytest.raises(RequestError) as raised:
            choose_run(target, outputs)
        assert raised.value.problem_id == "run-without-model"


def detect(patch: pytest.MonkeyPatch, *generations: Generation) -> None:
    """Have GPUs of these generations detected."""
    gpus = [Gpu(name="a GPU", memory_gib=80, compute_capability=(9, 0), generation=name) for name in generations]
    machine = Machine(gpus=gpus, driver=None, num_cpus=2, host_memory_gib=8)
    patch.setattr(target_module, "detect_machine", lambda: machine)


@pytest.mark.parametrize(
    ("gpus", "dtype", "weights", "compute"),
    [
        ([], "bfloat16", MasterWeights.fp32, Compute.fp32),
        ([Generation.hopper] * 2, "bfloat16", MasterWeights.bf16, Compute.fp32),
        ([Generation.volta], "bfloat16", MasterWeights.fp32, Compute.fp32),
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
    detect(monkeypatch, *gpus)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "dtype": dtype}))
    config = bare_config(Target(folder=tmp_path))
    assert (config.precision.master_weights, config.precision.compute) == (weights, compute)
    assert config.hardware.generation is (gpus[0] if gpus else Generation.cpu)
    assert config.hardware.gpus_per_node == max(1, len(gpus))


def test_an_adapter_is_evaluated_on_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    detect(monkeypatch)
    base, adapter = model_folder(tmp_path / "base"), tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    assert bare_config(Target(folder=adapter)).model == ModelConfig(path=str(base))


def test_results_of_models_without_a_run_are_in_folders_of_their_own(tmp_path: Path) -> None:
    folders = [results_folder(Target(folder=tmp_path / name / "my model"), tmp_path) for name in "ab"]
    assert folders[0] != folders[1]
    assert all(folder.parent == tmp_path / "evaluations" for folder in folders)
    assert all(folder.name.endswith("-my-model") for folder in folders)
    assert results_folder(Target(hub_name="org/name"), tmp_path) == tmp_path / "evaluations" / "org-name"
