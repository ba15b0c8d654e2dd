"""The container image that this process runs in: what its build found out about it, read from one file.

The build writes `image.json` after checking it; the image names it in `TUNEBOOK_IMAGE_FILE`. Without that variable this
is no image of Tunebook's.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

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
    packages: Mapping[str, str]  # locked versions, which the build found installed

    @property
    def is_for_gpus(self) -> bool:
        """Whether it is made for any GPU at all."""
        return bool(self.compute_capabilities)

    def has_code_for(self, capability: ComputeCapability) -> bool:
        """Whether the torch in it runs on a GPU of this compute capability.

        Source: CUDA C++ Programming Guide, "Application Compatibility": machine code runs on the same major version
        from its own minor one on, PTX on everything that is not older.
        """
        return any(_runs_on(flag, capability) for flag in self.arch_list)


def read_image(environment: Mapping[str, str] = os.environ) -> Image | None:
    """The image that this process runs in, or None. Raises: RequestError when its file is missing or damaged."""
    named = environment.get(IMAGE_FILE_VARIABLE)
    if not named:
        return None
    try:
        stated = json.loads(Path(named).read_text(encoding="utf-8"))
        facts = {field.name: stated[field.name] for field in fields(Image)}
        pairs = (text.split(".") for text in facts["compute_capabilities"])
        facts["compute_capabilities"] = tuple((int(major), int(minor)) for major, minor in pairs)
        facts["arch_list"] = tuple(facts["arch_list"])
        facts["attention"] = None if facts["attention"] == _NO_ATTENTION else facts["attention"]
        return Image(**facts)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(
            f"{IMAGE_FILE_VARIABLE}={named}: this file says what the image is made of, and cannot be used: {error!r}; "
            f"build the image again with `make image`, or outside of a container unset {IMAGE_FILE_VARIABLE}",
            problem_id="image-file-broken",
        ) from error


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
