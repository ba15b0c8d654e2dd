"""`evaluation.contamination=refuse`: no training on documents that hold items of its evaluation."""

from __future__ import annotations

from pathlib import Path

from tunebook.config.choices import Contamination
from tunebook.config.schema import RunConfig
from tunebook.errors import DataError
from tunebook.record.contamination import CONTAMINATION_FILE, describe_group, is_refused, read_contamination


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
