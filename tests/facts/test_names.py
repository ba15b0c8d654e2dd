"""Nobody but the facts asks for a strategy, an optimizer or a kernel by its name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tunebook

SOURCE = Path(tunebook.__file__).parent


@pytest.mark.parametrize(
    ("choices", "asking"),
    [
        ("Attention", {"config/schema.py", "facts/attention.py"}),  # the default
        ("OptimizerName", {"config/schema.py", "facts/optimizers.py"}),
        ("Strategy", {"config/frozen.py", "facts/strategies.py"}),  # the schema of each, and the default
    ],
)
def test_no_other_module_asks_by_a_name(choices: str, asking: set[str]) -> None:
    named = re.compile(rf"\b{choices}\.[a-z]")
    files = {
        file.relative_to(SOURCE).as_posix()
        for file in SOURCE.rglob("*.py")
        if named.search(file.read_text(encoding="utf-8"))
    }
    assert {name for name in files if choices != "Strategy" or not name.startswith("parallel/")} == asking
