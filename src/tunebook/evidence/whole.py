"""Whether a run was trained whole: from its first step to its last, with the loss of every step that it was to log.

One that goes on from another run's checkpoint has half a curve, and words that would train the other half too.
"""

from __future__ import annotations

from typing import Any

from tunebook.checkpoint.candidates import named_by
from tunebook.config.choices import RESUME_WORDS
from tunebook.config.schema import RunConfig
from tunebook.errors import RequestError
from tunebook.evidence.compare import told_steps
from tunebook.evidence.schema import Results
from tunebook.record.run_record import RunRecord

_RESUME = "training.resume="


def num_resumed(record: RunRecord) -> int:
    """How often a run was taken up again."""
    return len((record.manifest or {}).get("earlier_attempts") or [])


def require_whole(record: RunRecord, config: RunConfig) -> None:
    """Raises: RequestError for a run that goes on from a checkpoint of another."""
    named = named_by(config)
    if named is not None and not named.resolve().is_relative_to(record.folder.resolve()):
        raise _goes_on(str(record.folder), str(named))
    every = record.log_every_steps or 1
    first = next(iter(record.training), None)
    if first is None:
        return
    step: int = first["step"]
    before = step - first.get("num_steps", min(every, step))  # older lines do not say of how many steps they are
    # Killed before its first line, it has lost that alone as it was taken up from its own checkpoint.
    if before > 0 and not (num_resumed(record) and before < every):
        raise _goes_on(str(record.folder), f"step {before}, which is in no line of its own")


def require_whole_words(manifest: dict[str, Any], name: str) -> None:
    """As `require_whole`, where no more than the manifest of a run is here."""
    resumed = [word.removeprefix(_RESUME) for word in manifest["command"] if word.startswith(_RESUME)]
    if resumed and resumed[-1] not in RESUME_WORDS:
        raise _goes_on(name, resumed[-1])


def require_every_loss(record: RunRecord, results: Results) -> None:
    """Raises: RequestError for a run that lost one, for every other would then lack it too."""
    every = record.log_every_steps or 1
    if lost := sorted(set(range(every, results.steps[-1] + 1, every)) - set(results.steps)):
        raise RequestError(
            f"{record.folder} has no loss of step {told_steps(lost)}, which was lost as it was killed and taken up "
            "again; train it whole (training.resume=never) and record that",
            problem_id="evidence-not-repeated",
        )


def _goes_on(name: str, origin: str) -> RequestError:
    return RequestError(
        f"{name}: this run goes on from {origin}, so its words and its losses are not of the same steps; train it "
        "whole (training.resume=never)",
        problem_id="evidence-not-repeated",
    )
