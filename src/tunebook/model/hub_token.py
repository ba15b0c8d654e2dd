"""The file with the token for the hub, which the hub's library reads before every request: what is wrong with it."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

_ELSEWHERE = "HF_TOKEN in the environment"


@dataclass(frozen=True, kw_only=True)
class TokenProblem:
    """Why nothing can be asked of the hub, not even what needs no token, and what to type."""

    what: str
    fix: str


def token_problem(error: BaseException) -> TokenProblem | None:
    """What is wrong with the token's file, where an error of the hub's library is of that."""
    from huggingface_hub import constants

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, UnicodeDecodeError) or getattr(seen, "filename", None) == constants.HF_TOKEN_PATH:
            return unreadable_token()
        seen = seen.__cause__ or seen.__context__
    return None


def unreadable_token() -> TokenProblem | None:
    """What is wrong with the file of the token; None where it can be read, and where no token is looked for in it."""
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
    """What to type for a file that is closed. One in a closed folder is left: that may be somebody else's home."""
    if isinstance(error, PermissionError) and os.access(file.parent, os.X_OK):
        return f"sudo chown $(id -u) {_quoted(file)} && chmod 600 {_quoted(file)}"
    return "HF_HOME=FOLDER in front of the command, with a folder of yours"


def _anew(file: Path) -> str:
    """What to type where no token is; a file that the user has named may be something else, which is left alone."""
    if os.environ.get("HF_TOKEN_PATH"):
        return f"unset HF_TOKEN_PATH, or have it name the file with the token; or {_ELSEWHERE}"
    return f"rm -r {_quoted(file)}, then hf auth login; or {_ELSEWHERE}"


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
