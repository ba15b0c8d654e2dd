"""What a run folder records about items that are in the training documents, in words for terminal and report.

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
from tunebook.record.manifest import manifest_or_empty

CONTAMINATION_FILE = "contamination.json"
FORMAT = 1  # increment it when the method or a key changes, so that nothing older is reused
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
_COUNTS = ("num_items", "num_clean", *(f"num_{kind}" for kind in KINDS))


def needs_check(config: RunConfig) -> bool:
    """Whether a training has documents, and items to look for in them. Generated documents are random tokens."""
    evaluation = config.evaluation
    is_evaluated = bool(evaluation.tasks) and (evaluation.before or evaluation.after)
    is_text = config.dataset.source is not Source.synthetic
    return (
        is_text and evaluation.contamination is not Contamination.disabled and (is_evaluated or has_validation(config))
    )


def is_checked_by_evaluation(config: RunConfig) -> bool:
    """Whether the evaluation before the training checks: it has imported the harness, which takes 2 to 8 seconds."""
    evaluation = config.evaluation
    is_asked = needs_check(config) and evaluation.contamination is Contamination.report
    return is_asked and bool(evaluation.tasks) and evaluation.before


def has_validation(config: RunConfig) -> bool:
    """Whether the documents have a validation part."""
    data = config.dataset
    return bool(data.validation_share or data.validation_path or data.validation_split)


def request_of(run: Path, config: RunConfig) -> dict[str, Any]:
    """What the check before a training depends on; an equal request needs no second check."""
    evaluation = config.evaluation
    return {
        "fingerprint": dataset_of(run).get("fingerprint"),
        "tasks": list(evaluation.tasks) if evaluation.before or evaluation.after else [],
        "limit": evaluation.limit,
        "has_validation": has_validation(config),
    }


def is_checked(run: Path, config: RunConfig) -> bool:
    """Whether an earlier attempt at this training has checked the same."""
    found = read_contamination(run)
    return found is not None and not found["not_checked"] and found["request"] == request_of(run, config)


def dataset_of(run: Path) -> Mapping[str, Any]:
    """The manifest's section on the training documents; empty without a manifest."""
    return manifest_or_empty(run).get("dataset") or {}


def read_contamination(run: Path) -> dict[str, Any] | None:
    """The file of a run; None without one, and for one of another format.

    Raises: DataError if it is not as Tunebook writes it.
    """
    file = run / CONTAMINATION_FILE
    if not file.is_file():
        return None
    content: Any = read_json(file)
    if isinstance(content, dict) and content.get("format", FORMAT) != FORMAT:
        return None
    groups = content.get("groups") if isinstance(content, dict) else None
    if not isinstance(groups, dict) or not all(_has_counts(group) for group in groups.values()):
        raise DataError(
            f"{file}: it is not as Tunebook writes it, so something else changed it; restore it from a copy, or remove "
            "it to continue without it",
            problem_id="broken-record",
        )
    return dict(content)


def _has_counts(group: Any) -> bool:
    return isinstance(group, dict) and all(isinstance(group.get(key), int) for key in _COUNTS)


def num_found(group: Mapping[str, Any]) -> int:
    """Items that are in the training documents, as a whole or in part; a passage alone does not count."""
    return int(group["num_exact"] + group["num_overlapping"])


def is_warning(group: Mapping[str, Any]) -> bool:
    """Whether so many items were found that the score says little about other items."""
    return num_found(group) >= max(1.0, WARNING_SHARE * int(group["num_items"]))


def is_refused(group: Mapping[str, Any]) -> bool:
    """Whether `evaluation.contamination=refuse` refuses a training: any whole item, or as many parts as for a warning.

    A single run of 13 words may be a quotation.
    """
    return bool(group["num_exact"]) or is_warning(group)


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


def result_lines(groups: _Groups, not_checked: str | None) -> list[tuple[str, bool]]:
    """What the check found, a line per group with any overlap, and whether each line is a warning."""
    if not_checked:
        return [(f"not checked: {not_checked}", True)]
    found = {name: group for name, group in groups.items() if group["num_clean"] < group["num_items"]}
    lines = [(describe_group(name, group), is_warning(group)) for name, group in found.items()]
    num_items = sum(group["num_items"] for name, group in groups.items() if name not in found)
    if clean := [name for name in groups if name not in found]:
        what = f"{len(clean)} tasks or parts" if len(clean) > 1 else clean[0]
        lines.append((f"{what}: none of {num_items:,} items is in the training documents", False))
    return lines


def contamination_of(evaluation: Mapping[str, Any] | None) -> _Groups:
    """Counts and scores by task of an evaluation's record; empty if it has none, as older ones."""
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
    """Raises: DataError if this is asked for and items were found, or could not be looked for."""
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
    found = [describe_group(name, group) for name, group in result["groups"].items() if is_refused(group)]
    if found:
        examples = [one for group in result["groups"].values() for one in group["examples"]]
        first = "; ".join(f"{one['document']} has item {one['item']}" for one in examples[:3])
        raise DataError(
            f"evaluation.contamination=refuse, and the training documents hold items of the evaluation. "
            f"{'. '.join(found)}. For example: {first}. Take these documents out of the training data ("
            f"{run / CONTAMINATION_FILE} numbers the items), or train with evaluation.contamination=report, which "
            "reports the scores on clean items too",
            problem_id="contaminated",
        )
