"""The model that a name or folder means."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tunebook.config.choices import Compute, Generation, MasterWeights
from tunebook.config.schema import ModelConfig
from tunebook.errors import DataError, RequestError
from tunebook.evaluate import target as target_module
from tunebook.evaluate.target import (
    Target,
    bare_config,
    choose_run,
    find_target,
    results_folder,
)
from tunebook.hardware.detect import Gpu, Machine
from tunebook.record.model_origin import ORIGIN_FILE


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    return tmp_path / "outputs"


@pytest.fixture
def run(outputs: Path) -> Path:
    folder = outputs / "tiny" / "2026-01-02T03-04-05Z"
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text("")
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "status": {"state": "finished", "reason": None}}))
    return folder


def model_folder(folder: Path, config: str = "config.json", weights: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True)
    (folder / config).write_text("{}")
    (folder / weights).write_text("")
    return folder


def test_a_run_is_found_by_folder_recipe_time_and_latest(run: Path, outputs: Path) -> None:
    model = model_folder(run / "model")
    for text in (str(run), "tiny", f"tiny/{run.name}", "latest", str(outputs / "tiny")):
        assert find_target(text, outputs) == Target(run=run, folder=model), text


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
    checkpoint = model_folder(run / "checkpoints" / "checkpoint-20", weights=weights)
    assert find_target(str(checkpoint), outputs) == Target(run=run, folder=checkpoint)


def test_a_model_folder_needs_no_run(tmp_path: Path, outputs: Path) -> None:
    model = model_folder(tmp_path / "exported")
    assert find_target(str(model), outputs) == Target(folder=model)
    assert find_target(str(model), outputs).name == str(model)


def test_a_name_on_the_hub_is_no_run_of_a_recipe_called_the_same(run: Path, outputs: Path) -> None:
    model_folder(run / "model")
    assert find_target("some-org/tiny", outputs) == Target(hub_name="some-org/tiny")
    assert find_target("some-org/tiny", outputs, is_model=True) == Target(hub_name="some-org/tiny")


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


def test_a_named_model_may_be_one_word_on_the_hub_but_no_path(run: Path, outputs: Path, tmp_path: Path) -> None:
    model = model_folder(run / "model")
    assert find_target("gpt2", outputs, is_model=True) == Target(hub_name="gpt2")
    assert find_target("someone/model", outputs, is_model=True) == Target(hub_name="someone/model")
    assert find_target("tiny", outputs, is_model=True) == Target(run=run, folder=model)
    for text in ("./gpt2", str(tmp_path / "gone"), "a b"):
        with pytest.raises(RequestError) as raised:
            find_target(text, outputs, is_model=True)
        assert raised.value.problem_id == "unknown-run"


def test_an_exported_folder_may_say_where_it_comes_from(run: Path, tmp_path: Path, outputs: Path) -> None:
    said = {
        "format": 1, "run": "tiny/x", "recipe": "tiny", "config_sha256": "c", "tokenizer_sha256": "t",
        "chat_template_sha256": None, "system_prompt": "Be short.", "system_prompt_sha256": "s",
    }  # fmt: skip
    exported = model_folder(tmp_path / "exported")
    (exported / ORIGIN_FILE).write_text(json.dumps(said))
    found = find_target(str(exported), outputs)
    assert found.run is None
    assert found.origin is not None
    assert (found.origin.run, found.origin.system_prompt) == ("tiny/x", "Be short.")
    inside = model_folder(run / "model")
    (inside / ORIGIN_FILE).write_text("not read, because the run itself is there")
    assert find_target("tiny", outputs).origin is None
    assert find_target(str(inside), outputs).origin is None


MakeRun = Callable[..., Path]


def trained(run: Path) -> Path:
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    return run


def test_a_recipe_and_latest_are_the_newest_finished_run(
    make_run: MakeRun, outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(make_run("a", 1))
    newest = trained(make_run("b", 2))
    make_run("a", 3, "failed", "no space left\nat step 7")
    make_run("c", 4, "running")
    trained(make_run("a", 5, "stopped", "stopped by SIGTERM after step 98"))
    assert choose_run("latest", outputs) == newest
    assert capsys.readouterr().err == f"the newest finished run: {newest}\n"
    assert choose_run("a", outputs).name.endswith("03-01-00Z")


def test_a_run_that_is_named_by_its_folder_need_not_be_finished(make_run: MakeRun, outputs: Path) -> None:
    failed = make_run("a", 1, "failed", "no memory")
    trained(make_run("a", 2))
    assert choose_run(str(failed), outputs) == failed
    assert choose_run(f"a/{failed.name}", outputs) == failed


def test_without_a_finished_run_there_is_no_model(make_run: MakeRun, outputs: Path) -> None:
    make_run("a", 1, "failed", "no memory")
    for target in ("latest", "a"):
        with pytest.raises(RequestError) as raised:
            choose_run(target, outputs)
        assert raised.value.problem_id == "run-without-model"


def machine(*gpus: Generation) -> Machine:
    found = [Gpu(name="a GPU", memory_gib=80, compute_capability=(9, 0), generation=generation) for generation in gpus]
    return Machine(gpus=found, driver=None, num_cpus=2, host_memory_gib=8)


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
    monkeypatch.setattr(target_module, "detect_machine", lambda: machine(*gpus))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "dtype": dtype}))
    config = bare_config(Target(folder=tmp_path))
    assert (config.precision.master_weights, config.precision.compute) == (weights, compute)
    assert config.hardware.generation is (gpus[0] if gpus else Generation.cpu)
    assert config.hardware.gpus_per_node == max(1, len(gpus))


def test_an_adapter_is_evaluated_on_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "detect_machine", lambda: machine())
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
