"""The evaluations in a report: scores before and after training and of later evaluations, samples, programs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunebook.record.differences import Answers, Difference, answers_of, is_share, standard_error, task_difference
from tunebook.record.page.numbers import MINUS, Unit, format_value
from tunebook.record.run_record import RunRecord

NUM_SAMPLES = 5
FINAL_MODEL = "model"  # how a record names a run's own final model
# How the chat templates of the recipes' models write a turn. Other prompts are shown unchanged.
_TURN_PATTERNS = (
    re.compile(r"<\|im_start\|>(?P<role>\w+)\n(?P<text>.*?)(?:<\|im_end\|>\n?|\Z)", re.DOTALL),
    re.compile(r"<\|start_header_id\|>(?P<role>\w+)<\|end_header_id\|>\n\n(?P<text>.*?)(?:<\|eot_id\|>|\Z)", re.DOTALL),
)
_Scores = Mapping[str, Mapping[str, Any]]  # of one evaluation, by task
_Column = Mapping[str, tuple[_Scores, Answers]]  # the evaluation of each task that a column of the table shows


@dataclass(frozen=True, kw_only=True)
class Score:
    """A score with its standard error."""

    value: float
    standard_error: float | None
    text: str
    num_items: int
    change: str  # from the first score of the row; empty in it, and if either is missing


@dataclass(frozen=True, kw_only=True)
class ScoreRow:
    """One line of a table: a task, or one group of its items, with a score per column."""

    name: str
    is_group: bool
    metric: str
    scores: list[Score | None]
    baseline: float | None  # drawn as a tick on the bar
    has_bar: bool  # only if every score is a share

    @property
    def num_items(self) -> str:
        """The number of answered items if it is the same in all columns, else that of each column."""
        numbers = [score.num_items for score in self.scores if score is not None]
        return " / ".join(f"{number:,}" for number in (numbers[:1] if len(set(numbers)) == 1 else numbers))


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One prompt, the expected answer, and the answers before and after training: text and whether it is right."""

    task: str
    turns: list[tuple[str, str]]  # role and text; one turn without a role if the prompt follows no known template
    expected: str
    before: tuple[str, bool | None] | None  # None in the pair: the metric does not judge single answers
    after: tuple[str, bool | None] | None


def score_rows(
    before: dict[str, Any] | None,
    after: dict[str, Any] | None,
    answers_before: Answers | None = None,
    answers_after: Answers | None = None,
) -> list[ScoreRow]:
    """Every task, each followed by its groups. The change is paired by item if both evaluations have answers."""
    old, new = (before or {}).get("tasks", {}), (after or {}).get("tasks", {})
    columns = [_column(old, answers_before or {}), _column(new, answers_after or {})]
    names = list(dict.fromkeys([*new, *old]))
    # A baseline does not name its task, so it is drawn only if there is a single one.
    baseline = (_baseline(before, after) or {}) if len(names) == 1 else {}
    rows = []
    for name in names:
        rows.append(_row(name, columns, baseline=baseline.get("value")))
        for group in dict.fromkeys(group for tasks in (new, old) for group in tasks.get(name, {}).get("groups") or {}):
            level = baseline.get("groups", {}).get(group, {}).get("value")
            rows.append(_row(name, columns, group, baseline=level))
    return rows


def _column(tasks: _Scores, answers: Answers) -> _Column:
    return dict.fromkeys(tasks, (tasks, answers))


def _row(name: str, columns: Sequence[_Column], group: str | None = None, *, baseline: float | None = None) -> ScoreRow:
    """The row of a task, or of a group of its items. Changes are from the first column."""
    sources = [column.get(name) for column in columns]
    found = [
        None
        if source is None
        else source[0][name]
        if group is None
        else (source[0][name].get("groups") or {}).get(group)
        for source in sources
    ]
    unit = unit_of(*filter(None, found), *(source[0][name] for source in sources if source is not None))
    scores: list[Score | None] = []
    for score, source in zip(found, sources, strict=True):
        if score is None or source is None:
            scores.append(None)
            continue
        change, first = "", sources[0]
        if scores and found[0] is not None and first is not None:
            change = change_text(task_difference(name, first[0], source[0], first[1], source[1], group), unit)
        text, error = score_text(score, unit), standard_error(score)
        scores.append(
            Score(value=score["value"], standard_error=error, text=text, num_items=score["num_items"], change=change)
        )
    metrics = dict.fromkeys(source[0][name]["metric"] for source in sources if source is not None)
    return ScoreRow(
        name=name if group is None else group,
        is_group=group is not None,
        metric=" / ".join(metrics),
        scores=scores,
        baseline=baseline if unit is Unit.share else None,
        has_bar=unit is Unit.share,
    )


def unit_of(*scores: Mapping[str, Any]) -> Unit:
    """Percent for shares of right answers; plain for other scores, such as a perplexity."""
    return Unit.share if is_share(*scores) else Unit.plain


def score_text(score: Mapping[str, Any], unit: Unit) -> str:
    """A score with its standard error."""
    error, text = standard_error(score), format_value(score["value"], unit)
    if error is None:
        return text
    return text + (f" ± {100 * error:.1f}" if unit is Unit.share else f" ± {format_value(error)}")


