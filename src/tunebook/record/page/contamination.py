"""What a run's report says about items that are in the training documents, in addition to their counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunebook.record.contamination import KINDS, NAMES, contamination_of, score_lines
from tunebook.record.page.numbers import NO_VALUE
from tunebook.record.page.scores import score_text, unit_of
from tunebook.record.run_record import RunRecord

_WHOLE = "all"  # in place of the kind of items


def scores_by_kind(record: RunRecord) -> list[tuple[str, ...]]:
    """Each task's scores on the items of each kind: task, kind, number of items, score before and after training."""
    rows = []
    evaluations = (record.before, record.after)
    for task in dict.fromkeys(name for one in reversed(evaluations) for name in contamination_of(one)):
        before, after = (_by_kind(evaluation, task) for evaluation in evaluations)
        for kind in (_WHOLE, "clean", *KINDS):
            pair = [before.get(kind), after.get(kind)]
            if any(pair):
                unit = unit_of(*filter(None, pair), *(scores[_WHOLE] for scores in (before, after) if scores))
                texts = [score_text(score, unit) if score else NO_VALUE for score in pair]
                number = next(score["num_items"] for score in reversed(pair) if score)
                rows.append((task, NAMES.get(kind, kind), f"{number:,}", *texts))
    return rows


def _by_kind(evaluation: Mapping[str, Any] | None, task: str) -> Mapping[str, Mapping[str, Any]]:
    """The scores by kind, and the score on all items, of a task that has both."""
    scores = contamination_of(evaluation).get(task, {}).get("scores")
    whole = ((evaluation or {}).get("tasks") or {}).get(task)
    return {_WHOLE: whole, **scores} if scores and whole else {}


def contamination_notes(record: RunRecord) -> list[str]:
    """What was compared, and the scores of later evaluations, whose tasks may be others."""
    later = [f"{found['when']}: {line}" for found in reversed(record.evaluations) for line in score_lines(found)]
    return [*_notes(record.contamination), *later] if record.contamination is not None else []


def _notes(content: Mapping[str, Any]) -> list[str]:
    if content["not_checked"]:
        return [f"Not checked: {content['not_checked']}"]
    notes = [
        f"Looked for in {content['num_documents']:,} training documents. The whole question: all its fields are in one "
        "document. A part: 13 consecutive words. A passage: only the longest of several fields."
    ]
    groups: Mapping[str, Mapping[str, Any]] = content["groups"]
    return notes + [
        f"{name}: {group['num_items']:,} of {group['num_all']:,} documents were looked for."
        for name, group in groups.items()
        if group["num_all"] > group["num_items"]
    ]
