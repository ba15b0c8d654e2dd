"""What `tunebook export` does in a terminal: quiet libraries, what is exported, and what came of it."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text


def export_command(
    run: str,
    outputs: Path,
    console: Console,
    *,
    checkpoint: str | None,
    to: Path | None,
    merge: bool,
    dtype: str | None,
    push_to: str | None,
) -> None:
    """Export, and say where to. Raises: as `export.export_run`."""

    def say(line: str) -> None:
        console.print(Text(line), soft_wrap=True)

    with console.status(Text("loading libraries")):
        from transformers.utils import logging

        from tunebook.checkpoint.export.run import export_run
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    exported = export_run(run, outputs, say, checkpoint=checkpoint, to=to, merge=merge, dtype=dtype, push_to=push_to)
    origin, check = exported.origin, exported.origin.check
    same = (
        "equal the checkpoint's bit for bit"
        if check["is_exact"]
        else (f"differ from the checkpoint's by {check['difference']:.2g} (allowed: {check['allowed']:.2g})")
    )
    kind = "adapter" if origin.is_adapter else "merged model" if origin.is_merged else "model"
    say(f"written: {exported.folder}")
    say(f"  {kind} of {origin.num_parameters:,} numbers in {origin.dtype or ', '.join(origin.stored_dtypes)}")
    if check["logits"] is None:
        rounded = "" if check["is_exact"] else f" rounded to {origin.dtype}"
        say(f"  read again: the adapter's numbers equal the checkpoint's{rounded}; the base that it was trained on is")
        say("  not there to answer with")
    else:
        say(f"  loaded again: the logits of {check['logits']} {same}")
    if exported.address is not None:
        say(f"uploaded: {exported.address}")
