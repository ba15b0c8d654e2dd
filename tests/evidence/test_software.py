"""The packages in evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tunebook.commands.record_evidence import record_evidence
from tunebook.commands.recorded_evidence import verify
from tunebook.config.frozen import plain_config
from tunebook.errors import RequestError
from tunebook.evidence.gather import RunFacts, read_finished
from tunebook.evidence.page import write_page
from tunebook.evidence.schema import Software
from tunebook.record.run_record import RunRecord

from .conftest import MakeRun

TORCH = {"torch": {"installed": "2.11.0", "locked": "2.13.0"}}


def environment(differences: dict[str, dict[str, str | None]] | None, **changes: Any) -> dict[str, Any]:
    lock = {"name": "cpu", "sha256": "5" * 64, "differences": differences, "reason": None}
    return {"lock": lock, "lock_sha256": None if differences else "5" * 64} | changes


def software(differences: dict[str, dict[str, str | None]] | None, **changes: Any) -> Software:
    rest = {"image_digest": None, "python": "3.11.2", "packages": {}}
    manifest = {"code": {"git_commit": "a" * 40}, "environment": rest | environment(differences, **changes)}
    return RunFacts(record=RunRecord(folder=Path("/x")), config=plain_config(), manifest=manifest).software


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


def test_verify_shows_both_sides_and_judges_neither(make_run: MakeRun, recipes_dir: Path) -> None:
    changed = {"environment": environment(TORCH)}
    record_evidence([read_finished(make_run(manifest=changed)) for _ in range(2)], "try", [])
    found = verify(read_finished(make_run()), [])
    (row,) = [row for row in found.rows if row.name == "packages"]
    why = "recorded: torch 2.11.0 where the lock has 2.13.0; this run: as locked"
    assert (row.verdict.value, row.why, found.exit_code) == ("not judged", why, 0)
    assert {"name": "packages", "verdict": "not judged", "why": why}.items() <= found.to_json()["rows"][-1].items()
    page = write_page(found, Console())
    assert page is not None and why in page.read_text()
    (row,) = [row for row in verify(read_finished(make_run(manifest=changed)), []).rows if row.name == "packages"]
    assert row.why.endswith("; this run: torch 2.11.0 where the lock has 2.13.0")


def test_where_both_are_as_locked_there_is_no_row(make_run: MakeRun, recipes_dir: Path) -> None:
    record_evidence([read_finished(make_run()) for _ in range(2)], "try", [])
    assert not [row for row in verify(read_finished(make_run()), []).rows if row.name == "packages"]


def test_runs_of_other_packages_are_no_repetitions(make_run: MakeRun, recipes_dir: Path) -> None:
    runs = [make_run(), make_run(manifest={"environment": environment(TORCH)})]
    with pytest.raises(
        RequestError, match=r"is not a repetition of .*: lock\.differences\.torch\.installed is 2\.11\.0"
    ):
        record_evidence([read_finished(run) for run in runs], "try", [])
