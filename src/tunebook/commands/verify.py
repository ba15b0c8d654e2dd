"""`tunebook verify` compares a run with evidence or records evidence; `tunebook diff` compares two runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tunebook.commands.record_evidence import record_evidence
from tunebook.commands.recorded_evidence import verify
from tunebook.config.identity import flat_differences
from tunebook.errors import RequestError
from tunebook.evidence.card import check_card, update_card, update_overview
from tunebook.evidence.files import evidence_files, evidence_folder
from tunebook.evidence.gather import RunFacts, read_finished
from tunebook.evidence.page import show_verification, write_page
from tunebook.evidence.schema import Target
from tunebook.evidence.target import parse_target
from tunebook.evidence.tolerances import relative
from tunebook.record.page.comparison import config_differences
from tunebook.record.page.overview import Summary, summarize
from tunebook.record.run_folder import resolve_run, resolve_runs
from tunebook.record.run_record import RunRecord, broken_records_named, read_run
from tunebook.terminal import print_text

NOT_SET = "not set"
# Keys, with all keys below them, that differ between any two runs.
_UNIQUE_KEYS = tuple(f"{key}." for key in (
    "status.started", "status.ended", "status.seconds", "command", "typed", "config_sha256", "leak_probe.probe_s",
    "leak_probe.warm_up_s", "start_up", "files_sha256", "model_files.training_args.bin",  # which names the run folder
))  # fmt: skip
_NUMBERS = (
    "num_steps", "num_tokens", "first_loss", "final_loss", "best_validation_loss", "tokens_per_second_per_gpu", "mfu",
    "padding_share", "seconds", "num_attempts",
)  # fmt: skip


def verify_command(
    runs: list[str],
    outputs: Path,
    recipes_dirs: list[Path],
    console: Console,
    *,
    record: bool = False,
    label: str | None = None,
    against: Path | None = None,
    target: str | None = None,
    as_json: bool = False,
) -> int:
    """Compare a run (returns 0, or 5 if it differs), or write the evidence of repeated runs.

    Raises: RequestError for a run that has not finished or has no evidence; DataError for a broken file.
    """
    wanted = None if target is None else parse_target(target)
    folders = [resolve_run(run, outputs) for run in runs]
    with broken_records_named(*folders):
        found_runs = [read_finished(folder) for folder in folders]
    if record:
        if label is None or against is not None:
            raise RequestError(
                "--record writes a new file and needs --label NAME, which is part of its name, and no --against",
                problem_id="evidence-label",
            )
        with broken_records_named(*folders):
            return _record(found_runs, label, recipes_dirs, console, wanted)
    if len(found_runs) != 1 or label is not None:
        raise RequestError(
            "only one run can be compared; several runs and --label are for --record: "
            "tunebook verify RUN RUN --record --label NAME",
            problem_id="evidence-label",
        )
    with broken_records_named(*folders):
        found = verify(found_runs[0], recipes_dirs, against, wanted)
    if not as_json:
        return show_verification(found, console)
    page = write_page(found, Console(stderr=True))
    _print_json(found.to_json() | {"page": None if page is None else str(page)})
    return found.exit_code


def _print_json(content: dict[str, Any]) -> None:
    print(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False))


def _record(runs: list[RunFacts], label: str, recipes_dirs: list[Path], console: Console, target: Target | None) -> int:
    """Write the evidence and update the card. A card that cannot be updated is refused before anything is written."""
    if (recipe := runs[0].config.recipe) is not None:
        folder = evidence_folder(recipe, recipes_dirs)
        check_card(folder.parent / "README.md", evidence_files(recipe, recipes_dirs))
    file = record_evidence(runs, label, recipes_dirs, target)
    print_text(f"written: {file}", console)
    card = file.parent.parent / "README.md"
    files = sorted(file.parent.glob("*.json"))
    update_card(card, files)
    update_overview(card.parents[2] / "README.md", card.parent.name, files)
    print_text(f"shown on {card}", console)
    return 0


def diff_command(runs: tuple[str, str], outputs: Path, console: Console, *, as_json: bool = False) -> int:
    """Print the differences of two runs. Raises: RequestError if one is not a run, or both are the same."""
    one, other = (read_run(folder) for folder in resolve_runs(runs, outputs))
    with broken_records_named(one.folder, other.folder):
        found = differences(one, other)
    if as_json:
        _print_json(
            {
                section: [{"key": key, "values": [first, second]} for key, first, second in rows]
                for section, rows in found.items()
            }
        )
        return 0
    for record in (one, other):
        for name in record.changed_files:
            changed = f"{record.name}: {name} was changed after the run, by the hash in its manifest"
            print_text(changed, console, style="yellow")
    without = [record.name for record in (one, other) if record.config is None]
    if any(found.values()):
        console.print(difference_table(found, (one.name, other.name)))
    else:
        console.print(f"no difference in {'' if without else 'configuration, '}manifest and results")
    if without:
        missing = f"configurations are not compared: {' and '.join(without)} lacks run.yaml"
        print_text(missing, console, style="yellow")
    return 0


def differences(one: RunRecord, other: RunRecord) -> dict[str, list[tuple[str, Any, Any]]]:
    """The differing keys with both values, in the sections `config`, `manifest` and `results`."""
    of_manifest = flat_differences(one.manifest or {}, other.manifest or {}, absent=lambda key: NOT_SET)
    return {
        "config": [(key, values[0], values[1]) for key, values in config_differences([one, other])],
        "manifest": [found for found in of_manifest if not f"{found[0]}.".startswith(_UNIQUE_KEYS)],
        "results": [*_loss_differences(one, other), *_result_differences(summarize(one), summarize(other))],
    }


def _result_differences(one: Summary, other: Summary) -> list[tuple[str, Any, Any]]:
    rows = [(name, getattr(one, name), getattr(other, name)) for name in _NUMBERS]
    peaks = [max(summary.peak_memory_gib, default=None) for summary in (one, other)]
    rows.append(("peak_memory_gib", peaks[0], peaks[1]))
    return [row for row in rows if row[1] != row[2]]


def _loss_differences(one: RunRecord, other: RunRecord) -> list[tuple[str, Any, Any]]:
    """The first step whose losses are not bitwise equal, and the largest difference over the shared steps."""
    first, second = dict(one.scheduled_losses()), dict(other.scheduled_losses())
    step = next((step for step in sorted(first.keys() | second.keys()) if first.get(step) != second.get(step)), None)
    if step is None:
        return []
    shared = [(loss, second.get(at)) for at, loss in first.items()]
    largest = max((relative(two, loss) for loss, two in shared if loss is not None and two is not None), default=None)
    return [
        (f"loss at step {step}, the first that differs", first.get(step, NOT_SET), second.get(step, NOT_SET)),
        ("largest difference of a step's loss, relative", "", largest),
    ]


def difference_table(found: dict[str, list[tuple[str, Any, Any]]], names: tuple[str, str]) -> Table:
    """The differences for a terminal, with shortened hashes."""
    table = Table(box=None, pad_edge=False)
    for heading in ("", "key", *names):
        table.add_column(Text(heading), overflow="fold")
    for section, rows in found.items():
        for index, (key, one, other) in enumerate(rows):
            cells = (section if index == 0 else "", key, _short(one), _short(other))
            table.add_row(*map(Text, cells))  # values may contain brackets
    return table


def _short(value: Any) -> str:
    text = f"{value:.7g}" if isinstance(value, float) else str(value)
    is_hash = len(text) == 64 and all(letter in "0123456789abcdef" for letter in text)
    return f"{text[:12]}..." if is_hash else text
