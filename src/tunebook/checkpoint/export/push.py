"""Upload an exported folder with the hub's own library; whether that can work is asked before anything is written."""

from __future__ import annotations

from pathlib import Path

from tunebook.errors import RequestError, TunebookError
from tunebook.model.hub import why_no_upload


def check_push(name: str | None) -> None:
    """Refuse --push with a name that is none, without a network or an account. Raises: RequestError."""
    if name is None:
        return
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise RequestError(
            f"--push {name}: {str(error).splitlines()[0]}; write it as ORGANISATION/NAME",
            problem_id="upload-not-possible",
        ) from error
    if name.count("/") != 1:
        raise RequestError(
            f"--push {name}: that does not say whose it shall be; write it as ORGANISATION/NAME",
            problem_id="upload-not-possible",
        )
    if why := why_no_upload():
        raise RequestError(f"--push {name}: {why}; or export without --push", problem_id="upload-not-possible")


def push(folder: Path, name: str, message: str) -> str:
    """Upload a folder as one commit; a repository that is not there yet is made, as a private one. Returns its address.

    Raises: TunebookError when the hub refuses or is lost; the folder stays.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        made = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(folder_path=str(folder), repo_id=name, commit_message=message)
    except Exception as error:  # the hub's errors, and those of the HTTP library below it
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TunebookError(
            f"the export is whole in {folder}, but it was not uploaded to {name}: {reason}; type again what is left: "
            f"hf upload {name} {folder}",
            problem_id="upload-failed",
        ) from error
    return str(made)
