"""What a hub model needs before its weights are loaded, and what to say when the hub cannot give it."""

from __future__ import annotations

from pathlib import Path

from tunebook.config.schema import ModelConfig
from tunebook.errors import RequestError, TunebookError
from tunebook.hardware.disk import is_disk_full, no_space
from tunebook.model.hub_token import token_problem
from tunebook.model.weight_files import STORED_PATTERNS, find_weight_files

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")

_TIMEOUT_S = 10.0
_OUT_OF_REACH = (
    "couldn't connect",
    "couldn't reach",
    "cannot reach",
    "offline mode",
    "connection error",
    "connectionerror",
    "max retries",
    "name resolution",
    "local_files_only",
    "locate the file on the hub",
    "cannot find the requested files in the disk cache",
    "outgoing traffic has been disabled",
)


def is_out_of_reach(error: BaseException) -> bool:
    """Whether an error of a hub library (or one it was raised from) means that there is no network."""
    seen: BaseException | None = error
    while seen is not None:
        name = type(seen).__name__.lower()
        if "offline" in name or "connect" in name or any(words in str(seen).lower() for words in _OUT_OF_REACH):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def why_no_upload() -> str | None:
    """Why nothing can be uploaded from here, with what to do; None where the hub answers and knows the account."""
    from huggingface_hub import HfApi

    try:
        HfApi().whoami()
    except Exception as error:  # the hub's errors, and those of the HTTP library below it
        if is_out_of_reach(error):
            return "the hub is out of reach (or HF_HUB_OFFLINE is set); upload later, from a machine with a network"
        return "the hub knows no account here; run `hf auth login`, or set HF_TOKEN"
    return None


def fetch_config(model: ModelConfig) -> Path:
    """The folder with a hub model's config.json, fetched or from the cache.

    Not left to transformers, which tries for half a minute where there is no network. Raises: RequestError, and
    DoesNotFitError where the disk is full.
    """
    from huggingface_hub import snapshot_download

    assert model.name is not None
    patterns = ["config.json", "*.py"] if model.trust_remote_code else ["config.json"]
    try:
        folder = Path(snapshot_download(model.name, revision=model.revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # the hub's own errors are kinds of these
        raise hub_problem(error, "model", model.name) from error
    if not (folder / "config.json").is_file():
        raise hub_problem(FileNotFoundError("it has no config.json"), "model", model.name)
    return folder


def fetch_weights(model: ModelConfig) -> Path:
    """The folder with a hub model's weight files, fetched or from the cache: those that transformers would read.

    Raises: RequestError, and DoesNotFitError where the disk is full.
    """
    from huggingface_hub import snapshot_download

    assert model.name is not None
    try:
        for patterns in STORED_PATTERNS:
            folder = Path(snapshot_download(model.name, revision=model.revision, allow_patterns=list(patterns)))
            if find_weight_files(folder):
                break
    except (OSError, ValueError) as error:  # the hub's own errors are kinds of these
        raise hub_problem(error, "model", model.name) from error
    return folder


def check_hub_model(model: ModelConfig) -> None:
    """Refuse a hub model whose weights are neither in the cache nor within reach. Raises: RequestError."""
    from huggingface_hub import HfApi

    folder = fetch_config(model)
    if any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES):
        return
    assert model.name is not None
    try:
        HfApi().model_info(model.name, revision=model.revision, timeout=_TIMEOUT_S)
    except Exception as error:  # the hub's errors, and those of the HTTP library below it
        raise hub_problem(error, "model", model.name) from error


def local_problem(error: BaseException, what: str) -> TunebookError | None:
    """The error for what could not be had of the hub because of this machine; None where it is not to blame."""
    from huggingface_hub import constants

    if is_disk_full(error):
        advice = "free some space, or use another disk: HF_HOME=FOLDER in front of the command"
        return no_space(what, Path(constants.HF_HOME), advice)
    if token := token_problem(error):
        return RequestError(
            f"the hub cannot be asked for {what}: {token.what}; type: {token.fix}", problem_id="hub-token"
        )
    return None


def hub_problem(
    error: BaseException, kind: str, name: str, *, key: str = "model.name=null model.path"
) -> TunebookError:
    """The error to raise when a `kind` (model, tokenizer) called `name` could not be loaded.

    `key` is what names a folder instead.
    """
    if problem := local_problem(error, f"the {kind} '{name}'"):
        return problem
    if is_out_of_reach(error):
        return RequestError(
            f"the hub is out of reach and the {kind} '{name}' is not in its cache. Work offline: on a machine with "
            f"network run `hf download {name} --local-dir DIR`, copy DIR here and name it with "
            f"{key}=DIR, or copy that machine's cache, point HF_HUB_CACHE at it and set "
            "HF_HUB_OFFLINE=1",
            problem_id="hub-out-of-reach",
        )
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return RequestError(
        f"the {kind} '{name}' cannot be loaded: {reason}; check the name and the revision, and for a gated one "
        "run `hf auth login` with an account that may read it",
        problem_id="hub-cannot-load",
    )
