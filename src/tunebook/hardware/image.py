"""The container image that this process runs in: what its build found out about it, read from one file.

The build writes `image.json` after checking it; the image names it in `TUNEBOOK_IMAGE_FILE`. Without that variable this
is no image of Tunebook's.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunebook.errors import RequestError
from tunebook.facts.generations import ComputeCapability

IMAGE_FILE_VARIABLE = "TUNEBOOK_IMAGE_FILE"
_NO_ATTENTION = "none"
# torch's flags: code for one architecture (sm_90), the same with instructions that no other has (sm_90a), or for a
# family (sm_100f), or PTX that any newer GPU's driver compiles (compute_120).
_FLAG = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")


@dataclass(frozen=True, kw_only=True)
class Image:
    """What an image is made of."""

    generation: str  # its folder under docker/
    torch: str
    cuda: str | None  # None: the image for machines without a GPU
    min_driver: int | None  # major version of the oldest NVIDIA driver it runs on
    compute_capabilities: tuple[ComputeCapability, ...]  # of the GPUs it is made for
    arch_list: tuple[str, ...]  # torch's flags for the code it contains
    attention: str | None  # the attention package, which has code for the image's own GPUs alone
    lock_sha256: str
    sources_sha256: str
    git_commit: str | None
    git_diff_sha256: str | None  # None: nothing was changed since the commit
    base_image: str | None
    packages: Mapping[str, str] | None = None  # locked versions, which the build found installed; older images lack it

    @property
    def is_for_gpus(self) -> bool:
        """Whether it is made for any GPU at all."""
        return bool(self.compute_capabilities)

    def has_code_for(self, capability: ComputeCapability) -> bool:
        """Whether the torch in it runs on a GPU of this compute capability.

        Source: CUDA C++ Programming Guide, "Application Compatibility": machine code runs on the same major version
        from its own minor one on, PTX on everything that is not older.
        """
        return runs_on_any(self.arch_list, capability)


def runs_on_any(flags: Iterable[str], capability: ComputeCapability) -> bool:
    """Whether a torch that was compiled with these flags has code for a GPU; see `Image.has_code_for`."""
    return any(_runs_on(flag, capability) for flag in flags)


def read_image(environment: Mapping[str, str] = os.environ) -> Image | None:
    """The image that this process runs in, or None. Raises: RequestError when its file is missing or damaged."""
    named = environment.get(IMAGE_FILE_VARIABLE)
    if not named:
        return None
    try:
        facts = json.loads(Path(named).read_text(encoding="utf-8"))
        if not isinstance(facts, dict):
            raise ValueError("it holds no keys")
        return _image(facts)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RequestError(
            f"{IMAGE_FILE_VARIABLE}={named}: this file says what the image is made of, and cannot be used: {reason}; "
            f"build the image again with `make image`, or outside of a container unset {IMAGE_FILE_VARIABLE}",
            problem_id="image-file-broken",
        ) from error


def _image(facts: dict[str, Any]) -> Image:
    attention = _text(facts, "attention")
    return Image(
        generation=_text(facts, "generation"),
        torch=_text(facts, "torch"),
        cuda=_text_or_none(facts, "cuda"),
        min_driver=_number_or_none(facts, "min_driver"),
        compute_capabilities=tuple(_capability(text) for text in _texts(facts, "compute_capabilities")),
        arch_list=tuple(_texts(facts, "arch_list")),
        attention=None if attention == _NO_ATTENTION else attention,
        lock_sha256=_text(facts, "lock_sha256"),
        sources_sha256=_text(facts, "sources_sha256"),
        git_commit=_text_or_none(facts, "git_commit"),
        git_diff_sha256=_text_or_none(facts, "git_diff_sha256"),
        base_image=_text_or_none(facts, "base_image"),
        packages=_versions(facts),
    )


def _value(facts: dict[str, Any], key: str) -> Any:
    if key not in facts:
        raise ValueError(f"it has no key '{key}'")
    return facts[key]


def _text(facts: dict[str, Any], key: str) -> str:
    value = _value(facts, key)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key} is {value!r}, and no text")
    return value


def _text_or_none(facts: dict[str, Any], key: str) -> str | None:
    return None if _value(facts, key) is None else _text(facts, key)


def _number_or_none(facts: dict[str, Any], key: str) -> int | None:
    value = _value(facts, key)
    if value is not None and not isinstance(value, int):
        raise ValueError(f"{key} is {value!r}, and no whole number")
    return value


def _texts(facts: dict[str, Any], key: str) -> list[str]:
    values = _value(facts, key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{key} is {values!r}, and no list of texts")
    return values


def _versions(facts: dict[str, Any]) -> dict[str, str] | None:
    values = facts.get("packages")
    if values is not None and not (isinstance(values, dict) and all(isinstance(one, str) for one in values.values())):
        raise ValueError(f"packages is {values!r}, and no versions by package")
    return values


def _capability(text: str) -> ComputeCapability:
    major, _, minor = text.partition(".")
    if not major.isdecimal() or not minor.isdecimal():
        raise ValueError(f"compute_capabilities has {text!r}, which is not written like 9.0")
    return int(major), int(minor)


def _runs_on(flag: str, capability: ComputeCapability) -> bool:
    match = _FLAG.fullmatch(flag)
    if match is None:
        return False
    kind, major, minor, suffix = match.groups()
    compiled = (int(major), int(minor))
    if suffix == "a":
        return compiled == capability
    if kind == "compute" and not suffix:
        return compiled <= capability
    return compiled[0] == capability[0] and compiled[1] <= capability[1]
