"""The command: which runs it starts, which files it keeps and writes, and its exit code. Nothing is trained here."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from tunebook.commands import parity as run
from tunebook.commands.parity import check_attended
from tunebook.errors import Problem, RequestError, RulesError
from tunebook.files import read_json
from tunebook.sweep.trial_process import TrialEnd

from ..conftest import config_of


@pytest.fixture
def parity(tmp_path, monkeypatch):
    """`parity({"ddp": [2.0], ...}, codes={}, refused=[], stopped=None)`: exit code, the JSON, what was started."""

    def command(losses, codes=None, refused=(), stopped=None, tolerance=None):
        started = []

        def plan(recipe, overrides, recipes_dirs):
            if overrides[-1].removeprefix("parallelism=") in refused:
                raise RulesError([Problem(id="some-rule", key="a.key", message="forbidden", fix="a.key=b")])
            return SimpleNamespace(config=on_cpu(f"outputs={tmp_path}"))

        def trial(words, stopping):
            folder = Path(words[words.index("--run-folder") + 1])
            started.append(words)
            (folder / "model").mkdir(parents=True)
            lines = [
                {"step": step, "loss": loss, "tokens_per_second_per_gpu": 1.0, "memory_gib": [1.0]}
                for step, loss in enumerate(losses[folder.name], 1)
            ]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            was_stopped = folder.name == stopped
            code = 6 if was_stopped else (codes or {}).get(folder.name, 0)
            if was_stopped:
                stopping.request()
            return TrialEnd(exit_code=code, seconds=1.0, was_interrupted=was_stopped)

        monkeypatch.setattr(run, "plan_job", plan)
        monkeypatch.setattr(run, "run_trial", trial)
        over = [f"parallelism={','.join([*losses, *refused])}"]
        code = run.parity_command(
            "quickstart", ["training.seed=3"], [Path("/mine")], Console(width=200, quiet=True), over=over, gpus=None,
            num_steps=2, tolerance=tolerance,
        )  # fmt: skip
        (folder,) = (tmp_path / "quickstart").glob("parity-*")
        return code, read_json(folder / "parity.json"), started, folder

    return command


def test_each_case_is_an_ordinary_run_without_its_model(parity):
    code, written, started, folder = parity({"single": [2.0, 1.0], "ddp": [2.0, 1.0]}, refused=["zero3"])
    assert code == 0
    assert [words[3:5] for words in started] == [["train", "quickstart"]] * 2
    assert started[1][-2:] == ["--run-folder", str(folder / "ddp")]
    assert {"training.seed=3", "training.max_steps=2", "parallelism=ddp", "--recipes-dir", "/mine"} <= set(started[1])
    assert not (folder / "ddp" / "model").exists()
    assert (folder / "ddp" / "metrics.jsonl").exists()
    assert (written["recipe"], written["reference"], written["tolerance"]) == ("quickstart", "single", 1e-5)
    assert [case["verdict"] for case in written["cases"]] == ["", "the same", "not possible"]
    assert (folder / "parity.html").exists()


def test_a_difference_ends_with_5_unless_more_is_allowed(parity, tmp_path):
    losses = {"single": [2.0, 1.0], "ddp": [2.0, 1.01]}
    assert parity(losses)[0] == 5
    for folder in (tmp_path / "quickstart").iterdir():
        folder.rename(tmp_path / folder.name)
    assert parity(losses, tolerance=0.1)[0] == 0


@pytest.mark.parametrize(("codes", "ended", "why"), [({"single": 3}, 3, "3"), ({}, 1, "no steps")])
def test_without_a_reference_nothing_else_is_started(parity, codes, ended, why):
    code, written, started, _ = parity({"single": [], "ddp": [2.0]}, codes)
    assert (code, len(started)) == (ended, 1)
    assert [case["verdict"] for case in written["cases"]] == [f"failed ({why})", "not started"]


def test_a_stop_keeps_what_there_is(parity):
    code, written, started, _ = parity({"single": [2.0], "ddp": [2.0], "zero1": [2.0]}, stopped="ddp")
    assert code == 6
    assert len(started) == 2
    assert [case["verdict"] for case in written["cases"]] == ["", "failed (6)", "not started"]


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """`refused("launcher=slurm")`: why nothing is started, for the quickstart in two strategies."""

    def command(*words, tolerance=None):
        def plan(recipe, overrides, recipes_dirs):
            return SimpleNamespace(config=config_of(recipe, *overrides))

        monkeypatch.setattr(run, "plan_job", plan)
        monkeypatch.setattr(run, "run_trial", None)
        with pytest.raises(RequestError) as caught:
            run.parity_command(
                "quickstart", [f"outputs={tmp_path}", *words], [], Console(quiet=True),
                over=["parallelism=ddp,zero2"], gpus=None, num_steps=2, tolerance=tolerance,
            )  # fmt: skip
        assert not list(tmp_path.iterdir())
        assert (caught.value.exit_code, caught.value.problem_id) == (2, "parity-request")
        return caught.value.message

    return command


def test_runs_that_outlive_their_command_are_refused(refused):
    assert refused("launcher=slurm").endswith("let each wait for its job: launcher.wait=true")


@pytest.mark.parametrize("tolerance", [float("nan"), float("inf"), -1.0])
def test_invalid_tolerance_is_refused_before_anything_runs(refused, tolerance):
    assert f"--tolerance {tolerance:g}" in refused(tolerance=tolerance)


def test_equal_losses_are_the_smallest_tolerance(parity):
    code, written, _, folder = parity({"single": [2.0, 1.0], "ddp": [2.0, 1.0]}, tolerance=0.0)
    assert (code, written["tolerance"]) == (0, 0.0)
    assert (folder / "parity.html").exists()


def test_ignored_overrides_are_printed(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "plan_job", lambda *_: SimpleNamespace(config=on_cpu(f"outputs={tmp_path}")))
    monkeypatch.setattr(run, "run_trial", lambda *_: TrialEnd(exit_code=3, seconds=1.0, was_interrupted=False))
    monkeypatch.setattr(run, "write_trial_end", lambda *_: None)
    console = Console(width=200)
    typed = ["evaluation=quickstart", "training.save_every_steps=5", "training.seed=3"]
    with console.capture() as capture:
        run.parity_command("quickstart", typed, [], console, over=["parallelism=ddp,zero2"], gpus=None, num_steps=2)
    assert "set aside: evaluation=quickstart training.save_every_steps=5 (" in capture.get()


def on_cpu(*words):
    return config_of("quickstart", "hardware=cpu", *words)


def test_a_job_that_nobody_waits_for_is_refused():
    with pytest.raises(RequestError, match=r"before there is a loss to compare; .*: launcher\.wait=true$") as caught:
        check_attended(on_cpu("launcher=slurm"))
    assert "--launcher" not in caught.value.message  # an option of sweeps
    check_attended(on_cpu("launcher=slurm", "launcher.wait=true"))


@pytest.mark.parametrize("launcher", [["launcher=local"], ["launcher=ray", "launcher.address=local"]])
def test_several_nodes_need_a_launcher_that_starts_all_of_them(launcher):
    name = launcher[0].removeprefix("launcher=")
    with pytest.raises(RequestError, match=rf"num_nodes=2: with launcher={name} on .*use launcher=slurm launcher.wait"):
        check_attended(on_cpu(*launcher, "hardware.num_nodes=2"))
    check_attended(on_cpu(*launcher))


def test_a_cluster_of_several_nodes_is_no_hindrance():
    check_attended(on_cpu("launcher=ray", "launcher.address=10.0.0.1:6379", "hardware.num_nodes=2"))
