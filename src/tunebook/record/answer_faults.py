"""Shares of generated answers that show a damaged model, before and after training: empty, repeating, or endless.

An answer repeats itself if it ends with one text at least four times, over 64 characters or more. It has no end if the
limit of new tokens cut it off.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from tunebook.data.conversation import REASONING_ENDS

FAULTS = {
    "empty": "are empty",
    "looping": "repeat themselves to the end",
    "endless": "reached the limit of new tokens",
}
WARNING_MARGIN = 0.05  # by which the share after training is above the share before ...
_ERRORS = 2.0  # ... and by how many standard errors of that difference: 1 of 10 answers says nothing
_REPEATS, _SHORTEST_LOOP = 4, 64  # times, characters
_SEARCHED = 4000  # last characters of an answer
_EXCERPT = 200  # last characters of an example
_Record = Mapping[str, Any]  # of an evaluation


def find_faults(text: str, *, is_cut: bool) -> set[str]:
    """Return the faults of one answer. `is_cut`: the limit of new tokens cut it off."""
    without_thoughts = REASONING_ENDS.split(text)[-1]
    faults = {"empty": not without_thoughts.strip(), "looping": _is_looping(text), "endless": is_cut}
    return {fault for fault, is_found in faults.items() if is_found}


def _is_looping(text: str) -> bool:
    tail = text.rstrip()[-_SEARCHED:]
    for period in range(1, len(tail) // _REPEATS + 1):
        times = max(_REPEATS, -(-_SHORTEST_LOOP // period))
        repeated = tail[-period:]
        if tail[-times * period :] == repeated * times and any(map(str.isalpha, repeated)):  # numbers may be a table
            return True
    return False


def count_faults(answers: Mapping[str, Iterable[Any]]) -> dict[str, dict[str, Any]]:
    """Count the faults of each task that generates text: `{task: {num_answers, num_faulty, empty, ..., examples}}`.

    `answers` are `evaluate.results.Answer`.
    """
    counted: dict[str, dict[str, Any]] = {}
    for task, found in answers.items():
        for answer in found:
            texts = [one for one in answer.responses if isinstance(one, str)]
            for number, text in enumerate(texts):
                counts = counted.setdefault(
                    task, {"num_answers": 0, "num_faulty": 0, **dict.fromkeys(FAULTS, 0), "examples": {}}
                )
                faults = find_faults(text, is_cut=answer.is_cut[number : number + 1] == [True])
                counts["num_answers"] += 1
                counts["num_faulty"] += bool(faults)
                for fault in faults:
                    counts[fault] += 1
                    counts["examples"].setdefault(fault, {"item": answer.item, "end": text[-_EXCERPT:]})
    return counted


def fault_rows(before: _Record | None, after: _Record | None) -> list[dict[str, Any]]:
    """A row of the report for each fault of each task that was found before or after training."""
    old, new = _faults(before), _faults(after)
    rows = []
    for task in dict.fromkeys([*new, *old]):
        pair = {"after": new.get(task), "before": old.get(task)}
        for fault, meaning in FAULTS.items():
            examples = {when: counts["examples"][fault] for when, counts in pair.items() if counts and counts[fault]}
            if examples:
                when, example = next(iter(examples.items()))
                row = {"task": task, "fault": meaning, "example": example["end"], "example_when": when}
                row |= {when: _text(counts, fault) for when, counts in pair.items()}
                rows.append(row | {"is_warning": _is_more(fault, pair["before"], pair["after"])})
    return rows


def fault_warnings(before: _Record | None, after: _Record | None) -> list[str]:
    """A line for each fault that is more frequent after training."""
    old, new = _faults(before), _faults(after)
    return [
        f"{task}: {_text(new[task], fault)} of the answers after training {meaning}, {_text(old[task], fault)} before"
        for task in new
        for fault, meaning in FAULTS.items()
        if _is_more(fault, old.get(task), new[task])
    ]


def _is_more(fault: str, before: _Record | None, after: _Record | None) -> bool:
    """Whether the share of a fault is above that before training by the margin, and by more than chance."""
    if before is None or after is None:
        return False
    counts = [found["num_answers"] for found in (before, after)]
    shares = [found[fault] / found["num_answers"] for found in (before, after)]
    error = math.sqrt(sum(share * (1 - share) / count for share, count in zip(shares, counts, strict=True)))
    return bool(shares[1] - shares[0] > max(WARNING_MARGIN, _ERRORS * error))


def _text(found: _Record | None, fault: str) -> str | None:
    if found is None:
        return None
    return f"{found[fault] / found['num_answers']:.1%} ({found[fault]:,} of {found['num_answers']:,})"


def _faults(record: _Record | None) -> Mapping[str, Any]:
    """The counts by task; empty without an evaluation."""
    return (record or {}).get("answer_faults") or {}
