"""What is refused or printed before a run is reproduced. The run itself is in the system tests."""

from __future__ import annotations

import shlex
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import tunebook.commands.reproduce as reproducing
from tunebook.commands.reproduce import differences_here, find_original, reproduce_command
from tunebook.config.schema import RunConfig
from tunebook.errors import DataError, StoppedError, TunebookError
from tunebook.evidence.compare import claim_of_run
from tunebook.evidence.gather import read_finished
from tunebook.record.provenance import describe_environment, describe_hardware

from ..evidence.conftest import MakeRun, Record, edit_json


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Collects the configurations that would be run, and stops them; the data is as it was recorded."""
    found: list[RunConfig] = []

    def stop(job: Any, console: Console, *, folder: Path) -> int:
        found.append(job.config)
        raise StoppedError("stopped by SIGINT after step 2")

    same = SimpleNamespace(content_sha256="3" * 64, tokenizer_sha256="1" * 64, chat_template_sha256="2" * 64)
    monkeypatch.setattr(reproducing, "run_job", stop)
    monkeypatch.setattr(reproducing, "with_data", lambda job, _: (job, same))
    return found


def reproduce(target: Path, outputs: Path, *, dry_run: bool = False) -> list[str]:
    out = StringIO()
    console = Console(file=out, width=400)
    if dry_run:
        assert reproduce_command(str(target), outputs, [], console, dry_run=True) == 0
    else:
        with pytest.raises(StoppedError):
            reproduce_command(str(target), outputs, [], console)
    return out.getvalue().splitlines()


def folder_in(outputs: Path) -> Path:
    (folder,) = [path for path in (outputs / "quickstart").iterdir() if not path.is_symlink()]
    return folder


def test_evidence_is_trained_by_its_overrides_and_compared_with_it(
    make_run: MakeRun, record: Record, jobs: list[RunConfig], tmp_path: Path
) -> None:
    file = record(*(make_run("training.max_steps=60") for _ in range(2)))
    printed = reproduce(file, tmp_path / "new")
    assert "to be compared with cpu-1-try.json" in printed
    assert jobs[0].training.max_steps == 60
    verify = shlex.split(printed[-1].partition(": ")[2])
    assert verify == ["tunebook", "verify", "--against", str(file), str(folder_in(tmp_path / "new"))]


def test_a_dry_run_tells_what_it_would_run(
    make_run: MakeRun, jobs: list[RunConfig], project_root: Path, tmp_path: Path
) -> None:
    original, new = make_run("training.max_steps=60"), tmp_path / "new"
    *_, run, compared = reproduce(original, new, dry_run=True)
    words = ["training.max_steps=60", f'outputs="{new}"', "training.resume=never"]
    assert run.endswith(f": {shlex.join(['tunebook', 'train', 'quickstart', *words])}")
    assert compared == f"to be compared with quickstart/{original.name}"
    assert (jobs, new.exists()) == ([], False)
    book_evidence = project_root / "recipes/quickstart/evidence/cpu-1-any.json"
    assert reproduce(book_evidence, new, dry_run=True)[-1] == "to be compared with cpu-1-any.json"
    for content in ("{}", '{"format": 99}', "[1]"):
        (tmp_path / "file.json").write_text(content)
        with pytest.raises(DataError):
            reproduce(tmp_path / "file.json", new, dry_run=True)


def test_the_parent_of_a_run_is_the_recorded_one(make_run: MakeRun, tmp_path: Path) -> None:
    """The recipe may name another recipe, of which there is a newer run by now."""
    original = make_run(replaced={"  run: null": "  run: /outputs/parent/first"})
    assert find_original(str(original), tmp_path).overrides == ["model.run=/outputs/parent/first"]


def test_a_job_that_is_not_waited_for_is_not_compared(
    make_run: MakeRun, jobs: list[RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproducing, "run_job", lambda *_, folder: 0)
    original = make_run("launcher=slurm")
    assert reproduce_command(str(original), tmp_path / "new", [], Console(file=StringIO())) == 0


# --- what is refused


@pytest.mark.parametrize(
    ("changes", "difference", "exit_code"),
    [
        ({"replaced": {"weight_decay: 0.1": "weight_decay: 0.3"}}, "weight_decay is 0.1, recorded with 0.3", 2),
        ({"manifest": {"dataset": {"content_sha256": "9" * 64}}}, "data_sha256 is 3333", 5),
    ],
    ids=["settings", "data"],
)
def test_a_run_that_would_be_another_one_here_is_refused(
    make_run: MakeRun, jobs: list[RunConfig], tmp_path: Path, changes: dict[str, Any], difference: str, exit_code: int
) -> None:
    original = make_run(**changes)
    with pytest.raises(TunebookError, match=difference) as error:
        reproduce_command(str(original), tmp_path / "new", [], Console(file=StringIO()))
    assert (error.value.exit_code, jobs) == (exit_code, [])
    assert not (tmp_path / "new").exists()


# --- what differs here, and where relative paths start


def test_what_differs_here_is_printed_with_what_was_recorded(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(gpus=2, manifest={"environment": {"python": "3.9.0"}})
    run = read_finished(folder)
    lines = list(differences_here(claim_of_run(run), run.config))
    assert any(line.startswith("different here: python is 3.") and line.endswith("with 3.9.0") for line in lines)
    assert any(line.startswith("different here: git_commit is ") for line in lines)
    assert "different here: hardware.driver is None, recorded with 580.1" in lines
    hardware = describe_hardware(None) | {"gpus": []}
    edit_json(folder / "manifest.json", environment=describe_environment("cpu"), hardware=hardware)
    run = read_finished(folder)
    for difference in (None, "f" * 64):
        code = {"git_commit": "a" * 40, "git_diff_sha256": difference}
        monkeypatch.setattr(reproducing, "describe_code", lambda _, code=code: code)
        (line,) = differences_here(claim_of_run(run), run.config)
        assert ("the code was changed after commit aaaaaaaaaaaa" in line) == (difference is not None)


def test_overrides_are_read_in_the_folder_where_they_were_typed(
    make_run: MakeRun, jobs: list[RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "my.jinja").write_text("{{ messages }}")
    monkeypatch.chdir(tmp_path / "work")
    run = make_run("model.chat_template=my.jinja")
    monkeypatch.chdir(tmp_path)
    outputs = Path("my [new], 'runs'")
    *lines, compared = reproduce(run, outputs)
    assert any(line.startswith(f"to be run in {tmp_path / 'work'}: tunebook train quickstart") for line in lines)
    assert Path.cwd() == tmp_path, "the folder is left again"
    assert jobs[0].outputs == str(tmp_path / outputs), "where the command was typed"
    words = shlex.split(compared.partition(": ")[2])
    assert words == ["tunebook", "diff", str(run), str(folder_in(tmp_path / outputs))]
