"""Show what came of a verification, and draw it beside the run."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from tunebook.evidence.page import write_page
from tunebook.evidence.verifying import Verification
from tunebook.record.run_record import RunRecord

PAGE_FILE = "verify.html"


def show_verification(found: Verification, record: RunRecord, console: Console) -> int:
    """Print the table and write the page; returns the exit code."""
    console.print(found.table())
    page = draw_page(found, record, console)
    verdict = "agrees with" if found.exit_code == 0 else "DIFFERS from"
    drawn = "" if page is None else f"; drawn in {page}"
    console.print(Text(f"the run {verdict} {found.name}{drawn}"), soft_wrap=True)
    return found.exit_code


def draw_page(found: Verification, record: RunRecord, console: Console) -> Path | None:
    """Write the page into the run's folder; None, with a warning, where that takes no more files."""
    page = record.folder / PAGE_FILE
    try:
        write_page(found, record.name, page)
    except OSError as error:
        warning = f"warning: {page} cannot be written: {error.strerror or error}"
        console.print(Text(warning, style="yellow"), soft_wrap=True)
        return None
    return page
