"""The section of a run's report on items that are in the training documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tunebook.record.contamination import KINDS, NAMES, contamination_of, is_warning, score_lines
from tunebook.record.page.numbers import NO_VALUE, Unit
from tunebook.record.page.scores import score_text
from tunebook.record.run_record import RunRecord

_WHOLE = "all"  # in place of the kind of items


@dataclass(frozen=True, kw_only=True)
class GroupRow:
    """The counts of one task, or of the validation part."""

    name: str
    num_items: str
    counts: list[str]  # of whole questions, parts and passages; then of clean items
    is_warning: bool


@dataclass(frozen=True, kw_only=True)
class KindScore:
    """A task's scores on the items of one kind."""

    task: str
    kind: str
    num_items: str
    before: str
    after: str


@dataclass(frozen=True, kw_only=True)
class Example:
    """One item that was found."""

    title: str
    text: str


@dataclass(frozen=True, kw_only=True)
class ContaminationView:
    """Everything that the section shows."""

    rows: list[GroupRow]
    scores: list[KindScore]
    examples: list[Example]
    notes: list[str]


def contamination_view(record: RunRecord) -> ContaminationView | None:
    """The section; None for a run that was not checked."""
    content = record.contamination
    if content is None:
        return None
    groups: Mapping[str, Mapping[str, Any]] = content["groups"]
    return ContaminationView(
        rows=[_row(name, group) for name, group in groups.items()],
        scores=_scores(record),
        examples=[example for name, group in groups.items() for example in _examples(name, group)],
        notes=[*_notes(content), *_later(record)],
    )


def _row(name: str, group: Mapping[str, Any]) -> GroupRow:
    total = group["num_items"]
    counts = [group[f"num_{kind}"] for kind in (*KINDS, "clean")]
    return GroupRow(
        name=name,
        num_items=f"{total:,}",
        counts=[f"{count:,} ({count / total:.1%})" if count else "0" for count in counts],
        is_warning=is_warning(group),
    )


def _scores(record: RunRecord) -> list[KindScore]:
    old, new = contamination_of(record.before), contamination_of(record.after)
    rows = []
    for task in dict.fromkeys([*new, *old]):
        before, after = (
            _with_whole(found.get(task, {}).get("scores"), whole, task)
            for found, whole in ((old, record.before), (new, record.after))
        )
        for kind in (_WHOLE, "clean", *KINDS):
            pair = [scores.get(kind) for scores in (before, after)]
            if any(pair):
                texts = [score_text(score, _unit(score)) if score else NO_VALUE for score in pair]
                number = next(score["num_items"] for score in reversed(pair) if score)
                rows.append(
                    KindScore(
                        task=task, kind=NAMES.get(kind, kind), num_items=f"{number:,}", before=texts[0], after=texts[1]
                    )
                )
    return rows


def _with_whole(
    scores: Mapping[str, Any] | None, evaluation: Mapping[str, Any] | None, task: str
) -> Mapping[str, Mapping[str, Any]]:
    """Add the score on all items, for a task that has others too."""
    whole = ((evaluation or {}).get("tasks") or {}).get(task)
    return {_WHOLE: whole, **scores} if scores and whole else {}


def _unit(score: Mapping[str, Any]) -> Unit:
    return Unit.share if 0 <= score["value"] <= 1 else Unit.plain


def _examples(name: str, group: Mapping[str, Any]) -> list[Example]:
    return [
        Example(
            title=f"{name}, item {one['item']}: {NAMES[one['kind']]} in {one['document']}{_share(one['share'])}",
            text=one["text"],
        )
        for one in group["examples"]
    ]


def _share(share: float | None) -> str:
    return "" if share is None else f", {share:.0%} of its runs of 13 words"


def _notes(content: Mapping[str, Any]) -> list[str]:
    if content.get("not_checked"):
        return [f"Not checked: {content['not_checked']}"]
    notes = [
        f"Looked for in {content['num_documents']:,} training documents. The whole question: all its fields are in one "
        "document. A part: 13 consecutive words. A passage: only the longest of several fields."
    ]
    groups: Mapping[str, Mapping[str, Any]] = content["groups"]
    for name, group in groups.items():
        if group["num_overlapping"]:
            notes.append(
                f"{name}: of the items found in part, {group['num_half']:,} with at least half of their runs of 13 "
                f"words; on average {group['mean_share']:.0%}."
            )
        if group["num_short"]:
            notes.append(
                f"{name}: {group['num_short']:,} items have fewer than 8 words and count only if a document has the "
                "same question and answer."
            )
        if group["num_all"] > group["num_items"]:
            notes.append(f"{name}: {group['num_items']:,} of {group['num_all']:,} documents were looked for.")
    return notes


def _later(record: RunRecord) -> list[str]:
    """The scores of later evaluations, whose tasks may be others."""
    return [f"{found['when']}: {line}" for found in reversed(record.evaluations) for line in score_lines(found)]
