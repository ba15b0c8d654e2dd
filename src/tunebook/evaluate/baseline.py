"""A task's baseline: what the same items score without any model, by a function that ships beside the task.

Contract: the Python file named by the task's `metadata.baseline` defines `NAME`, a short text, and
`score(train_file: Path, heldout_file: Path) -> dict[str, float]`: the share of held-out items answered correctly, under
`overall` and under each group. Only the file that the task names is imported: the book's own, or one that the user
wrote and named.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tunebook.errors import RequestError

OVERALL = "overall"


def score_baseline(file: Path, train_file: Path, heldout_file: Path) -> dict[str, Any]:
    """`{name, value, groups: {group: {value}}}`. Raises: RequestError when the file breaks the contract."""
    module = _import_file(file)
    if not callable(getattr(module, "score", None)) or not isinstance(getattr(module, "NAME", None), str):
        raise RequestError(
            f"{file} is named as a task's baseline, but does not define NAME and score(train_file, heldout_file)",
            problem_id="task-file",
        )
    scores: dict[str, float] = dict(module.score(train_file, heldout_file))
    if OVERALL not in scores:
        raise RequestError(
            f"{file}: score(train_file, heldout_file) must return a share under '{OVERALL}'; it returned "
            f"{', '.join(scores) or 'nothing'}",
            problem_id="task-file",
        )
    overall = float(scores.pop(OVERALL))
    groups = {group: {"value": float(value)} for group, value in sorted(scores.items())}
    return {"name": module.NAME, "value": overall, "groups": groups}


def _import_file(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tunebook_baseline_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))  # it may import its neighbours, such as the generator of the data
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(file.parent))
    return module
