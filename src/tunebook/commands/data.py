"""`tunebook data`: prepare the data, and show counts, lengths and samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tunebook.commands.train import with_data
from tunebook.errors import RequestError
from tunebook.plan.draft import draft_run
from tunebook.terminal import print_text

# The quickstart's tokens are half as long as a model's own, so 4,096 of them are a text as 2,048 of those. The factor
# gives its model positions for any limit.
_QUICKSTART = ("model=quickstart", "model.yarn_factor=1000", "training.max_length=4096")

# Rules about these keys are checked; data can be looked at before batch and hardware are right.
_RULES = ("dataset", "model", "method", "training.max_length")


def show_data(
    recipe: str | None,
    overrides: Sequence[str],
    recipes_dirs: Sequence[Path],
    num_samples: int,
    console: Console,
    page: Path | None = None,
) -> None:
    """Print everything about a recipe's data, and write it to `page`. Raises: what planning and preparing raise."""
    keys = ("model=", "model.name=", "model.path=")
    if recipe is None and not any(word.startswith(keys) for word in overrides):
        overrides = [*_QUICKSTART, *overrides]
        note = "no model is named: the quickstart's tokenizer counts, which makes about twice as many tokens as others"
        print_text(note, console)
    job = draft_run(recipe, [*overrides], [*recipes_dirs])
    job.raise_errors(*_RULES)
    for warning in job.problems:
        if warning.key.startswith("dataset."):
            print_text(f"warning: {warning.text()}", console, style="yellow")
    job, prepared = with_data(job, console, *_RULES)

    from tunebook.data.view import show_prepared
    from tunebook.model.tokenizer import load_tokenizer, needs_padding

    has_text = prepared.tokenizer_sha256 is not None  # documents that came as tokens need no tokenizer to be shown
    is_needed = has_text and num_samples > 0
    tokenizer = load_tokenizer(job.config.model, is_padded=needs_padding(job.config)) if is_needed else None
    show_prepared(prepared, tokenizer, console, num_samples)
    if page is not None:
        from tunebook.commands.data_page import write_page

        try:
            write_page(prepared, tokenizer, page, num_samples)
        except OSError as error:
            message = f"--page: {page} cannot be written: {error.strerror}; name a file in a folder that exists"
            raise RequestError(message, problem_id="page-not-written") from error
        print_text(f"page: {page}", console)
