"""What two runs' records say differently."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tunebook.evidence.command import diff_command
from tunebook.evidence.difference import differences, first_different_step, largest_difference
from tunebook.record.run_record import read_run

from .conftest import MakeRun, curve


def test_equal_runs_differ_in_nothing(make_run: MakeRun) -> None:
    assert differences(read_run(make_run()), read_run(make_run())) == {"config": [], "manifest": [], "results": []}


def test_how_long_a_start_took_is_no_difference(make_run: MakeRun) -> None:
    folders = [make_run(), make_run()]
    for folder, seconds in zip(folders, (1.0, 2.0), strict=True):
        took = {"start_up": {"launcher": {"plan": seconds}, "rank": {}, "first_step_s": seconds}}
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


def test_the_first_step_that_differs_and_by_how_much_at_most(make_run: MakeRun) -> None:
    one, other = read_run(make_run()), read_run(make_run(losses=curve(1.1)))
    assert first_different_step(one, one) is None
    assert first_different_step(one, other) == 51
    assert largest_difference(one, other) == pytest.approx(0.1)
    assert first_different_step(one, read_run(make_run(losses=curve()[:-3]))) == 58


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


def test_as_json_every_difference_has_its_key_and_values(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run_diff(make_run(), make_run("training.seed=7"), as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed["config"] == [{"key": "training.seed", "values": ["0", "7"]}]
    assert printed["results"] == []
