"""The recorded behaviour in this folder: what the project does today, to be compared and not to be explained.

`check` compares what a test found with a file of this folder, or writes the file under `python -m tests.golden`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

HERE = Path(__file__).parent
WRITE = "GOLDEN_WRITE"  # the environment variable under which files are written
MOST_KEYS_OF_A_LINE = 4
# Keys below which names depend on the machine, or are recorded elsewhere: settings in runs.yaml, files in a list.
OPEN = ("packages", "variables", "differences", "gpus", "files", "model_files", "files_sha256", "settings", "config",
        "scores")  # fmt: skip


class _Dumper(yaml.SafeDumper):
    """Texts of several lines and mappings of many keys as blocks, so that a change is a line of a diff."""


def _mapping(dumper: yaml.SafeDumper, value: dict[str, Any]) -> yaml.MappingNode:
    node = dumper.represent_dict(value)
    node.flow_style = node.flow_style and len(value) <= MOST_KEYS_OF_A_LINE
    return node


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(dict, _mapping)
_Dumper.add_representer(str, _text)


def read(name: str) -> Any:
    """The content of a recorded file."""
    return yaml.load((HERE / f"{name}.yaml").read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)


def check(
    name: str, found: dict[str, Any], tolerance: Callable[[str], float] = lambda _: 0.0, *, is_part: bool = False
) -> None:
    """Compare with a recorded file. `tolerance` is the relative one of the numbers at a path such as `a/b`.

    `is_part`: compare only the keys that were found, and write nothing.
    """
    if os.environ.get(WRITE) and is_part:
        return
    if os.environ.get(WRITE):
        file = HERE / f"{name}.yaml"
        head = "".join(line for line in _lines(file) if line.startswith("#"))
        text = yaml.dump(found, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6,
                         default_flow_style=None)  # fmt: skip
        file.write_text(head + text, encoding="utf-8")
        return
    recorded = read(name)
    if is_part:
        recorded = {key: recorded[key] for key in found}
    different = list(_differences(recorded, found, tolerance))
    assert not different, "\n".join([f"not as recorded in tests/golden/{name}.yaml:", *different])


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []


def _differences(recorded: Any, found: Any, tolerance: Callable[[str], float], path: str = "") -> list[str]:
    if isinstance(recorded, dict) and isinstance(found, dict):
        lines = []
        for key in recorded | found:
            pair = (part.get(key, "(absent)") for part in (recorded, found))
            lines += _differences(*pair, tolerance, f"{path}/{key}" if path else str(key))
        return lines
    relative = tolerance(path)
    if recorded == found or (relative and found == pytest.approx(recorded, rel=relative)):
        return []
    return [f"{path}: {recorded!r} was recorded, {found!r} found"]


def key_paths(content: Any, path: str = "") -> set[str]:
    """The dotted keys of nested objects; `[]` stands for each item of a list, and OPEN for whatever is below a key."""
    if isinstance(content, dict) and content and path.rpartition(".")[2] not in OPEN:
        return {found for key, value in content.items() for found in key_paths(value, f"{path}.{key}" if path else key)}
    if isinstance(content, list) and any(isinstance(item, dict) for item in content):
        return {found for item in content for found in key_paths(item, f"{path}[]")}
    return {path}
