"""A run starts from the model that another run has trained."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from rich.console import Console

from tunebook.commands.train import run_job
from tunebook.config.choices import Weights
from tunebook.errors import RequestError
from tunebook.hardware.detect import Machine
from tunebook.plan.draft import RUN_NOT_TRAINED, Draft, draft_run

NO_GPU = Machine(gpus=[], driver=None, num_cpus=8, host_memory_gib=32.0)


@pytest.fixture
def parent(tmp_path: Path, project_root: Path) -> Path:
    """A finished run of the quickstart."""
    folder = tmp_path / "quickstart" / "2026-11-29T10-00-00Z"
    shutil.copytree(project_root / "recipes" / "quickstart" / "model", folder / "model")
    (folder / "run.yaml").touch()
    return folder


def planned(outputs: Path, *words: str) -> Draft:
    return draft_run("quickstart", [*words, f"outputs={outputs}", "hardware=cpu"], [], NO_GPU)


@pytest.mark.parametrize("is_named", [True, False])
def test_newest_run_of_a_recipe_or_a_run_folder(parent: Path, tmp_path: Path, is_named: bool) -> None:
    draft = planned(tmp_path, f"model.run={'quickstart' if is_named else parent}")
    assert draft.exit_code == 0 and draft.resolution is not None
    model = draft.resolution.config.model
    assert (model.name, model.path) == (None, str(parent.resolve() / "model"))
    assert model.weights is Weights.pretrained, "the quickstart's own are random"
    assert model.run == str(parent.resolve()), "a newer run is not taken when this one is repeated"


def test_run_that_is_not_trained_yet_is_planned_and_not_started(tmp_path: Path) -> None:
    draft = planned(tmp_path, "model.run=quickstart")
    assert draft.exit_code == 0
    (problem,) = [each for each in draft.problems if each.id == RUN_NOT_TRAINED]
    assert problem.fix == "train it first: tunebook train quickstart"
    with pytest.raises(RequestError) as caught:
        run_job(draft, Console(quiet=True))
    assert caught.value.problem_id == RUN_NOT_TRAINED


@pytest.mark.parametrize("name", ["/tmp/nope", "quikstart", "latest"])
def test_unknown_run_is_refused(parent: Path, tmp_path: Path, name: str) -> None:
    error = planned(tmp_path / ("empty" if name == "latest" else ""), f"model.run={name}").error
    assert error is not None
    assert error.problem_id == "unknown-run"


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("model.weights", ["model.weights=random"]),
        ("model.path", ["model.name=null", "model.path=/models/mine"]),
        ("model.name", ["model.name=me/mine", "model.path=null"]),
    ],
)
def test_typed_model_is_not_replaced_by_a_run(parent: Path, tmp_path: Path, key: str, words: list[str]) -> None:
    draft = planned(tmp_path, "model.run=quickstart", *words)
    assert ("model-named-by-run", key) in [(each.id, each.key) for each in draft.problems]
    assert draft.exit_code == 2


def test_model_that_is_typed_next_to_a_run_is_not_ignored_silently(parent: Path, tmp_path: Path) -> None:
    draft = planned(tmp_path, "model.run=quickstart", "model=smollm2_135m")
    assert ("setting-ignored", "model", False) in [(each.id, each.key, each.is_error) for each in draft.problems]


def test_a_model_folder_in_place_of_a_run_says_what_to_type(parent: Path) -> None:
    draft = draft_run(None, [f"model.run={parent}/model", "hardware=cpu"], [], NO_GPU)
    assert draft.error is not None and f"type model={parent}/model" in draft.error.message


def test_another_model_for_a_recipe_that_starts_from_a_run() -> None:
    draft = draft_run("zephyr_7b_dpo", ["model=Qwen/Qwen2.5-0.5B", "hardware=ampere"], [], NO_GPU)
    assert ("model-named-by-run", "model.run=null") in [(each.id, each.fix) for each in draft.problems]


def test_adapter_has_to_be_merged(parent: Path, tmp_path: Path) -> None:
    (parent / "model" / "config.json").rename(parent / "model" / "adapter_config.json")
    draft = planned(tmp_path, "model.run=quickstart")
    (problem,) = [each for each in draft.problems if each.id == RUN_NOT_TRAINED]
    assert problem.fix.startswith("tunebook export ")
    without_a_recipe = draft_run(None, [f"model.run={parent}", "hardware=cpu"], [], NO_GPU)
    assert without_a_recipe.error is not None and without_a_recipe.error.problem_id == RUN_NOT_TRAINED
