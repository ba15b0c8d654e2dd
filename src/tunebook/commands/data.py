"""`tunebook data RECIPE`: prepare the data, and show counts, lengths and samples in the terminal or as a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tunebook.commands.train import plan_job, prepare_data
from tunebook.errors import RequestError
from tunebook.terminal import print_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tunebook.data.prepared import Prepared


def show_data(
    recipe: str | None,
    overrides: Sequence[str],
    recipes_dirs: Sequence[Path],
    num_samples: int,
    page: Path | None,
    console: Console,
) -> None:
    """Print everything about a recipe's data, and write `page` if asked for.

    Raises: RequestError if the page cannot be written, and what planning and preparing raise.
    """
    job = plan_job(recipe, [*overrides], [*recipes_dirs])
    for warning in job.problems:
        if warning.key.startswith("dataset."):
            print_text(f"warning: {warning.text()}", console, style="yellow")
    if page is not None and not page.absolute().parent.is_dir():
        raise RequestError(
            f"--page {page}: there is no folder {page.absolute().parent}; make it first", problem_id="page-not-writable"
        )
    prepared = prepare_data(job.config, console)

    from tunebook.data.view import show_prepared
    from tunebook.model.tokenizer import load_tokenizer, needs_padding

    has_text = prepared.tokenizer_sha256 is not None  # documents that came as tokens need no tokenizer to be shown
    is_needed = has_text and num_samples > 0
    tokenizer = load_tokenizer(job.config.model, is_padded=needs_padding(job.config)) if is_needed else None
    show_prepared(prepared, tokenizer, console, num_samples)
    if page is not None:
        _write_page(page, recipe or "data", prepared, tokenizer, num_samples)
        print_text(f"page: {page}", console)


def _write_page(
    file: Path, title: str, prepared: Prepared, tokenizer: PreTrainedTokenizerBase | None, num_samples: int
) -> None:
    from tunebook.files import atomic_write_text
    from tunebook.record.report import render_page

    counts = {name: part.counts.to_json() for name, part in prepared.parts().items()}
    records = [vars(record) for record in prepared.records]
    page = render_page(
        "data.html.jinja",
        title=title,
        sources=records,
        parts=counts,
        warnings=_warnings(prepared),
        notes=prepared.notes,
        samples=_samples(prepared, tokenizer, num_samples),
    )
    try:
        atomic_write_text(file, page)
    except OSError as error:
        raise RequestError(
            f"--page {file} cannot be written: {error.strerror or error}", problem_id="page-not-writable"
        ) from error


def _warnings(prepared: Prepared) -> list[str]:
    """What a person should look at: cut answers, documents left out, remarks."""
    from tunebook.data.view import summary_lines

    return [line.strip() for line in summary_lines(prepared)[1:] if line.startswith("    ")]


def _samples(prepared: Prepared, tokenizer: PreTrainedTokenizerBase | None, num_samples: int) -> list[dict[str, Any]]:
    """Samples of every part, in pieces of one kind."""
    from tunebook.data.view import pieces_of, titled_samples

    return [
        {"title": title, "pieces": pieces_of(row["input_ids"], row["labels"], tokenizer)}
        for name, part in prepared.parts().items()
        for title, row in titled_samples(name, part, num_samples)
    ]
