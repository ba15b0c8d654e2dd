"""What `nvidia-smi` says, or why it says nothing: it may be absent, hang, fail, or print something unexpected."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass

from tunebook.hardware.asking import ask

PROGRAM = "nvidia-smi"
TIMEOUT_S = 40.0  # 8 GPUs without persistence mode take 10 s and more
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")  # it underlines headers
_GPU = re.compile(r"^GPU \d+: .+$", re.MULTILINE)  # GPU 0: NVIDIA H200 (UUID: GPU-...)


@dataclass(frozen=True, kw_only=True)
class SmiAnswer:
    """What it printed, without escape codes; or why there is nothing."""

    text: str | None
    problem: str | None
    is_absent: bool = False


def ask_nvidia_smi(*arguments: str, timeout_s: float = TIMEOUT_S) -> SmiAnswer:
    """Run it with these arguments. Never raises, and never waits longer than said."""
    if shutil.which(PROGRAM) is None:
        return SmiAnswer(text=None, problem=f"there is no {PROGRAM}", is_absent=True)
    answer = ask([PROGRAM, *arguments], timeout_s=timeout_s)
    if answer.problem is not None:
        said = f": {answer.last_words}" if answer.last_words else ""
        return SmiAnswer(text=None, problem=f"{answer.problem}{said}")
    text = plain(answer.text).strip("\n")
    if not text.strip():
        return SmiAnswer(text=None, problem="it printed nothing")
    return SmiAnswer(text=text, problem=None)


def plain(text: str) -> str:
    """A text without escape codes."""
    return _ESCAPE.sub("", text)


def listed_gpus(text: str) -> list[str]:
    """The GPUs in what `nvidia-smi -L` printed, a line each; slices (MIG) are indented below theirs and left out."""
    return _GPU.findall(text)
