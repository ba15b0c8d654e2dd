"""Show what came of a verification, and draw it beside the run."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from tunebook.evidence.page import write_page
from tunebook.evidence.verifying import Verification
from tunebook.record.run_record import RunRecord

PAGE_FILE = "verify.html"


def show_verification(found: Verification, record: RunRecord, console: Console) -> int:
    """Print the table and write the page; returns the exit code."""
    page = record.folder / PAGE_FILE
    write_page(found, record.name, page)
    console.print(found.table())
    verdict = "agrees with" if found.exit_code == 0 else "DIFFERS from"
    console.print(Text(f"the run {verdict} {found.name}; drawn in {page}"), soft_wrap=True)
    return found.exit_code
