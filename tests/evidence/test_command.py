"""The differences of two runs' records."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tunebook.commands.verify import diff_command, differences
from tunebook.errors import RequestError
from tunebook.evidence.gather import gather_results
from tunebook.record.run_record import RunRecord, read_run

from .conftest import MakeRun, curve


def loss_differences(one: RunRecord, other: RunRecord) -> dict[str, list[Any]]:
    return {key: values for key, *values in differences(one, other)["results"] if "loss" in key and "step" in key}


def test_equal_runs_differ_in_nothing(make_run: MakeRun) -> None:
    assert differences(read_run(make_run()), read_run(make_run())) == {"config": [], "manifest": [], "results": []}


def test_start_up_times_and_folders_are_no_difference(make_run: MakeRun) -> None:
    folders = [make_run(), make_run()]
    for folder, seconds in zip(folders, (1.0, 2.0), strict=True):
        took: dict[str, Any] = {"start_up": {"launcher": {"plan": seconds}, "rank": {}, "first_step_s": seconds}}
        took["model_files"] = {"training_args.bin": {"size": 6000 + int(seconds), "sha256": f"{seconds}" * 8}}
        file = folder / "manifest.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | took))
    assert differences(*map(read_run, folders))["manifest"] == []


def test_each_section_names_its_keys_with_both_values(make_run: MakeRun) -> None:
    one = read_run(make_run())
    other = read_run(make_run("training.seed=7", gpus=1, losses=curve(1.1), speed=500.0))
    found = differences(one, other)
    assert ("training.seed", "0", "7") in found["config"]
    assert ("hardware.driver", None, "580.1") in found["manifest"]
    assert ("tokens_per_second_per_gpu", 1000.0, 500.0) in found["results"]
    assert not any(key.startswith("status") for key, _, _ in found["manifest"])


def test_the_first_step_that_differs_and_the_largest_difference(make_run: MakeRun) -> None:
    one, other = read_run(make_run()), read_run(make_run(losses=curve(1.1)))
    assert loss_differences(one, one) == {}
    assert loss_differences(one, other) == {
        "loss at step 51, the first that differs": [curve()[50], curve(1.1)[50]],
        "largest difference of a step's loss, relative": ["", pytest.approx(0.1)],
    }
    assert "loss at step 58, the first that differs" in loss_differences(one, read_run(make_run(losses=curve()[:-3])))


def test_both_attempts_of_a_resumed_run_are_in_its_seconds(make_run: MakeRun) -> None:
    whole, resumed = make_run(), make_run()
    file = resumed / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["status"]["seconds"] = 27.9
    manifest["earlier_attempts"] = [manifest["status"] | {"state": "stopped", "seconds": 48.6}]
    file.write_text(json.dumps(manifest))
    found = {key: values for key, *values in differences(read_run(whole), read_run(resumed))["results"]}
    assert found["seconds"][1] == 76.5
    assert found["num_attempts"] == [1, 2]


def test_a_run_that_was_stopped_between_two_logged_steps_differs_in_no_step(make_run: MakeRun) -> None:
    def lines(*logged: tuple[int, int, float]) -> str:
        told = ({"step": step, "num_steps": num, "loss": loss} for step, num, loss in logged)
        return "".join(json.dumps(line) + "\n" for line in told)

    whole, resumed = make_run("training.log_every_steps=4"), make_run("training.log_every_steps=4")
    (whole / "metrics.jsonl").write_text(lines((4, 4, 4.0), (8, 4, 2.5)))
    (resumed / "metrics.jsonl").write_text(lines((4, 4, 4.0), (7, 3, 3.0), (8, 1, 1.0)))
    assert loss_differences(read_run(whole), read_run(resumed)) == {}
    assert gather_results(read_run(resumed)).losses == gather_results(read_run(whole)).losses == [4.0, 2.5]
    (resumed / "metrics.jsonl").write_text(lines((3, 3, 3.0)))
    with pytest.raises(RequestError, match=r"no loss at a step that is a multiple of training\.log_every_steps=4"):
        gather_results(read_run(resumed))


def run_diff(*runs: Path, as_json: bool = False) -> str:
    out = StringIO()
    assert (
        diff_command((str(runs[0]), str(runs[1])), Path("outputs"), Console(file=out, width=200), as_json=as_json) == 0
    )
    return out.getvalue()


def test_the_table_shortens_hashes_and_nothing_else(make_run: MakeRun) -> None:
    said = run_diff(make_run(), make_run(manifest={"dataset": {"fingerprint": "f" * 64}}))
    assert "dataset.fingerprint" in said
    assert "ffffffffffff..." in said
    assert "f" * 64 not in said
    assert "no difference in configuration, manifest and results" in run_diff(make_run(), make_run())


def test_a_run_without_its_configuration_is_not_said_to_have_the_same(make_run: MakeRun) -> None:
    one, other = make_run(), make_run()
    (other / "run.yaml").unlink()
    said = run_diff(one, other)
    assert "no difference in manifest and results" in said
    assert f"configurations are not compared: quickstart/{other.name} lacks run.yaml" in said


def test_a_run_is_not_compared_with_itself(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    monkeypatch.chdir(run.parent)
    same = rf"{run.name} and .*{run.name} are the same run, .*. Name another one"
    with pytest.raises(RequestError, match=same) as no:
        run_diff(Path(run.name), run)
    assert no.value.problem_id == "run-named-twice"


def test_as_json_every_difference_has_its_key_and_values(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run_diff(make_run(), make_run("training.seed=7"), as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed["config"] == [{"key": "training.seed", "values": ["0", "7"]}]
    assert printed["results"] == []
