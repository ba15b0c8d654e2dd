"""What an evaluation scores or a chat talks to: a run's model, a model folder outside of any run, or a hub name."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from tunebook.checkpoint.verify import MODEL_FOLDER, require_unchanged_model
from tunebook.errors import RequestError
from tunebook.evaluate.finished import checkpoints_of, choose_run, has_weights
from tunebook.model.adapters import holds_model
from tunebook.model.hub import WEIGHT_FILES
from tunebook.record.files import RUN_FILE
from tunebook.record.origin import Origin, read_origin
from tunebook.record.run_folder import is_run

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model: `folder`, or else `hub_name`. With a run it is bound to what the run was trained with."""

    run: Path | None = None
    folder: Path | None = None  # of a whole model or an adapter
    hub_name: str | None = None
    origin: Origin | None = None  # what a folder outside of any run says of the run that it was exported from

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
            require_weights(named)
            if run is not None and named == run / MODEL_FOLDER:
                require_unchanged_model(run)
            return Target(run=run, folder=named, origin=None if run else read_origin(named))
    try:
        run = choose_run(text, outputs, lambda line: print(line, file=sys.stderr))
    except RequestError as error:
        if error.problem_id == "unknown-run" and "/" in text and _can_be_on_the_hub(text):
            return Target(hub_name=text)
        raise
    return Target(run=run, folder=_model_of(run))


def find_named_model(text: str, outputs: Path) -> Target:
    """The target that `model=` names: as `find_target`, but a single word may be on the hub too, such as gpt2."""
    try:
        return find_target(text, outputs)
    except RequestError as error:
        if error.problem_id != "unknown-run":
            raise
        if _can_be_on_the_hub(text):
            return Target(hub_name=text)
        raise RequestError(
            f"model={text}: there is no such folder, and it is no name on the hub; type model=organisation/name, "
            "model=FOLDER with a Hugging Face model in it, or run=RUN",
            problem_id="model-folder",
        ) from error


def require_weights(folder: Path) -> None:
    """Refuse a folder without a whole model or adapter in it. Raises: RequestError."""
    if holds_model(folder) and has_weights(folder):
        return
    raise RequestError(
        f"{folder} holds no whole model (config.json or adapter_config.json, and {' or '.join(WEIGHT_FILES)}): it is a "
        "sharded or unfinished checkpoint, or another kind of folder. Name the run itself, or make one with: "
        "tunebook export RUN",
        problem_id="model-without-weights",
    )


def _model_of(run: Path) -> Path:
    model = run / MODEL_FOLDER
    if not holds_model(model):
        raise RequestError(
            f"{run} has no model/ folder: the run did not finish. Name one of its checkpoints: {checkpoints_of(run)}",
            problem_id="run-without-model",
        )
    require_weights(model)
    require_unchanged_model(run)
    return model


def _can_be_on_the_hub(text: str) -> bool:
    """Whether a text is written as a name on the hub and names nothing here."""
    is_path = text.startswith((".", "~", "/")) or Path(text).exists()
    return _HUB_NAME.fullmatch(text) is not None and not is_path
