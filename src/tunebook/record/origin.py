"""`tunebook.json` in a model folder: which run an exported model comes from, and what it was trained with.

A model folder is copied and renamed freely; with this file its tokenizer, chat template and system prompt can still be
compared with the training. Without it a folder is a model like any other.
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tunebook.config.frozen import load_config
from tunebook.errors import DataError
from tunebook.files import atomic_write_json, read_json
from tunebook.record.files import RUN_FILE
from tunebook.record.manifest import read_manifest, recorded_fingerprint

ORIGIN_FILE = "tunebook.json"
FORMAT = 1  # raised when a key changes its meaning or goes away


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The run that a model folder was exported from. A hash is None where the training had no such thing."""

    run: str  # `<recipe>/<time>`, which tells runs apart
    recipe: str | None
    config_sha256: str
    tokenizer_sha256: str | None
    chat_template_sha256: str | None
    system_prompt: str | None
    weights_fingerprint: str | None = None  # of the weights that it started from; older folders do not say
    template_date: str | None = None  # that the chat template wrote as today's; None where it writes none


def origin_of(run: Path) -> Origin:
    """What a run recorded of itself. Raises: DataError, RequestError for no run."""
    manifest = read_manifest(run)
    config = load_config(run / RUN_FILE)
    run = run.resolve()
    return Origin(
        run=f"{run.parent.name}/{run.name}",
        recipe=config.recipe,
        config_sha256=manifest["config_sha256"],
        tokenizer_sha256=manifest["tokenizer_sha256"],
        chat_template_sha256=manifest["chat_template_sha256"],
        system_prompt=config.dataset.system_prompt,
        weights_fingerprint=recorded_fingerprint(manifest),
        template_date=manifest.get("template_date"),
    )


def write_origin(folder: Path, origin: Origin) -> None:
    """Write into an exported model's `folder` where it comes from; what a subclass knows besides is written too."""
    atomic_write_json(folder / ORIGIN_FILE, {"format": FORMAT, **asdict(origin)})


def read_origin(folder: Path) -> Origin | None:
    """Where a model folder comes from; None where it does not say. Raises: DataError for a file that cannot be read."""
    file = folder / ORIGIN_FILE
    if not file.is_file():
        return None
    said: Any = read_json(file)
    names = {field.name for field in fields(Origin)}
    needed = {field.name for field in fields(Origin) if field.default is MISSING}
    if not isinstance(said, dict) or said.get("format") != FORMAT or not needed <= set(said):
        raise DataError(
            f"{file} is not what `tunebook export` writes (format {FORMAT}: {', '.join(sorted(needed))}): it was "
            "edited or written by another version; export the run again, or remove the file, and the model counts as "
            "one without a run",
            problem_id="broken-record",
        )
    return Origin(**{name: said[name] for name in names & set(said)})
