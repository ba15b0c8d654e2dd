"""Shares of generated answers that show a damaged model, before and after training: empty, repeating, or endless.

An answer repeats itself if it ends with one text at least four times, over 64 characters or more. It has no end if it
has nearly as many tokens as the limit of new tokens allows: special tokens are not in its text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tunebook.data.conversation import REASONING_ENDS

FAULTS = {
    "empty": "are empty",
    "looping": "repeat themselves to the end",
    "endless": "reached the limit of new tokens",
}
WARNING_MARGIN = 0.05  # by which the share after training is above the share before
_REPEATS, _SHORTEST_LOOP = 4, 64  # times, characters
_NEARLY = 0.9  # of the limit of new tokens
_SEARCHED = 4000  # last characters of an answer
_EXCERPT = 200  # last characters of an example
_Record = Mapping[str, Any]  # of an evaluation


def find_faults(text: str, *, is_cut: bool) -> set[str]:
    """Return the faults of one answer. `is_cut`: it reached the limit of new tokens."""
    faults = {
        "empty": not REASONING_ENDS.split(text)[-1].strip(),
        "looping": _is_looping(text.rstrip()[-_SEARCHED:]),
        "endless": is_cut,
    }
    return {fault for fault, is_present in faults.items() if is_present}


def _is_looping(tail: str) -> bool:
    for period in range(1, len(tail) // _REPEATS + 1):
        loop = tail[-period:] * max(_REPEATS, -(-_SHORTEST_LOOP // period))
        if tail.endswith(loop) and any(map(str.isalpha, loop)):  # numbers may be a table
            return True
    return False


def count_faults(answers: Mapping[str, Iterable[Any]], count_tokens: Callable[[str], int]) -> dict[str, dict[str, Any]]:
    """Count the faults of each task that generates text: `{task: {num_answers, empty, ..., examples}}`.

    `answers` are `evaluate.results.Answer`.
    """
    counted: dict[str, dict[str, Any]] = {}
    for task, task_answers in answers.items():
        for answer in task_answers:
            for text in answer.responses if answer.max_new_tokens is not None else ():
                counts = counted.setdefault(task, {"num_answers": 0, **dict.fromkeys(FAULTS, 0), "examples": {}})
                counts["num_answers"] += 1
                is_cut = count_tokens(text) >= _NEARLY * answer.max_new_tokens
                for fault in find_faults(text, is_cut=is_cut):
                    counts[fault] += 1
                    counts["examples"].setdefault(fault, {"item": answer.item, "end": text[-_EXCERPT:]})
    return counted


def fault_rows(before: _Record | None, after: _Record | None) -> list[dict[str, Any]]:
    """A row of the report for each fault of each task that was found before or after training."""
    old, new = ((record or {}).get("answer_faults") or {} for record in (before, after))
    rows = []
    for task in dict.fromkeys([*new, *old]):
        pair = {when: record[task] for when, record in (("after", new), ("before", old)) if task in record}
        for fault, meaning in FAULTS.items():
            examples = {when: counts["examples"][fault]["end"] for when, counts in pair.items() if counts[fault]}
            if examples:
                shares = {when: counts[fault] / counts["num_answers"] for when, counts in pair.items()}
                row: dict[str, Any] = {"task": task, "fault": meaning, "before": None, "after": None}
                row["example_when"], row["example"] = next(iter(examples.items()))
                for when, counts in pair.items():
                    row[when] = f"{shares[when]:.1%} ({counts[fault]:,} of {counts['num_answers']:,})"
                row["is_warning"] = len(pair) == 2 and shares["after"] - shares["before"] > WARNING_MARGIN
                rows.append(row)
    return rows


def fault_warnings(before: _Record | None, after: _Record | None) -> list[str]:
    """A line for each fault that is more frequent after training."""
    return [
        f"{row['task']}: {row['after']} of the answers after training {row['fault']}, {row['before']} before"
        for row in fault_rows(before, after)
        if row["is_warning"]
    ]
