"""What `tunebook verify` and `tunebook diff` do: compare a run with recorded evidence or another, or record some."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tunebook.commands.record_evidence import record_evidence
from tunebook.commands.recorded_evidence import verify
from tunebook.errors import RequestError
from tunebook.evidence.card import require_room, update_card
from tunebook.evidence.difference import difference_table, differences
from tunebook.evidence.files import evidence_files, evidence_folder
from tunebook.evidence.gather import config_of, read_finished
from tunebook.evidence.overview import update_overview
from tunebook.evidence.show import draw_page, show_verification
from tunebook.record.intact import naming
from tunebook.record.run_folder import resolve_run, resolve_runs
from tunebook.record.run_record import RunRecord, read_run


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
    folders = [resolve_run(run, outputs) for run in runs]
    with naming(*folders):
        records = [read_finished(folder) for folder in folders]
    if record:
        if label is None or against is not None:
            raise RequestError(
                "--record writes a new file and needs --label NAME, which stands in its name, and no --against",
                problem_id="evidence-label",
            )
        with naming(*folders):
            return _record(records, label, recipes_dirs, console)
    if len(records) != 1 or label is not None:
        raise RequestError(
            "one run is compared at a time; several, and --label, are for --record: "
            "tunebook verify RUN RUN --record --label NAME",
            problem_id="evidence-label",
        )
    with naming(*folders):
        found = verify(records[0], recipes_dirs, against)
    if not as_json:
        return show_verification(found, records[0], console)
    page = draw_page(found, records[0], Console(stderr=True))
    told = found.to_json() | {"page": None if page is None else str(page)}
    json.dump(told, sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
    print()
    return found.exit_code


def _record(records: list[RunRecord], label: str, recipes_dirs: list[Path], console: Console) -> int:
    """Write the evidence and show it; whatever could not be shown is refused before anything is written."""
    if (recipe := config_of(records[0].folder).recipe) is not None:
        folder = evidence_folder(recipe, recipes_dirs)
        require_room(folder.parent / "README.md", evidence_files(recipe, recipes_dirs))
    file = record_evidence(records, label, recipes_dirs)
    console.print(Text(f"written: {file}"), soft_wrap=True)
    card = file.parent.parent / "README.md"
    files = sorted(file.parent.glob("*.json"))
    update_card(card, files)
    update_overview(card.parents[2] / "README.md", card.parent.name, files)
    console.print(Text(f"shown on {card}"), soft_wrap=True)
    return 0


def diff_command(runs: tuple[str, str], outputs: Path, console: Console, *, as_json: bool = False) -> int:
    """Print what is not the same in two runs. Raises: RequestError for a folder that is no run's, or one run twice."""
    one, other = (read_run(folder) for folder in resolve_runs(runs, outputs))
    with naming(one.folder, other.folder):
        found = differences(one, other)
    if as_json:
        content = {
            section: [{"key": key, "values": [first, second]} for key, first, second in rows]
            for section, rows in found.items()
        }
        json.dump(content, sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
        print()
        return 0
    for record in (one, other):
        for name in record.changed_files:
            changed = f"{record.name}: {name} was changed after the run, by the hash in its manifest"
            console.print(Text(changed, style="yellow"), soft_wrap=True)
    without = [record.name for record in (one, other) if record.config is None]
    if any(found.values()):
        console.print(difference_table(found, (one.name, other.name)))
    elif not without:
        console.print("no difference in configuration, manifest and results")
    else:
        console.print("no difference in manifest and results")
    if without:
        lacking = f"configurations are not compared: {' and '.join(without)} lacks run.yaml"
        console.print(Text(lacking, style="yellow"), soft_wrap=True)
    return 0
