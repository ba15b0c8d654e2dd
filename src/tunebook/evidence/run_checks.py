"""Checks that a run's records are complete and unchanged, before it is compared or recorded as evidence.

A run that resumes from another run's checkpoint has only half a loss curve, while its command would train both halves.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tunebook.checkpoint.choose import named_by
from tunebook.config.choices import RESUME_WORDS
from tunebook.config.identity import HASH_VERSION, has_hash
from tunebook.config.schema import RunConfig
from tunebook.errors import RequestError
from tunebook.evidence.schema import Results
from tunebook.record.manifest import changed_files
from tunebook.record.run_folder import RUN_FILE
from tunebook.record.run_record import RunRecord

_RESUME = "training.resume="
_NUM_GROUPS = 4  # of steps that a message lists


def num_resumed(record: RunRecord) -> int:
    """The number of times that a run resumed."""
    return len((record.manifest or {}).get("earlier_attempts") or [])


def require_first_step(record: RunRecord, config: RunConfig) -> None:
    """Raises: RequestError for a run that did not start at the first step but at another run's checkpoint."""
    named = named_by(config)
    if named is not None and not named.resolve().is_relative_to(record.folder.resolve()):
        raise _resumed_from(str(record.folder), str(named))
    if not record.training:
        return
    every, first = record.log_every_steps or 1, record.training[0]
    before = first["step"] - first.get("num_steps", min(every, first["step"]))  # older lines lack num_steps
    # A run that was killed before its first line and resumed from its own checkpoint lost only that line.
    if before > 0 and not (num_resumed(record) and before < every):
        raise _resumed_from(str(record.folder), f"step {before}, which is in no line of its own")


def require_first_step_by_manifest(manifest: dict[str, Any], name: str) -> None:
    """Check like `require_first_step`, with only the manifest of a run."""
    resumed = [word.removeprefix(_RESUME) for word in manifest["command"] if word.startswith(_RESUME)]
    if resumed and resumed[-1] not in RESUME_WORDS:
        raise _resumed_from(name, resumed[-1])


def require_every_loss(record: RunRecord, results: Results) -> None:
    """Raises: RequestError if the loss of a scheduled step is missing: no other run could be compared there."""
    every = record.log_every_steps or 1
    if lost := sorted(set(range(every, results.steps[-1] + 1, every)) - set(results.steps)):
        raise RequestError(
            f"{record.folder} has no loss of step {steps_text(lost)}, which was lost when it was killed and resumed; "
            "train again without interruption (training.resume=never) and record that run",
            problem_id="evidence-not-repeated",
        )


def _resumed_from(name: str, origin: str) -> RequestError:
    return RequestError(
        f"{name}: this run resumed from {origin}, so its command and its losses cover different steps; train from the "
        "first step (training.resume=never)",
        problem_id="evidence-not-repeated",
    )


def require_unchanged(folder: Path, frozen: dict[str, Any], config: RunConfig, manifest: dict[str, Any]) -> None:
    """Check that run.yaml (`frozen`, parsed as `config`), manifest and results are as the run wrote them.

    Raises: RequestError if one of them was changed.
    """
    pairs = (("recipe", manifest["recipe"], config.recipe), ("seed", manifest["seed"], config.training.seed))
    for name, noted, present in pairs:
        if noted != present:
            raise _changed(folder, f"the manifest has {name} {noted}, and {RUN_FILE} {present}")
    is_known = manifest.get("hash_version", 1) == HASH_VERSION  # hashes of other versions cannot be recomputed
    if is_known and not has_hash(config, manifest["config_sha256"]):
        raise _changed(folder, f"the hash of {RUN_FILE} differs from the manifest's")
    if changed := changed_files(folder, manifest):
        raise RequestError(
            f"{folder}: {' and '.join(changed)} was changed after the run, by the hash in its manifest, so the "
            "measured results are unknown; restore the file from a copy, or train again",
            problem_id="run-changed",
        )


def _changed(folder: Path, why: str) -> RequestError:
    return RequestError(
        f"{folder}: {RUN_FILE} or manifest.json was changed after the run ({why}), so the trained configuration is "
        "unknown; restore the file from a copy, or train again",
        problem_id="run-changed",
    )


def steps_text(steps: Sequence[int]) -> str:
    """Abbreviate logged steps, such as `5-8`, or `10-40 and 60-90, every 10`."""
    apart = min((two - one for one, two in pairwise(steps)), default=1)
    groups: list[list[int]] = []
    for step in steps:
        if groups and step - groups[-1][-1] == apart:
            groups[-1].append(step)
        else:
            groups.append([step])
    texts = [f"{group[0]}-{group[-1]}" if len(group) > 1 else str(group[0]) for group in groups]
    if len(texts) > _NUM_GROUPS:
        texts = [*texts[: _NUM_GROUPS - 1], f"{len(texts) - _NUM_GROUPS + 1} more"]
    named = " and ".join([", ".join(texts[:-1]), texts[-1]]) if len(texts) > 1 else "".join(texts)
    return f"{named}, every {apart}" if apart > 1 and len(groups) < len(steps) else named
