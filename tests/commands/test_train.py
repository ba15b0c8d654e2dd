"""What a job writes into its run folder before a rank starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console

from tunebook.commands.preflight import check_upload, require_runnable
from tunebook.commands.train import plan_job, set_up_folder, show_job
from tunebook.data.prepared import Prepared
from tunebook.errors import RequestError
from tunebook.record.manifest import read_manifest, update_manifest

PREPARED = cast(
    Prepared,
    SimpleNamespace(
        folder=Path("/prepared"),
        tokenizer_sha256="1",
        chat_template_sha256="2",
        template_date=None,
        records=[],
        fingerprint="3",
        content_sha256="4",
        parts=dict,
    ),
)


def test_the_manifest_says_what_trains_the_same_and_what_a_trained_run_started_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["training.max_steps=3", "outputs=/x"]
    job = plan_job("quickstart", words, [])
    set_up_folder(job, job.batch, PREPARED, tmp_path)
    assert read_manifest(tmp_path)["command"] == [
        "tunebook",
        "train",
        "quickstart",
        "training.max_steps=3",
        "outputs=/x",
    ]
    update_manifest(tmp_path, {"model": {"weights_fingerprint": "1" * 64}})
    set_up_folder(job, job.batch, PREPARED, tmp_path)
    assert read_manifest(tmp_path)["model"]["weights_fingerprint"] is None, "it starts anew"
    update_manifest(tmp_path, {"model": {"weights_fingerprint": "1" * 64}})
    monkeypatch.setattr("tunebook.commands.train.is_trained", lambda folder, config: True)
    set_up_folder(job, job.batch, PREPARED, tmp_path)
    assert read_manifest(tmp_path)["model"]["weights_fingerprint"] == "1" * 64


def test_a_dry_run_shows_what_a_job_starts_in_containers_and_on_several_nodes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def commands(*words: str) -> list[str]:
        show_job(plan_job("quickstart", ["launcher=slurm", *words], []), Console(width=200), Path("/runs/1"))
        lines = capsys.readouterr().out.splitlines()
        return [line.removeprefix("in the job: ") for line in lines if line.startswith("in the job: ")]

    (ranks,) = commands("launcher.container_image=registry/x:1", "launcher.container_runtime=docker")
    assert ranks.startswith("srun --nodes 1 --ntasks 1 ")
    assert " docker run --rm " in ranks
    assert " registry/x:1 -m tunebook.launch.local " in ranks
    nodes = ["hardware=cpu", "hardware.num_nodes=2", "hardware.gpus_per_node=1", "parallelism=ddp"]
    (ranks,) = commands(*nodes)
    assert ranks.startswith("srun --nodes 2 --ntasks 2 --ntasks-per-node 1 --kill-on-bad-exit=1 ")
    assert ranks.endswith("-m tunebook.launch.local /runs/1 --endpoint '<host>:<port>'")
    assert commands() == []  # one node: the script says it all


def test_without_a_network_an_upload_is_refused() -> None:
    check_upload(None)
    with pytest.raises(RequestError) as raised:
        check_upload("me/model")
    assert raised.value.problem_id == "upload-not-possible"


@pytest.mark.nightly
def test_a_task_that_cannot_be_loaded_is_refused_before_anything_is_prepared() -> None:
    job = plan_job("quickstart", ["hardware=cpu", "evaluation=tasks", "evaluation.tasks=[gsm8k]"], [])
    with pytest.raises(RequestError) as raised:  # there is no network
        require_runnable(job)
    assert raised.value.problem_id == "task-data-missing"
