"""`tunebook diff`: the settings that differ, and the comparison of the results."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tunebook.commands.diff import diff_command

from ..evidence.conftest import MakeRun, curve, edit_json


def run_diff(*runs: Path, as_json: bool = False) -> str:
    out, arguments = StringIO(), (str(runs[0]), str(runs[1]))
    assert diff_command(arguments, Path("outputs"), Console(file=out, width=300), as_json=as_json) == 0
    return out.getvalue()


def diff_json(capsys: pytest.CaptureFixture[str], *runs: Path) -> dict[str, Any]:
    run_diff(*runs, as_json=True)
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def test_equal_runs_differ_in_nothing(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make_run(), make_run()]
    for run, seconds in zip(runs, (1.0, 2.0), strict=True):  # differ between any two runs
        size = {"training_args.bin": {"size": 6000 + int(seconds), "sha256": f"{seconds}" * 8}}
        start_up = {"launched": f"{seconds}", "launcher": {"plan": seconds}, "rank": {}, "first_step_s": seconds}
        histogram = {"counts": {"train": {"lengths": {"edges": [0, int(seconds)]}}}}
        edit_json(run / "manifest.json", start_up=start_up, model_files=size, dataset=histogram)
    printed = diff_json(capsys, *runs)
    assert (printed["config"], printed["manifest"]) == ([], [])
    assert {row["difference"] for row in printed["results"]} == {0.0}
    printed_text = run_diff(*runs)
    assert "no difference in configuration and manifest" in printed_text
    assert "second run" in printed_text and "recorded" not in printed_text


def test_each_section_names_what_differs(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    other = make_run("training.seed=7", gpus=1, losses=curve(1.1), speed=500.0, validation={60: 2.0})
    printed = diff_json(capsys, make_run(validation={60: 1.0}), other)
    assert {"key": "training.seed", "values": [0, 7]} in printed["config"]
    assert {"key": "hardware.driver", "values": ["not set", "580.1"]} not in printed["manifest"]
    assert {"key": "hardware.driver", "values": [None, "580.1"]} in printed["manifest"]
    assert not any(difference["key"].startswith("status") for difference in printed["manifest"])
    rows = {row["name"]: row for row in printed["results"]}
    assert rows["loss"]["reason"].startswith("differs from step 51;")
    assert (rows["tokens/s/GPU"]["expected"], rows["tokens/s/GPU"]["measured"]) == (1000.0, 500.0)
    assert rows["validation loss"]["difference"] == 1.0


@pytest.mark.parametrize("losses", [curve()[:30], [None] * 3], ids=["half", "none"])
def test_a_run_that_failed_is_compared_as_far_as_it_came(make_run: MakeRun, losses: list[float | None]) -> None:
    failed = {"status": {"state": "failed", "reason": "out of memory"}, "dataset": {"fingerprint": "f" * 64}}
    text = run_diff(make_run(), make_run(losses=losses, manifest=failed))
    assert "status.state" in text
    assert "ffffffffffff..." in text and "f" * 64 not in text
    assert ("steps that only one run logged: 31, 32, 33, 34 and 26 more" in text) == (len(losses) == 30)
    assert ("has logged no finite loss" in text) == (len(losses) == 3)


def test_a_run_stopped_between_two_logged_steps_differs_in_no_step(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    def log(run: Path, *logged: tuple[int, int, float]) -> Path:
        lines = ({"step": step, "num_steps": num, "loss": loss, "seconds": 1.0} for step, num, loss in logged)
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return run

    whole, resumed = make_run("training.log_every_steps=4"), make_run("training.log_every_steps=4")
    log(whole, (4, 4, 4.0), (8, 4, 2.5))
    log(resumed, (4, 4, 4.0), (7, 3, 3.0), (8, 1, 1.0))
    assert diff_json(capsys, whole, resumed)["results"][0]["difference"] == 0.0
