"""`tunebook diff`: which settings and records of two runs differ, and the comparison of their results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tunebook.config.identity import flat_differences
from tunebook.evidence.compare import Difference, claim_of_run, compare
from tunebook.evidence.gather import read_facts
from tunebook.record.run_folder import resolve_run
from tunebook.terminal import print_text

# Keys of the manifest, with all keys below them, that differ between any two runs.
_UNIQUE_KEYS = tuple(f"{key}." for key in (
    "status.started", "status.ended", "status.seconds", "command", "config_sha256", "start_up", "files_sha256",
    "model_files.training_args.bin",  # which names the run folder
))  # fmt: skip
_HISTOGRAM = ".lengths."  # in the counts of a data set: long lists


def diff_command(runs: tuple[str, str], outputs: Path, console: Console, *, as_json: bool = False) -> int:
    """Print the differences of two runs. Raises: RequestError if one is not a run."""
    folders = [resolve_run(run, outputs) for run in runs]
    one, other = (read_facts(folder) for folder in folders)
    configs, manifests = (
        flat_differences(first, second, absent=lambda key: "not set")
        for first, second in ((one.record.config, other.record.config), (one.manifest, other.manifest))
    )
    settings = {
        "config": configs,
        "manifest": [
            difference
            for difference in manifests
            if not f"{difference[0]}.".startswith(_UNIQUE_KEYS) and _HISTOGRAM not in difference[0]
        ],
    }
    unmeasured = [run for run in (one, other) if not any(loss is not None for _, loss in run.record.scheduled_losses())]
    results = None if unmeasured else compare(claim_of_run(one), other)
    if as_json:
        content: dict[str, Any] = {
            section: [{"key": key, "values": [first, second]} for key, first, second in rows]
            for section, rows in settings.items()
        }
        content["results"] = results.to_json()["rows"] if results else []
        print(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False))
        return 0
    if any(settings.values()):
        console.print(_settings_table(settings, (one.record.name, other.record.name)))
    else:
        console.print("no difference in configuration and manifest")
    if results is not None:
        console.print()
        results.print_rows(console, ("first run", "second run"))
    for run in unmeasured:
        print_text(f"results are not compared: {run.record.folder} has logged no finite loss", console)
    return 0


def _settings_table(settings: dict[str, list[Difference]], names: tuple[str, str]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("", "key", *names):
        table.add_column(Text(heading), overflow="fold")
    for section, rows in settings.items():
        for index, (key, one, other) in enumerate(rows):
            cells = (section if index == 0 else "", key, _short(one), _short(other))
            table.add_row(*map(Text, cells))  # values may contain brackets
    return table


def _short(value: Any) -> str:
    """A value with a hash cut to its start."""
    text = str(value)
    is_hash = len(text) == 64 and all(letter in "0123456789abcdef" for letter in text)
    return f"{text[:12]}..." if is_hash else text
