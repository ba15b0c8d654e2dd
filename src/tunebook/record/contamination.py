"""Evaluation items in the training documents: `contamination.json` and its text.

The file is written by `evaluate.contamination`, which also records each evaluation's scores on clean and other items.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunebook.config.choices import Contamination, Source
from tunebook.config.schema import RunConfig
from tunebook.errors import counted
from tunebook.files import read_json
from tunebook.record.scores import score_text, unit_of

CONTAMINATION_FILE = "contamination.json"
CHECK = "contamination"  # names the check among a run's evaluations
KINDS = ("exact", "overlapping", "shared_passage")  # of items that are not clean, the worst first
WARNING_SHARE = 0.01  # of a group's items that are exact or overlapping
NAMES = {
    "clean": "clean",
    "exact": "whole question found",
    "overlapping": "part found",
    "shared_passage": "passage found",
}
_Groups = Mapping[str, Mapping[str, Any]]  # counts by task, and of the validation part


def needs_check(config: RunConfig) -> bool:
    """Whether a training has documents, and items to look for in them. Generated documents are random tokens."""
    evaluation, data = config.evaluation, config.dataset
    has_items = request_of(config)["tasks"] or data.validation_share or data.validation_path or data.validation_split
    is_text = data.source is not Source.synthetic
    return is_text and evaluation.contamination is not Contamination.disabled and bool(has_items)


def request_of(config: RunConfig) -> dict[str, Any]:
    """The items that the check before a training looks for."""
    evaluation = config.evaluation
    is_evaluated = evaluation.before or evaluation.after
    return {"tasks": list(evaluation.tasks) if is_evaluated else [], "limit": evaluation.limit}


def is_checked(run: Path, config: RunConfig) -> bool:
    """Whether an earlier attempt at this training has looked for the same items."""
    result = read_contamination(run)
    return result is not None and not result["not_checked"] and result["request"] == request_of(config)


def read_contamination(run: Path) -> dict[str, Any] | None:
    """The content of a run's file; None without one."""
    file = run / CONTAMINATION_FILE
    return dict(read_json(file)) if file.is_file() else None


def is_warning(group: Mapping[str, Any]) -> bool:
    """Whether so many items were found that the score says little about other items."""
    return bool(group["num_exact"] + group["num_overlapping"] >= max(1.0, WARNING_SHARE * group["num_items"]))


def result_lines(groups: _Groups, not_checked: str | None) -> list[str]:
    """A line for each task or validation part with items that were found."""
    if not_checked:
        return [f"warning: contamination: not checked: {not_checked}"]
    return [
        f"{'warning: ' if is_warning(group) else ''}contamination: {name}: of {counted(group['num_items'], 'item')}, "
        + ", ".join(f"{group[f'num_{kind}']:,} {NAMES[kind]}" for kind in (*KINDS, "clean"))
        for name, group in groups.items()
        if group["num_clean"] < group["num_items"]
    ] or ["contamination: no item is in the training documents"]


def contamination_of(evaluation: Mapping[str, Any] | None) -> _Groups:
    """Counts and scores by task of an evaluation's record; empty if it has none."""
    tasks: _Groups = ((evaluation or {}).get("contamination") or {}).get("tasks") or {}
    return tasks


def score_lines(evaluation: Mapping[str, Any] | None) -> list[str]:
    """The scores on clean and on other items, a line per task that has both."""
    lines = []
    for name, group in contamination_of(evaluation).items():
        whole = ((evaluation or {}).get("tasks") or {}).get(name)
        unit = unit_of(*group["scores"].values(), *([whole] if whole else []))
        parts = [
            f"{score_text(score, unit)} on {counted(score['num_items'], 'item')} ({NAMES[kind]})"
            for kind, score in group["scores"].items()
        ]
        lines += [f"{name}: {', '.join(parts)}"] if parts else []
    return lines
