"""The description of an image, and the GPUs that its torch supports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tunebook.errors import RequestError
from tunebook.hardware.image import IMAGE_FILE_VARIABLE, Image, read_image

AMPERE: dict[str, Any] = {
    "generation": "ampere",
    "torch": "2.13.0",
    "cuda": "13.0",
    "min_driver": 580,
    "compute_capabilities": ["8.0", "8.6", "8.9"],
    "arch_list": ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"],
    "attention": "flash-attn-2",
    "lock_sha256": "1" * 64,
    "sources_sha256": "2" * 64,
    "git_commit": "3" * 40,
    "git_diff_sha256": None,
    "base_image": "debian:12.12-slim",
    "packages": {"torch": "2.13.0", "pip": "26.3"},
}
CPU = AMPERE | {
    "generation": "cpu", "cuda": None, "min_driver": None, "compute_capabilities": [], "arch_list": [],
    "attention": "none", "git_commit": None,
}  # fmt: skip


def image(tmp_path: Path, facts: Any) -> Image | None:
    file = tmp_path / "image.json"
    file.write_text(facts if isinstance(facts, str) else json.dumps(facts), encoding="utf-8")
    return read_image({IMAGE_FILE_VARIABLE: str(file)})


def test_an_image_for_gpus_one_without_and_none(tmp_path: Path) -> None:
    ampere = image(tmp_path, AMPERE | {"num_packages": 140})  # what a later build adds does not hurt
    assert ampere is not None and ampere.is_for_gpus
    assert (ampere.generation, ampere.min_driver, ampere.attention) == ("ampere", 580, "flash-attn-2")
    assert ampere.compute_capabilities == ((8, 0), (8, 6), (8, 9))
    assert ampere.packages["torch"] == "2.13.0"
    cpu = image(tmp_path, CPU)
    assert cpu is not None and not cpu.is_for_gpus
    assert (cpu.cuda, cpu.min_driver, cpu.attention, cpu.git_commit) == (None, None, None, None)
    assert not cpu.has_code_for((8, 0))
    assert read_image({}) is None


@pytest.mark.parametrize(
    ("flags", "capability", "has_code"),
    [
        (["sm_75", "sm_80"], (7, 0), False),
        (["sm_75", "sm_80"], (8, 9), True),  # a newer minor version of the same major one
        (["sm_86"], (8, 0), False),  # an older one
        (["sm_90a"], (9, 0), True),
        (["sm_100a"], (10, 3), False),
        (["sm_100f"], (10, 3), True),
        (["compute_90"], (12, 0), True),  # the driver compiles PTX for newer GPUs
        (["compute_100f"], (12, 0), False),
        (["gfx90a"], (9, 0), False),
    ],
)
def test_what_torchs_flags_run_on(
    tmp_path: Path, flags: list[str], capability: tuple[int, int], has_code: bool
) -> None:
    description = image(tmp_path, AMPERE | {"arch_list": flags})
    assert description is not None
    assert description.has_code_for(capability) is has_code


@pytest.mark.parametrize("facts", ["{", "[]", {}, AMPERE | {"compute_capabilities": ["80"]}], ids=str)
def test_damaged_file_is_named_with_a_fix(tmp_path: Path, facts: Any) -> None:
    with pytest.raises(RequestError, match=r"image\.json") as caught:
        image(tmp_path, facts)
    assert caught.value.problem_id == "image-file-broken"
