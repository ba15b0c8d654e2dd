"""Whether a run's folder still says what the run was: `run.yaml`, `manifest.json` and results vouch for each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tunebook.config.identity import HASH_VERSION, has_hash
from tunebook.config.schema import RunConfig
from tunebook.errors import RequestError
from tunebook.record.files import RUN_FILE
from tunebook.record.manifest import changed_files


def require_unchanged(folder: Path, frozen: dict[str, Any], config: RunConfig, manifest: dict[str, Any]) -> None:
    """`frozen` is the content of run.yaml, `config` what it is read as.

    Raises: RequestError where one of the two files, or what was measured, was changed since.
    """
    said = (("recipe", manifest["recipe"], config.recipe), ("seed", manifest["seed"], config.training.seed))
    for name, noted, frozen_value in said:
        if noted != frozen_value:
            raise _changed(folder, f"its manifest says {name} {noted}, and {RUN_FILE} {frozen_value}")
    is_known = manifest.get("hash_version", 1) == HASH_VERSION  # nobody recomputes the hashes of other versions
    if is_known and not has_hash(config, manifest["config_sha256"]):
        raise _changed(folder, f"{RUN_FILE} has not the hash that its manifest noted at the start")
    if changed := changed_files(folder, manifest):
        raise RequestError(
            f"{folder}: {' and '.join(changed)} was changed after the run, by the hash that its manifest noted at the "
            "end, so nobody knows what was measured; take the file back from a copy, or train again",
            problem_id="run-changed",
        )


def _changed(folder: Path, why: str) -> RequestError:
    return RequestError(
        f"{folder}: {RUN_FILE} or manifest.json was changed after the run ({why}), so nobody knows what was trained; "
        "take the file back from a copy, or train again",
        problem_id="run-changed",
    )
