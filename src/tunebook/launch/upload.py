"""Whether what a run saves can be uploaded, asked before it starts and not at the first save."""

from __future__ import annotations

from tunebook.errors import RequestError
from tunebook.model.hub import is_out_of_reach


def check_upload(name: str | None) -> None:
    """Refuse `training.push_to_hub` without a network or an account. Raises: RequestError."""
    if name is None:
        return
    from huggingface_hub import HfApi

    try:
        HfApi().whoami()
    except Exception as error:  # the hub's errors, and those of the HTTP library below it
        if is_out_of_reach(error):
            why = "the hub is out of reach (or HF_HUB_OFFLINE is set); upload later, from a machine with a network"
        else:
            why = "the hub knows no account here; run `hf auth login`, or set HF_TOKEN"
        raise RequestError(
            f"training.push_to_hub={name}: {why}; or train without: training.push_to_hub=null",
            problem_id="upload-not-possible",
        ) from error
