"""Models on the hub: fetching and checking them, the access token, and the errors when the hub does not answer."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tunebook.config.schema import ModelConfig
from tunebook.errors import RequestError, TunebookError, causes, first_line
from tunebook.hardware.disk import is_disk_full, no_space
from tunebook.model.weight_files import STORED_PATTERNS, find_weight_files

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
_ELSEWHERE = "HF_TOKEN in the environment"


def is_out_of_reach(error: BaseException) -> bool:
    """True if an error of a hub library, or one of its causes, means that there is no network."""
    return any(
        any(word in type(one).__name__.lower() for word in ("offline", "connect"))
        or any(words in str(one).lower() for words in _OUT_OF_REACH)
        for one in causes(error)
    )


def why_no_upload() -> str | None:
    """Why nothing can be uploaded, and what to do; None if the hub accepts the account."""
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

    transformers would retry for half a minute without a network. Raises: RequestError; DoesNotFitError if the disk is
    full.
    """
    from huggingface_hub import snapshot_download

    assert model.name is not None
    patterns = ["config.json", "*.py"] if model.trust_remote_code else ["config.json"]
    try:
        folder = Path(snapshot_download(model.name, revision=model.revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # the hub's own errors are kinds of these
        raise hub_problem(error, "model", model.name, model.revision) from error
    if not (folder / "config.json").is_file():
        raise hub_problem(FileNotFoundError("it has no config.json"), "model", model.name)
    return folder


def fetch_weights(model: ModelConfig) -> Path:
    """The folder with the weight files of a hub model that transformers would read, fetched or from the cache.

    Raises: RequestError; DoesNotFitError if the disk is full.
    """
    from huggingface_hub import snapshot_download

    assert model.name is not None
    try:
        for patterns in STORED_PATTERNS:
            folder = Path(snapshot_download(model.name, revision=model.revision, allow_patterns=list(patterns)))
            if find_weight_files(folder):
                break
    except (OSError, ValueError) as error:  # the hub's own errors are kinds of these
        raise hub_problem(error, "model", model.name, model.revision) from error
    return folder


def check_hub_model(model: ModelConfig) -> None:
    """Refuse a hub model whose weights are neither in the cache nor within reach. Raises: RequestError."""
    from huggingface_hub import HfApi

    folder = fetch_config(model)
    with suppress(RequestError):  # an index that names files which were not downloaded yet
        if find_weight_files(folder):
            return
    assert model.name is not None
    try:
        HfApi().model_info(model.name, revision=model.revision, timeout=_TIMEOUT_S)
    except Exception as error:  # the hub's errors, and those of the HTTP library below it
        raise hub_problem(error, "model", model.name, model.revision) from error


def local_problem(error: BaseException, what: str) -> TunebookError | None:
    """The error if this machine, not the hub, is the cause of a failed request; else None."""
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
    error: BaseException,
    kind: str,
    name: str,
    revision: str | None = None,
    *,
    key: str = "model.name=null model.path",
) -> TunebookError:
    """The error if a `kind` (model, tokenizer) called `name` cannot be loaded. `key` is the setting for a folder."""
    if problem := local_problem(error, f"the {kind} '{name}'"):
        return problem
    if is_out_of_reach(error):
        at = f" --revision {revision}" if revision is not None else ""
        return RequestError(
            f"the hub is out of reach and the {kind} '{name}' is not in its cache. Work offline: on a machine with "
            f"network run `hf download {name}{at} --local-dir DIR`, copy DIR here and name it with "
            f"{key}=DIR, or copy that machine's cache, point HF_HUB_CACHE at it and set "
            "HF_HUB_OFFLINE=1",
            problem_id="hub-out-of-reach",
        )
    reason = first_line(error)
    return RequestError(
        f"the {kind} '{name}' cannot be loaded: {reason}; check the name and the revision, and for a gated one "
        "run `hf auth login` with an account that may read it",
        problem_id="hub-cannot-load",
    )


@dataclass(frozen=True, kw_only=True)
class TokenProblem:
    """Why every request to the hub fails, even one that needs no token, and the fix."""

    what: str
    fix: str


def token_problem(error: BaseException) -> TokenProblem | None:
    """The problem of the token's file, if it caused an error of the hub's library."""
    from huggingface_hub import constants

    is_of_token = any(
        isinstance(one, UnicodeDecodeError) or getattr(one, "filename", None) == constants.HF_TOKEN_PATH
        for one in causes(error)
    )
    return unreadable_token() if is_of_token else None


def unreadable_token() -> TokenProblem | None:
    """The problem of the token's file; None if it can be read or is not used."""
    from huggingface_hub import constants, get_token

    file = Path(constants.HF_TOKEN_PATH)
    try:
        get_token()
    except IsADirectoryError:
        return TokenProblem(what=f"{file}, where the hub's token is looked for, is a folder", fix=_anew(file))
    except UnicodeDecodeError:
        return TokenProblem(what=f"{file}, where the hub's token is looked for, is not text", fix=_anew(file))
    except OSError as error:
        return TokenProblem(
            what=f"the hub's token in {file} cannot be read: {error.strerror or error}",
            fix=f"{_opened(file, error)}; or {_ELSEWHERE}",
        )
    return None


def _opened(file: Path, error: OSError) -> str:
    """The fix for a file without access. A file in a folder without access is not touched: it may be another user's."""
    if isinstance(error, PermissionError) and os.access(file.parent, os.X_OK):
        return f"sudo chown $(id -u) {_quoted(file)} && chmod 600 {_quoted(file)}"
    return "HF_HOME=FOLDER in front of the command, with a folder of yours"


def _anew(file: Path) -> str:
    """The fix for a file that is no token. A file that the user has named is not touched."""
    if os.environ.get("HF_TOKEN_PATH"):
        return f"unset HF_TOKEN_PATH, or have it name the file with the token; or {_ELSEWHERE}"
    return f"rm -r {_quoted(file)}, then hf auth login; or {_ELSEWHERE}"


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
