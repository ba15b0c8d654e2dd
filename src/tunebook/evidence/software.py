"""Record the code and packages of a run, and how the packages differ from the lock that the evidence names."""

from __future__ import annotations

from typing import Any

from tunebook.evidence.compare import Row, Verdict
from tunebook.evidence.schema import Lock, Software
from tunebook.record.locks import matters


def gather_software(manifest: dict[str, Any]) -> Software:
    """Return the code and packages of a run. Runs without a commit are refused before this call."""
    environment = manifest["environment"]
    lock = _lock_of(environment)
    return Software(
        git_commit=str(manifest["code"]["git_commit"]),
        lock_sha256=None if lock is None else environment["lock_sha256"],
        lock=lock,
        image_digest=environment["image_digest"],
        python=environment["python"],
        packages=environment["packages"],
    )


def _lock_of(environment: dict[str, Any]) -> Lock | None:
    """Return the lock that a run was compared with; None if it was not, as in manifests of earlier versions."""
    found = environment.get("lock")
    if found is None or (found["differences"] is None and environment["lock_sha256"] is None):
        return None
    differences = found["differences"] or {}  # None for an image that lists no packages: its build found no differences
    important = {name: one for name, one in differences.items() if matters(name)}
    return Lock(
        name=found["name"], sha256=found["sha256"], differences=important,
        num_other_differences=len(differences) - len(important), num_unknown=0,
    )  # fmt: skip


def packages_row(recorded: Software, found: Software) -> Row | None:
    """Return a remark if the packages of the evidence or the run differ from their lock; None if neither does."""
    then, now = recorded.deviation(), found.deviation()
    if then is None and now is None:
        return None
    return Row(
        name="packages", expected=None, found=None, difference=None, tolerance=None, verdict=Verdict.shown,
        why=f"recorded: {then or 'as locked'}; this run: {now or 'as locked'}",
    )  # fmt: skip
