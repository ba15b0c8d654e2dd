"""`latest` and a recipe's name mean the newest run that finished, and what was passed over is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tunebook.errors import RequestError
from tunebook.evaluate.finished import checkpoints_of, choose_run, why_not_finished

MakeRun = Callable[..., Path]


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    return tmp_path / "outputs"


def trained(run: Path) -> Path:
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    return run


def test_newer_runs_that_did_not_finish_are_passed_over_and_told(make_run: MakeRun, outputs: Path) -> None:
    trained(make_run("a", 1))
    taken = trained(make_run("b", 2))
    make_run("a", 3, "failed", "no space left\nat step 7")
    make_run("c", 4, "running")
    trained(make_run("a", 5, "stopped", "stopped by SIGTERM after step 98"))
    said: list[str] = []
    assert choose_run("latest", outputs, said.append) == taken
    assert said == [
        f"the newest finished run: {taken}",
        "  newer, but a/2026-01-02T03-05-00Z: stopped by SIGTERM after step 98",
        "  newer, but c/2026-01-02T03-04-00Z: it is running, or was killed without a word",
        "  newer, but a/2026-01-02T03-03-00Z: it failed: no space left",
    ]


def test_a_recipe_is_its_newest_finished_run(
    make_run: MakeRun, outputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = trained(make_run("a", 1))
    make_run("a", 2, "invalid", "the loss is not finite")
    trained(make_run("b", 3))
    monkeypatch.chdir(tmp_path)
    for target in ("a", "outputs/a"):
        said: list[str] = []
        assert choose_run(target, outputs, said.append) == taken
        assert said == [
            f"the newest finished run of a: {taken}",
            "  newer, but a/2026-01-02T03-02-00Z: it is invalid: the loss is not finite",
        ]


def test_a_folder_that_is_named_is_taken_whatever_became_of_it(make_run: MakeRun, outputs: Path) -> None:
    failed = make_run("a", 1, "failed", "no memory")
    trained(make_run("a", 2))
    said: list[str] = []
    assert choose_run(str(failed), outputs, said.append) == failed
    assert choose_run(f"a/{failed.name}", outputs, said.append) == failed
    assert said == []


def test_no_finished_run_names_what_there_is(
    make_run: MakeRun, outputs: Path, make_checkpoint: Callable[..., Path]
) -> None:
    for minute in range(5):
        newest = make_run("a", minute, "failed", "no memory")
    weights = {"config.json": b"{}", "model.safetensors": b"weights"}
    whole = make_checkpoint(newest, 20, weights)
    make_checkpoint(newest, 30)  # sharded, so it cannot be named
    (newest / "checkpoints" / "checkpoint-40").mkdir()  # never finished
    with pytest.raises(
        RequestError, match=r"^no run has finished: a/2026-01-02T03-04-00Z: it failed: no mem"
    ) as raised:
        choose_run("latest", outputs, print)
    assert "; 2 more that did not finish." in raised.value.message
    assert f"(run={newest})" in raised.value.message
    assert raised.value.message.endswith(f"one of its checkpoints: {whole}")
    assert raised.value.problem_id == "run-without-model"
    with pytest.raises(RequestError, match=r"^no run of a has finished"):
        choose_run("a", outputs, print)


def test_checkpoints_that_hold_no_whole_model_are_to_be_exported(
    make_run: MakeRun, make_checkpoint: Callable[..., Path]
) -> None:
    run = make_run("a", 1, "failed")
    (run / "checkpoints" / "checkpoint-20").mkdir(parents=True)
    assert checkpoints_of(run) == "there is none that is complete, so go on training"
    make_checkpoint(run, 40)
    assert checkpoints_of(run).startswith("they are sharded")
    assert checkpoints_of(run).endswith(f"tunebook export {run}")
    weights = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}
    whole = [make_checkpoint(run, step, weights) for step in (60, 100)]
    assert checkpoints_of(run) == f"{whole[1]}, {whole[0]}"


def test_an_unknown_name_suggests_the_nearest(make_run: MakeRun, outputs: Path) -> None:
    make_run("quickstart", 1)
    with pytest.raises(RequestError, match=r"Did you mean 'quickstart'\?") as raised:
        choose_run("quickstrat", outputs, print)
    assert raised.value.problem_id == "unknown-run"


def test_why_a_run_does_not_count(make_run: MakeRun) -> None:
    assert why_not_finished(make_run("a", 1, state=None)) == "its manifest cannot be read"
    broken = make_run("a", 2)
    (broken / "manifest.json").write_text('{"format": 1, "status": null}')
    assert why_not_finished(broken) == "its manifest cannot be read"
    assert why_not_finished(make_run("a", 3)) == "its model/ folder is gone"
    assert why_not_finished(trained(make_run("a", 4))) is None
