"""What to say when the hub cannot give what was asked for."""

from __future__ import annotations

from tunebook.errors import RequestError

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


def hub_problem(error: BaseException, kind: str, name: str) -> RequestError:
    """The error to raise when a `kind` (model, tokenizer, dataset) called `name` could not be loaded."""
    if is_out_of_reach(error):
        repository_type = " --repo-type dataset" if kind == "dataset" else ""
        key = "dataset.path" if kind == "dataset" else "model.path"
        return RequestError(
            f"the hub is out of reach and the {kind} '{name}' is not in its cache. Work offline: on a machine with "
            f"network run `hf download {name}{repository_type} --local-dir DIR`, copy DIR here and name it with "
            f"{key}=DIR, or copy that machine's cache and point HF_HUB_CACHE at it",
            problem_id="hub-out-of-reach",
        )
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return RequestError(
        f"the {kind} '{name}' cannot be loaded: {reason}; check the name and the revision, and for a gated one "
        "run `hf auth login` with an account that may read it",
        problem_id="hub-cannot-load",
    )
