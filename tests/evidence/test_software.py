"""The packages in evidence, and the correction of files that named a lock without a comparison."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tunebook.commands.record_evidence import record_evidence
from tunebook.commands.recorded_evidence import verify
from tunebook.commands.verify import verify_command
from tunebook.errors import RequestError
from tunebook.evidence.files import content_hash, read_evidence, rewrite_evidence
from tunebook.evidence.gather import read_finished
from tunebook.evidence.page import write_page
from tunebook.evidence.schema import Software
from tunebook.evidence.software import correct_files, corrected, gather_software, main, packages_row
from tunebook.files import sha256_file

from .conftest import MakeRun
from .test_card import TABLE

TORCH = {"torch": {"installed": "2.11.0", "locked": "2.13.0"}}
LOCK = "numpy==2.4.6\nnvidia-nccl-cu13==2.29.7\ntorch==2.13.0 \\\n    --hash=sha256:00\ntrl==1.16.0\nrich==15.0.0\n"


def environment(differences: dict[str, dict[str, str | None]] | None, **changes: Any) -> dict[str, Any]:
    lock = {"name": "cpu", "sha256": "5" * 64, "differences": differences, "reason": None}
    return {"lock": lock, "lock_sha256": None if differences else "5" * 64} | changes


def software(differences: dict[str, dict[str, str | None]] | None, **changes: Any) -> Software:
    rest = {"image_digest": None, "python": "3.11.2", "packages": {}}
    return gather_software(
        {"code": {"git_commit": "a" * 40}, "environment": rest | environment(differences, **changes)}
    )


# --- from a run's manifest


def test_run_as_locked_has_no_deviation() -> None:
    found = software({})
    assert (found.lock_sha256, found.deviation()) == ("5" * 64, None)


def test_important_packages_are_named_and_others_counted() -> None:
    found = software(
        TORCH | {"aiohttp": {"installed": "3.1", "locked": "3.2"}, "trl": {"installed": None, "locked": "1.16.0"}}
    )
    assert found.lock_sha256 is None
    assert found.lock is not None
    assert (sorted(found.lock.differences), found.lock.num_other_differences) == (["torch", "trl"], 1)
    assert found.deviation() == (
        "torch 2.11.0 where the lock has 2.13.0, no trl where the lock has 1.16.0, other packages that differ: 1"
    )


def test_older_manifest_has_no_lock() -> None:
    found = software({}, lock=None)
    assert (found.lock, found.lock_sha256, found.deviation()) == (None, None, "packages not compared with a lock")


def test_uncompared_packages_have_no_lock() -> None:
    assert software(None, lock_sha256=None).deviation() == "packages not compared with a lock"


def test_an_image_that_compared_its_packages_when_it_was_built_has_its_lock() -> None:
    found = software(None)
    assert (found.lock_sha256, found.deviation()) == ("5" * 64, None)


# --- shown


def test_verify_shows_both_sides_and_judges_neither(make_run: MakeRun, recipes_dir: Path, tmp_path: Path) -> None:
    changed = {"environment": environment(TORCH)}
    record_evidence([read_finished(make_run(manifest=changed)) for _ in range(2)], "try", [])
    found = verify(read_finished(make_run()), [])
    (row,) = [row for row in found.rows if row.name == "packages"]
    why = "recorded: torch 2.11.0 where the lock has 2.13.0; this run: as locked"
    assert (row.verdict.value, row.why, found.exit_code) == ("not judged", why, 0)
    assert {"name": "packages", "verdict": "not judged", "why": why}.items() <= found.to_json()["rows"][-1].items()
    write_page(found, "run", tmp_path / "page.html")
    assert why in (tmp_path / "page.html").read_text()
    (row,) = [row for row in verify(read_finished(make_run(manifest=changed)), []).rows if row.name == "packages"]
    assert row.why.endswith("; this run: torch 2.11.0 where the lock has 2.13.0")


def test_where_both_are_as_locked_there_is_no_row() -> None:
    assert packages_row(software({}), software({})) is None


def test_runs_of_other_packages_are_no_repetitions(make_run: MakeRun, recipes_dir: Path) -> None:
    runs = [make_run(), make_run(manifest={"environment": environment(TORCH)})]
    with pytest.raises(
        RequestError, match=r"is not a repetition of .*: lock\.differences\.torch\.installed is 2\.11\.0"
    ):
        record_evidence([read_finished(run) for run in runs], "try", [])


# --- corrected


@pytest.fixture
def docker(tmp_path: Path) -> Path:
    for name in ("cpu", "hopper"):
        (tmp_path / "docker" / name).mkdir(parents=True)
        (tmp_path / "docker" / name / "requirements.lock").write_text(LOCK)
    return tmp_path / "docker"


def older(docker: Path, generation: str = "hopper", **changes: Any) -> dict[str, Any]:
    """The relevant part of a file whose lock was never compared."""
    software = {
        "git_commit": "a" * 40, "lock_sha256": sha256_file(docker / "hopper" / "requirements.lock"),
        "image_digest": None, "python": "3.12.3", "packages": {"torch": "2.11.0", "numpy": "2.4.6"},
    }  # fmt: skip
    return {"software": software | changes, "hardware": {"generation": generation, "nccl": "2.28.9"}}


def test_recorded_packages_are_compared_and_others_unknown(docker: Path) -> None:
    before = older(docker)
    found = corrected(before, docker)["software"]
    assert list(found) == ["git_commit", "lock_sha256", "lock", "image_digest", "python", "packages"]
    assert found["lock_sha256"] is None
    assert found["lock"] == {
        "name": "hopper",
        "sha256": before["software"]["lock_sha256"],
        "differences": {
            "python": {"installed": "3.12.3", "locked": "3.11"},
            "nvidia-nccl-cu13": {"installed": "2.28.9", "locked": "2.29.7"},
            "torch": {"installed": "2.11.0", "locked": "2.13.0"},
            "trl": {"installed": None, "locked": "1.16.0"},  # every installed package of its kind would be named
        },
        "num_other_differences": None,
        "num_unknown": 1,  # rich
    }
    assert before == older(docker), "the content itself is left alone"


def test_nccl_is_unknown_if_it_was_not_recorded(docker: Path) -> None:
    content = older(docker, python="3.11.2", packages={"torch": "2.13.0", "numpy": "2.4.6", "trl": "1.16.0"})
    content["hardware"]["nccl"] = None
    lock = corrected(content, docker)["software"]["lock"]
    assert (lock["differences"], lock["num_unknown"]) == ({}, 2)


def test_lock_with_another_hash_is_refused(docker: Path) -> None:
    with pytest.raises(RequestError, match=r"check out commit aaaaaaaaaaaa .* --docker"):
        corrected(older(docker, lock_sha256="6" * 64), docker)
    with pytest.raises(RequestError, match=r"requirements\.lock is another"):
        corrected(older(docker, generation="volta"), docker)


@pytest.fixture
def recorded(make_run: MakeRun, recipes_dir: Path, docker: Path, tmp_path: Path) -> Path:
    """A file of an earlier version, with its card and its row in the table of recipes."""
    (tmp_path / "README.md").write_text(TABLE)
    card = recipes_dir / "quickstart" / "README.md"
    card.parent.mkdir(parents=True)
    card.write_text("# quickstart\n\n## Evidence\n\nNone recorded yet.\n")
    runs = [str(make_run()), str(make_run())]
    assert verify_command(runs, Path(), [], Console(file=StringIO()), record=True, label="try") == 0
    file = recipes_dir / "quickstart" / "evidence" / "cpu-1-try.json"
    content = json.loads(file.read_text())
    del content["software"]["lock"]
    content["software"] |= {
        "lock_sha256": sha256_file(docker / "cpu" / "requirements.lock"), "python": "3.11.2",
        "packages": {"torch": "2.11.0", "numpy": "2.4.6", "trl": "1.16.0"},
    }  # fmt: skip
    rewrite_evidence(content, file)
    return file


def test_a_file_its_card_and_the_table_are_corrected_once(recorded: Path, docker: Path, tmp_path: Path) -> None:
    before = json.loads(recorded.read_text())
    assert read_evidence(recorded).software.deviation() == "packages not compared with a lock"
    assert correct_files([recorded], docker) == [recorded]
    content = json.loads(recorded.read_text())
    assert content["content_sha256"] == content_hash(content)
    assert content["software"]["lock"]["differences"] == TORCH
    assert {key for key in content if content[key] != before[key]} == {"software", "content_sha256"}
    expected = "torch 2.11.0 where the lock has 2.13.0"
    card = (recorded.parents[1] / "README.md").read_text()
    assert f"\ncpu-1-try: {expected}, packages of the lock with no recorded version: 2\n" in card
    assert "| [1 from-scratch](recipes/quickstart/README.md#evidence) | " in (tmp_path / "README.md").read_text()
    text = recorded.read_text()
    assert correct_files([recorded], docker) == []
    assert recorded.read_text() == text


def test_the_command_says_what_it_changed(
    recorded: Path, docker: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["--docker", str(docker), str(recorded)]) == 0
    assert "torch 2.11.0 where the lock has 2.13.0" in capsys.readouterr().out
    assert main([str(tmp_path / "nothing.json")]) == 4
    assert "nothing.json does not exist" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main([])
    assert (ended.value.code, "required: FILE" in capsys.readouterr().err) == (2, True)
