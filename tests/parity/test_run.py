"""The command around the runs: what it starts, keeps, writes and ends with. No run is trained here."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from tunebook.config.choices import Compute, Generation
from tunebook.errors import Problem, RulesError
from tunebook.parity import run
from tunebook.record.atomic_files import read_json
from tunebook.sweep.trial_process import TrialEnd


@pytest.fixture
def parity(tmp_path, monkeypatch):
    """`parity({"ddp": [2.0], ...}, codes={}, refused=[], stopped=None)`: exit code, the JSON, what was started."""

    def command(losses, codes=None, refused=(), stopped=None, tolerance=None):
        started = []
        config = SimpleNamespace(
            precision=SimpleNamespace(compute=Compute.fp32),
            hardware=SimpleNamespace(generation=Generation.cpu),
            outputs=str(tmp_path),
        )

        def plan(recipe, overrides, recipes_dirs):
            if overrides[-1].removeprefix("parallelism=") in refused:
                raise RulesError([Problem(id="some-rule", key="a.key", message="forbidden", fix="a.key=b")])
            return SimpleNamespace(config=config)

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


def test_each_case_is_an_ordinary_run_of_which_the_model_is_not_kept(parity):
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


def test_without_a_reference_nothing_else_is_started(parity):
    code, written, started, _ = parity({"single": [], "ddp": [2.0]}, codes={"single": 3})
    assert code == 3
    assert len(started) == 1
    assert [case["verdict"] for case in written["cases"]] == ["failed (3)", "not started"]


def test_a_stop_keeps_what_there_is(parity):
    code, written, started, _ = parity({"single": [2.0], "ddp": [2.0], "zero1": [2.0]}, stopped="ddp")
    assert code == 6
    assert len(started) == 2
    assert [case["verdict"] for case in written["cases"]] == ["", "failed (6)", "not started"]
