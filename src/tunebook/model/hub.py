"""Models on the hub: fetching them, and the errors when the hub does not answer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tunebook.config.schema import ModelConfig
from tunebook.errors import RequestError, TunebookError, causes, first_line
from tunebook.hardware.disk import is_disk_full, no_space
from tunebook.model.weight_files import STORED, find_weight_files


def is_out_of_reach(error: BaseException) -> bool:
    """True if an error of a hub library, or one of its causes, means that there is no network."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    kinds = (ConnectionError, TimeoutError, LocalEntryNotFoundError)
    return any(isinstance(cause, kinds) or "connect" in type(cause).__name__.lower() for cause in causes(error))


def fetch_files(
    name: str, revision: str | None, patterns: Iterable[str], kind: str = "model", key: str = "model"
) -> Path:
    """The folder with the files of a repository that match, fetched or from the cache; its name is the commit.

    Raises: as `hub_problem`, for a `kind` (model, tokenizer) of repository.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except (OSError, ValueError) as error:  # the hub's own errors are kinds of these
        raise hub_problem(error, kind, name, revision, key=key) from error


def fetch_config(model: ModelConfig) -> Path:
    """The folder with a hub model's config.json. Raises: as `fetch_files`."""
    assert model.name is not None
    patterns = ["config.json", "*.py"] if model.trust_remote_code else ["config.json"]
    folder = fetch_files(model.name, model.revision, patterns)
    if not (folder / "config.json").is_file():
        raise hub_problem(FileNotFoundError("it has no config.json"), "model", model.name)
    return folder


def fetch_weights(model: ModelConfig) -> Path:
    """The folder with the weight files of a hub model that transformers would read. Raises: as `fetch_files`."""
    assert model.name is not None
    for _, index, pattern in STORED:
        folder = fetch_files(model.name, model.revision, [index, pattern])
        if find_weight_files(folder):
            break
    return folder


def hub_problem(
    error: BaseException, kind: str, name: str, revision: str | None = None, *, key: str = "model"
) -> TunebookError:
    """The error if a `kind` (model, tokenizer) called `name` cannot be loaded. `key` is the setting for a folder."""
    from huggingface_hub import constants

    if is_disk_full(error):
        advice = "free some space, or use another disk: HF_HOME=FOLDER in front of the command"
        return no_space(f"the {kind} '{name}'", Path(constants.HF_HOME), advice)
    if is_out_of_reach(error):
        at = f" --revision {revision}" if revision is not None else ""
        at += " --repo-type dataset" if kind == "data set" else ""
        return RequestError(
            f"the hub is out of reach and the {kind} '{name}' is not in its cache. On a machine with network run "
            f"`hf download {name}{at} --local-dir DIR`, copy DIR here and name it with {key}=DIR, or copy that "
            "machine's cache, point HF_HUB_CACHE at it and set HF_HUB_OFFLINE=1",
            problem_id="hub-out-of-reach",
        )
    return RequestError(
        f"the {kind} '{name}' cannot be loaded: {first_line(error)}; check the name and the revision, and for a gated "
        "one run `hf auth login` with an account that may read it",
        problem_id="hub-cannot-load",
    )
