"""What `tunebook chat` was asked to talk to: a run's model, a model folder outside of any run, or a name on the hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tunebook.errors import RequestError
from tunebook.evaluate.command import find_model
from tunebook.model.adapters import holds_model
from tunebook.model.hub import WEIGHT_FILES
from tunebook.record.files import RUN_FILE
from tunebook.record.run_folder import is_run


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model to talk to: `folder`, or else `hub_name`. With a run it is bound to what the run was trained with."""

    run: Path | None = None
    folder: Path | None = None  # of a whole model or an adapter
    hub_name: str | None = None

    @property
    def name(self) -> str:
        """How it is called in messages."""
        return self.hub_name or str(self.folder)


def find_target(text: str, outputs: Path) -> Target:
    """Look for a model folder, then for a run under `outputs`; what can be neither is taken for a name on the hub.

    Where a recipe or `latest` is named, the standard error says which run was taken.
    Raises: RequestError for a run without a model, a folder without weights, a name of nothing.
    """
    named = Path(text).expanduser().absolute()
    if named.is_dir() and not is_run(named):
        run = next((folder for folder in named.parents if (folder / RUN_FILE).is_file()), None)
        if holds_model(named) or run is not None:
            _require_weights(named)
            return Target(run=run, folder=named)
    try:
        run, folder = find_model(text, outputs)
    except RequestError as error:
        if error.problem_id == "unknown-run" and _can_be_on_the_hub(text):
            return Target(hub_name=text)
        raise
    return Target(run=run, folder=folder)


def _require_weights(folder: Path) -> None:
    if holds_model(folder) and any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES):
        return
    raise RequestError(
        f"{folder} holds no whole model (config.json or adapter_config.json, and {' or '.join(WEIGHT_FILES)}): it is a "
        "sharded or unfinished checkpoint, or another kind of folder. Name the run itself, or make one with: "
        "tunebook export RUN",
        problem_id="model-without-weights",
    )


def _can_be_on_the_hub(text: str) -> bool:
    """Whether a text is written as organisation/name and names nothing here."""
    organisation, _, name = text.partition("/")
    is_path = text.startswith((".", "~", "/")) or Path(text).exists()
    return bool(organisation and name) and "/" not in name and not is_path
