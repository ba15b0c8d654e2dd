"""The evaluation part of a report: scores before and after with their standard errors, and five sample answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tunebook.record.differences import Answers, Difference, standard_error, task_difference
from tunebook.record.page.numbers import MINUS, Unit, format_value

NUM_SAMPLES = 5
# How the chat templates of the recipes' models write a turn; other prompts are shown as they are.
_TURN_PATTERNS = (
    re.compile(r"<\|im_start\|>(?P<role>\w+)\n(?P<text>.*?)(?:<\|im_end\|>\n?|\Z)", re.DOTALL),
    re.compile(r"<\|start_header_id\|>(?P<role>\w+)<\|end_header_id\|>\n\n(?P<text>.*?)(?:<\|eot_id\|>|\Z)", re.DOTALL),
)


@dataclass(frozen=True, kw_only=True)
class Score:
    """A score with its standard error."""

    value: float
    standard_error: float | None
    text: str


@dataclass(frozen=True, kw_only=True)
class ScoreRow:
    """One line of the table: a task, or one group of its items."""

    name: str
    is_group: bool
    metric: str
    before: Score | None
    after: Score | None
    change: str
    num_items: int
    baseline: float | None  # drawn as a tick on the bar
    has_bar: bool  # only where every score is a share


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a model said to a sample's prompt."""

    text: str
    is_right: bool | None  # None: the metric does not judge single answers


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One prompt with what was expected and what was answered before and after."""

    task: str
    turns: list[tuple[str, str]]  # role and text; one turn without a role where the prompt follows no known template
    expected: str
    before: Answer | None
    after: Answer | None


def score_rows(
    before: dict[str, Any] | None,
    after: dict[str, Any] | None,
    answers_before: Answers | None = None,
    answers_after: Answers | None = None,
) -> list[ScoreRow]:
    """Every task with its groups below it, from either or both evaluations; with both answers, their paired change."""
    tasks_before = before["tasks"] if before else {}
    tasks_after = after["tasks"] if after else {}
    names = list(dict.fromkeys([*tasks_after, *tasks_before]))
    # A baseline does not say which of several tasks it is for, so it is drawn only beside a single one.
    baseline = (_baseline(before, after) or {}) if len(names) == 1 else {}
    answers = (answers_before or {}, answers_after or {})
    rows = []
    for name in names:
        old, new = tasks_before.get(name), tasks_after.get(name)
        metric = (new or old or {})["metric"]
        change = _change(name, tasks_before, tasks_after, answers)
        rows.append(_row(name, old, new, metric, baseline.get("value"), change, is_group=False))
        groups_old, groups_new = (old or {}).get("groups") or {}, (new or {}).get("groups") or {}
        for group in dict.fromkeys([*groups_new, *groups_old]):
            level = baseline.get("groups", {}).get(group, {}).get("value")
            change = _change(name, tasks_before, tasks_after, answers, group)
            rows.append(_row(group, groups_old.get(group), groups_new.get(group), metric, level, change, is_group=True))
    return rows


def baseline_text(before: dict[str, Any] | None, after: dict[str, Any] | None) -> str | None:
    """The baseline that was scored beside the model, in words; None where there was none."""
    baseline = _baseline(before, after)
    if baseline is None:
        return None
    value = baseline["value"]
    return f"{baseline['name']}: {format_value(value, Unit.share if 0 <= value <= 1 else Unit.plain)}"


def pair_samples(before: dict[str, Any] | None, after: dict[str, Any] | None) -> list[Sample]:
    """Five samples, in the order the evaluation chose them, with the answers before and after to the same prompt."""
    answers_before = {_key(sample): sample for sample in before["samples"]} if before else {}
    answers_after = {_key(sample): sample for sample in after["samples"]} if after else {}
    chosen = list((answers_after or answers_before).items())[:NUM_SAMPLES]
    return [_sample(sample, answers_before.get(key), answers_after.get(key)) for key, sample in chosen]


def split_turns(prompt: str) -> list[tuple[str, str]]:
    """A rendered prompt as (role, text) turns without the template's marks; whole where no template is recognised."""
    for pattern in _TURN_PATTERNS:
        matches = list(pattern.finditer(prompt))
        # All of the prompt must be explained by the pattern, or something would be hidden from the reader.
        if matches and not pattern.sub("", prompt).replace("<|begin_of_text|>", "").strip():
            turns = [(match["role"], match["text"].strip("\n")) for match in matches]
            return turns[:-1] if len(turns) > 1 and not turns[-1][1] else turns
    return [("", prompt)]


