"""Whether what a run saves can be uploaded, asked before it starts and not at the first save."""

from __future__ import annotations

from tunebook.errors import RequestError
from tunebook.model.hub import why_no_upload


def check_upload(name: str | None) -> None:
    """Refuse `training.push_to_hub` without a network or an account. Raises: RequestError."""
    if name is not None and (why := why_no_upload()):
        raise RequestError(
            f"training.push_to_hub={name}: {why}; or train without: training.push_to_hub=null",
            problem_id="upload-not-possible",
        )