def change_text(difference: Difference, unit: Unit) -> str:
    """A difference with its sign and standard error; for shares in percentage points."""
    sign = "" if not difference.value else "+" if difference.value > 0 else MINUS
    value, error = abs(difference.value), difference.standard_error
    if unit is Unit.share:
        return f"{sign}{100 * value:.1f}" + ("" if error is None else f" ± {100 * error:.1f}") + " points"
    return f"{sign}{format_value(value)}" + ("" if error is None else f" ± {format_value(error)}")


def _baseline(before: dict[str, Any] | None, after: dict[str, Any] | None) -> dict[str, Any] | None:
    return (after or {}).get("baseline") or (before or {}).get("baseline")


def baseline_text(before: dict[str, Any] | None, after: dict[str, Any] | None) -> str | None:
    """The name and score of the baseline; None without one."""
    baseline = _baseline(before, after)
    return None if baseline is None else f"{baseline['name']}: {format_value(baseline['value'], unit_of(baseline))}"


def pair_samples(before: dict[str, Any] | None, after: dict[str, Any] | None) -> list[Sample]:
    """Five samples, in the order that the evaluation chose, with the answers to the same prompt before and after."""
    old, new = (
        {(sample["task"], sample["prompt"]): sample for sample in evaluation["samples"]} if evaluation else {}
        for evaluation in (before, after)
    )
    chosen = list((new or old).items())[:NUM_SAMPLES]
    return [_sample(sample, old.get(key), new.get(key)) for key, sample in chosen]


def _sample(shown: dict[str, Any], old: dict[str, Any] | None, new: dict[str, Any] | None) -> Sample:
    group = shown.get("group")
    before, after = (None if found is None else (str(found["answer"]), found["correct"]) for found in (old, new))
    return Sample(
        task=f"{shown['task']}: {group}" if group and group != shown["task"] else shown["task"],
        turns=split_turns(shown["prompt"]),
        expected=str(shown["expected"]),
        before=before,
        after=after,
    )


def split_turns(prompt: str) -> list[tuple[str, str]]:
    """A rendered prompt as (role, text) turns without the template's markers; unchanged for an unknown template."""
    for pattern in _TURN_PATTERNS:
        matches = list(pattern.finditer(prompt))
        # The pattern must cover the whole prompt, or something would be hidden from the reader.
        if matches and not pattern.sub("", prompt).replace("<|begin_of_text|>", "").strip():
            turns = [(match["role"], match["text"].strip("\n")) for match in matches]
            return turns[:-1] if len(turns) > 1 and not turns[-1][1] else turns
    return [("", prompt)]


def later_evaluations(record: RunRecord) -> list[tuple[str, str, list[ScoreRow]]]:
    """The evaluations by `tunebook eval`, the newest first: name, what was evaluated, a row per task."""
    found = []
    for evaluation in reversed(record.evaluations):
        limit = f", the first {evaluation['limit']} items" if evaluation.get("limit") else ""
        rows = [_row(name, [_column(evaluation["tasks"], {})]) for name in evaluation["tasks"]]
        found.append((evaluation["when"], evaluation["model"] + limit, rows))
    return found


def failed_tasks(record: RunRecord) -> list[str]:
    """Tasks of the evaluations before and after training that failed, and why."""
    return [
        f"{name}, {when} training: {why}"
        for when, evaluation in (("before", record.before), ("after", record.after))
        for name, why in ((evaluation or {}).get("failed") or {}).items()
    ]


def compare_scores(records: Sequence[RunRecord]) -> list[ScoreRow]:
    """Every task that any of the runs was evaluated on, a column per run. Changes are from the first run."""
    columns = [_column_of_run(record) for record in records]
    names = dict.fromkeys(name for column in columns for name in column)
    return [_row(name, columns) for name in names]


def _column_of_run(record: RunRecord) -> _Column:
    """Each task's score of the run's final model: after training, or from the newest later evaluation."""
    found: dict[str, tuple[_Scores, Answers]] = {}
    later = [evaluation for evaluation in record.evaluations if evaluation["model"] == FINAL_MODEL]
    for evaluation in (record.after, *reversed(later)):
        tasks = {} if evaluation is None else evaluation["tasks"]
        if any(name not in found for name in tasks):
            answers = answers_of(record.folder, evaluation)
            for name in tasks:
                found.setdefault(name, (tasks, answers))
    return found


def program_lines(before: dict[str, Any] | None, after: dict[str, Any] | None) -> list[str]:
    """How programs that the model wrote ended, one line per task, and how they were executed."""
    codes = {when: (found or {}).get("code") for when, found in (("before", before), ("after", after))}
    lines = []
    for when, code in codes.items():
        for name, task in (code or {"tasks": {}})["tasks"].items():
            counts = ", ".join(f"{num:,} {status.replace('_', ' ')}" for status, num in task["statuses"].items())
            lines.append(f"{name}, {when} training: {counts}; at most {task['time_limit_s']:g} s each")
    return [*lines, *dict.fromkeys(_execution(code["execution"]) for code in codes.values() if code)]


def _execution(execution: dict[str, Any]) -> str:
    where = "the sandbox service" if execution["backend"] == "service" else execution["backend"]
    return f"Executed in {where}, each with at most {execution['limits']['memory_bytes'] >> 20} MiB of memory"
