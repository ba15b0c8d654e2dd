"""Faults of generated answers before and after training: rows for the report, and warnings for the terminal.

`evaluate.answer_faults` counts them in the record of each evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FAULTS = ("empty", "looping", "endless", "abrupt")
_MEANING = {
    "empty": "empty",
    "looping": "repeat themselves to the end",
    "endless": "reached the limit of new tokens",
    "abrupt": "end within a sentence, a code block or a thought",
}
_BY_FINISH = ("endless", "abrupt")
WARNING_MARGIN = 0.05  # by which the share after training is above the share before ...
_ERRORS = 2.0  # ... and by how many standard errors of that difference: 1 of 10 answers says nothing
_Record = Mapping[str, Any]  # of an evaluation


@dataclass(frozen=True, kw_only=True)
class FaultRow:
    """One fault of one task; None for an evaluation that did not count it."""

    task: str
    fault: str
    before: str | None
    after: str | None
    is_warning: bool
    example: str  # how one such answer ends, of the evaluation after training if it has one
    example_when: str  # before or after


def fault_rows(before: _Record | None, after: _Record | None) -> list[FaultRow]:
    """A row for each fault of each task that was found before or after training."""
    old, new = _faults(before), _faults(after)
    rows = []
    for task in dict.fromkeys([*new, *old]):
        pair = old.get(task), new.get(task)
        for fault in FAULTS:
            if any(found and found[fault] for found in pair):
                example, when = _example(fault, *pair)
                rows.append(
                    FaultRow(
                        task=task,
                        fault=_MEANING[fault],
                        before=_text(pair[0], fault),
                        after=_text(pair[1], fault),
                        is_warning=is_more(fault, *pair),
                        example=example,
                        example_when=when,
                    )
                )
    return rows


def _example(fault: str, before: _Record | None, after: _Record | None) -> tuple[str, str]:
    """The end of an answer with this fault, and of which evaluation it is."""
    for found, when in ((after, "after"), (before, "before")):
        if found and fault in found["examples"]:
            return str(found["examples"][fault]["end"]), when
    return "", ""


def is_more(fault: str, before: _Record | None, after: _Record | None) -> bool:
    """Whether the share of a fault is above that before training by the margin, and by more than chance."""
    if not before or not after or not before["num_answers"] or not after["num_answers"]:
        return False
    if fault in _BY_FINISH and any(found.get("num_unknown_finish") for found in (before, after)):
        return False  # an older version answered, and did not save how answers ended
    shares = [found[fault] / found["num_answers"] for found in (before, after)]
    counts = [found["num_answers"] for found in (before, after)]
    error = math.sqrt(sum(share * (1 - share) / count for share, count in zip(shares, counts, strict=True)))
    return bool(shares[1] - shares[0] > max(WARNING_MARGIN, _ERRORS * error))


def fault_warnings(before: _Record | None, after: _Record | None) -> list[str]:
    """A line for each fault that is more frequent after training."""
    old, new = _faults(before), _faults(after)
    return [
        f"{task}: {_text(new[task], fault)} of the answers after training {_verb(fault)}, {_text(old[task], fault)} "
        "before"
        for task in new
        if task in old
        for fault in FAULTS
        if is_more(fault, old[task], new[task])
    ]


def _verb(fault: str) -> str:
    return "are empty" if fault == "empty" else _MEANING[fault]


def _text(found: _Record | None, fault: str) -> str | None:
    if not found or not found["num_answers"]:
        return None
    return f"{found[fault] / found['num_answers']:.1%} ({found[fault]:,} of {found['num_answers']:,})"


def _faults(record: _Record | None) -> Mapping[str, Any]:
    """The counts by task; empty for a record without any, as older ones."""
    return (record or {}).get("answer_faults") or {}