def _row(
    name: str,
    old: dict[str, Any] | None,
    new: dict[str, Any] | None,
    metric: str,
    baseline: float | None,
    change: str,
    *,
    is_group: bool,
) -> ScoreRow:
    scores = [score for score in (old, new) if score]
    is_share = is_share_of_items(*scores)
    unit = Unit.share if is_share else Unit.plain
    return ScoreRow(
        name=name,
        is_group=is_group,
        metric=metric.replace("_", " "),
        before=_score(old, unit),
        after=_score(new, unit),
        change=change,
        num_items=scores[-1]["num_items"],
        baseline=baseline if is_share else None,
        has_bar=is_share,
    )


def is_share_of_items(*scores: Mapping[str, Any]) -> bool:
    """Whether scores are shares of right answers, written in percent; a perplexity is not."""
    return all(0 <= score["value"] <= 1 for score in scores)


def score_text(score: Mapping[str, Any], unit: Unit) -> str:
    """A score with its standard error."""
    error = standard_error(score)
    text = format_value(score["value"], unit)
    if error is None:
        return text
    return text + (f" ± {100 * error:.1f}" if unit is Unit.share else f" ± {format_value(error)}")


def change_text(difference: Difference, unit: Unit) -> str:
    """A difference with its sign and its standard error: in points of percent for shares."""
    sign = "" if not difference.value else "+" if difference.value > 0 else MINUS
    value, error = abs(difference.value), difference.standard_error
    if unit is Unit.share:
        return f"{sign}{100 * value:.1f}" + ("" if error is None else f" ± {100 * error:.1f}") + " points"
    return f"{sign}{format_value(value)}" + ("" if error is None else f" ± {format_value(error)}")


def _change(
    name: str, old: dict[str, Any], new: dict[str, Any], answers: tuple[Answers, Answers], group: str | None = None
) -> str:
    """The change of a task, or of a group of its items; empty where either evaluation does not have it."""
    scores = [(tasks.get(name) or {}) for tasks in (old, new)]
    if group is not None:
        scores = [(score.get("groups") or {}).get(group) or {} for score in scores]
    if not all(scores):
        return ""
    unit = Unit.share if is_share_of_items(*scores) else Unit.plain
    return change_text(task_difference(name, old, new, *answers, group), unit)


def _score(found: dict[str, Any] | None, unit: Unit) -> Score | None:
    if found is None:
        return None
    return Score(value=found["value"], standard_error=standard_error(found), text=score_text(found, unit))


def _baseline(before: dict[str, Any] | None, after: dict[str, Any] | None) -> dict[str, Any] | None:
    return (after or {}).get("baseline") or (before or {}).get("baseline")


def _key(sample: dict[str, Any]) -> tuple[str, str]:
    return sample["task"], sample["prompt"]


def _sample(shown: dict[str, Any], old: dict[str, Any] | None, new: dict[str, Any] | None) -> Sample:
    group = shown.get("group")
    return Sample(
        task=f"{shown['task']}: {group}" if group and group != shown["task"] else shown["task"],
        turns=split_turns(shown["prompt"]),
        expected=str(shown["expected"]),
        before=None if old is None else Answer(text=str(old["answer"]), is_right=old["correct"]),
        after=None if new is None else Answer(text=str(new["answer"]), is_right=new["correct"]),
    )
