"""What a run folder records about evaluation items that are in the training documents, and how it is reported.

`contamination.json` is written by `evaluate.contamination`, which also puts the scores on clean and on other items into
the record of each evaluation. `evaluation.contamination=refuse` allows no training on documents that hold items of its
evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunebook.config.choices import Contamination, Source
from tunebook.config.schema import RunConfig
from tunebook.errors import DataError, counted
from tunebook.files import read_json
from tunebook.record.differences import is_share, score_in_words

CONTAMINATION_FILE = "contamination.json"
CHECK = "contamination"  # names the check among a run's evaluations
NOT_COMPARED = "the training documents were not compared with the evaluation; the reason is above"
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


def is_checked_by_evaluation(config: RunConfig) -> bool:
    """Whether the evaluation before the training checks: it has imported the harness, which takes 2 to 8 seconds."""
    evaluation = config.evaluation
    is_asked = needs_check(config) and evaluation.contamination is Contamination.report
    return is_asked and bool(evaluation.tasks) and evaluation.before


def request_of(config: RunConfig) -> dict[str, Any]:
    """The items that the check before a training looks for."""
    evaluation = config.evaluation
    is_evaluated = evaluation.before or evaluation.after
    return {"tasks": list(evaluation.tasks) if is_evaluated else [], "limit": evaluation.limit}


def is_checked(run: Path, config: RunConfig) -> bool:
    """Whether an earlier attempt at this training has looked for the same items."""
    found = read_contamination(run)
    return found is not None and not found["not_checked"] and found["request"] == request_of(config)


def read_contamination(run: Path) -> dict[str, Any] | None:
    """The content of a run's file; None without one."""
    file = run / CONTAMINATION_FILE
    return dict(read_json(file)) if file.is_file() else None


def num_found(group: Mapping[str, Any]) -> int:
    """Items that are in the training documents, as a whole or in part; a passage alone does not count."""
    return int(group["num_exact"] + group["num_overlapping"])


def is_warning(group: Mapping[str, Any]) -> bool:
    """Whether so many items were found that the score says little about other items."""
    return num_found(group) >= max(1.0, WARNING_SHARE * int(group["num_items"]))


def describe_group(name: str, group: Mapping[str, Any]) -> str:
    """One line on a task or the validation part."""
    total, exact = group["num_items"], group["num_exact"]
    share = f" ({exact / total:.1%})" if exact else ""
    line = f"{name}: {exact:,} of {total:,} items{share} have their whole question in the training documents"
    if group["num_overlapping"]:
        line += f", {_count(group['num_overlapping'], total)} a part of it ({group['num_half']:,} at least half)"
    if group["num_shared_passage"]:
        line += f", {_count(group['num_shared_passage'], total)} only a passage"
    return line


def _count(number: int, total: int) -> str:
    return f"{number:,} ({number / total:.1%})"


def result_lines(groups: _Groups, not_checked: str | None) -> list[str]:
    """What the check found: a line for each group with items that were found, and one for all others."""
    if not_checked:
        return [f"warning: contamination: not checked: {not_checked}"]
    clean = [name for name, group in groups.items() if group["num_clean"] == group["num_items"]]
    lines = [
        f"{'warning: ' if is_warning(group) else ''}contamination: {describe_group(name, group)}"
        for name, group in groups.items()
        if name not in clean
    ]
    if clean:
        what = clean[0] if len(clean) == 1 else f"{len(clean)} tasks or parts"
        num_items = sum(groups[name]["num_items"] for name in clean)
        lines.append(f"contamination: {what}: none of {num_items:,} items is in the training documents")
    return lines


def contamination_of(evaluation: Mapping[str, Any] | None) -> _Groups:
    """Counts and scores by task of an evaluation's record; empty if it has none."""
    tasks: _Groups = ((evaluation or {}).get("contamination") or {}).get("tasks") or {}
    return tasks


def score_lines(evaluation: Mapping[str, Any] | None) -> list[str]:
    """The scores on clean and on other items, a line per task that has both."""
    lines = []
    for name, group in contamination_of(evaluation).items():
        whole = ((evaluation or {}).get("tasks") or {}).get(name)
        as_share = is_share(*group["scores"].values(), *([whole] if whole else []))
        parts = [
            f"{score_in_words(score, as_share=as_share)} on {counted(score['num_items'], 'item')} ({NAMES[kind]})"
            for kind, score in group["scores"].items()
        ]
        if parts:
            lines.append(f"{name}: {', '.join(parts)}")
    return lines


def refuse_contaminated(run: Path, config: RunConfig) -> None:
    """Refuse a training if this is asked for and items were found, or could not be looked for.

    One whole item is enough; of parts as many as for a warning, because a single run of 13 words may be a quotation.
    Raises: DataError.
    """
    if config.evaluation.contamination is not Contamination.refuse:
        return
    result = read_contamination(run)
    if result is None or result["not_checked"]:
        why = result["not_checked"] if result else "the check failed, and its message is above"
        raise DataError(
            f"evaluation.contamination=refuse, and the training documents could not be compared with the evaluation: "
            f"{why}. Train without the comparison: evaluation.contamination=disabled",
            problem_id="contamination-not-checked",
        )
    found = {name: group for name, group in result["groups"].items() if group["num_exact"] or is_warning(group)}
    if found:
        examples = [
            f"{one['document']} has item {one['item']}" for group in found.values() for one in group["examples"]
        ]
        raise DataError(
            f"evaluation.contamination=refuse, and the training documents hold items of the evaluation. "
            f"{'. '.join(describe_group(name, group) for name, group in found.items())}. For example: "
            f"{'; '.join(examples[:3])}. Take these documents out of the training data ({run / CONTAMINATION_FILE} "
            "numbers the items), or train with evaluation.contamination=report, which reports the scores on clean "
            "items too",
            problem_id="contaminated",
        )
