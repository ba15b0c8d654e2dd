"""What counts as a difference of two runs' inputs."""

from __future__ import annotations

from tunebook.evidence.compare import input_differences
from tunebook.evidence.gather import read_finished
from tunebook.evidence.schema import Inputs

from .conftest import MakeRun


def keys(one: Inputs, other: Inputs) -> list[str]:
    return [key for key, _, _ in input_differences(one, other)]


def test_settings_and_data_are_compared_and_the_split_is_not(make_run: MakeRun) -> None:
    run = read_finished(make_run()).inputs
    assert keys(run, read_finished(make_run("training.micro_batch_size=4", "dataset.num_documents=9")).inputs) == []
    assert keys(run, read_finished(make_run("training.seed=7")).inputs) == ["training.seed", "seed"]
    assert keys(run, run.model_copy(update={"data_sha256": "9"})) == ["data_sha256"]
    assert keys(run, run.model_copy(update={"data_fingerprint": "9"})) == []  # prepared by other code


def test_the_same_data_in_another_folder_is_equal(make_run: MakeRun) -> None:
    here, there = (read_finished(make_run(f"dataset.path={path}")).inputs for path in ("/a.jsonl", "/b.jsonl"))
    assert keys(here, there) == []
    unknown = {"data_sha256": None}
    assert keys(here.model_copy(update=unknown), there.model_copy(update=unknown)) == ["dataset.path"]


def test_weights_are_compared_by_their_fingerprint_if_both_are_known(make_run: MakeRun) -> None:
    inputs = read_finished(make_run()).inputs

    def started_from(path: str, fingerprint: str | None) -> Inputs:
        model = inputs.config["model"] | {"path": path, "weights": "pretrained"}
        return inputs.model_copy(
            update={"config": inputs.config | {"model": model}, "weights_fingerprint": fingerprint}
        )

    assert keys(started_from("/here", "a"), started_from("/there", "a")) == []
    assert keys(started_from("/here", "a"), started_from("/here", "b")) == ["weights_fingerprint"]
    assert keys(started_from("/here", "a"), started_from("/there", None)) == ["model.path"]
