"""What `tunebook verify` and `tunebook diff` do: compare a run with recorded evidence or another, or record some."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tunebook.errors import RequestError
from tunebook.evidence.card import update_card
from tunebook.evidence.difference import difference_table, differences
from tunebook.evidence.gather import read_finished
from tunebook.evidence.overview import update_overview
from tunebook.evidence.page import write_page
from tunebook.evidence.recording import record_evidence
from tunebook.evidence.show import PAGE_FILE, show_verification
from tunebook.evidence.verifying import verify
from tunebook.record.run_folder import resolve_run
from tunebook.record.run_record import read_run


def verify_command(
    runs: list[str],
    outputs: Path,
    recipes_dirs: list[Path],
    console: Console,
    *,
    record: bool = False,
    label: str | None = None,
    against: Path | None = None,
    as_json: bool = False,
) -> int:
    """Compare a run and say what differs (0, or 5 where something does), or write the evidence of repeated runs.

    Raises: RequestError for a run that has not finished, or that nothing is recorded for; DataError for a broken file.
    """
    records = [read_finished(resolve_run(run, outputs)) for run in runs]
    if record:
        if label is None or against is not None:
            raise RequestError(
                "--record writes a new file and needs --label NAME, which stands in its name, and no --against",
                problem_id="evidence-label",
            )
        file = record_evidence(records, label, recipes_dirs)
        console.print(Text(f"written: {file}"), soft_wrap=True)
        card = file.parent.parent / "README.md"
        files = sorted(file.parent.glob("*.json"))
        update_card(card, files)
        update_overview(card.parents[2] / "README.md", card.parent.name, files)
        console.print(Text(f"shown on {card}"), soft_wrap=True)
        return 0
    if len(records) != 1 or label is not None:
        raise RequestError(
            "one run is compared at a time; several, and --label, are for --record: "
            "tunebook verify RUN RUN --record --label NAME",
            problem_id="evidence-label",
        )
    found = verify(records[0], recipes_dirs, against)
    if not as_json:
        return show_verification(found, records[0], console)
    page = records[0].folder / PAGE_FILE
    write_page(found, records[0].name, page)
    json.dump(found.to_json() | {"page": str(page)}, sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
    print()
    return found.exit_code


def diff_command(runs: tuple[str, str], outputs: Path, console: Console, *, as_json: bool = False) -> int:
    """Print what is not the same in two runs. Raises: RequestError for a folder that is no run's."""
    one, other = (read_run(resolve_run(run, outputs)) for run in runs)
    found = differences(one, other)
    if as_json:
        content = {
            section: [{"key": key, "values": [first, second]} for key, first, second in rows]
            for section, rows in found.items()
        }
        json.dump(content, sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
        print()
    elif any(found.values()):
        console.print(difference_table(found, (one.name, other.name)))
    else:
        console.print("no difference in configuration, manifest and results")
    return 0
