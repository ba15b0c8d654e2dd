"""docker/check_image.py, on made-up and on real inputs."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DOCKER = Path(__file__).resolve().parents[2] / "docker"


spec = importlib.util.spec_from_file_location("check_image", DOCKER / "check_image.py")
sys.modules["check_image"] = importlib.util.module_from_spec(spec)  # where dataclasses look their module up
spec.loader.exec_module(sys.modules["check_image"])
check_image = sys.modules["check_image"]


@pytest.mark.parametrize("generation", ["cpu", "volta", "ampere", "hopper", "blackwell"])
def test_every_lock_of_the_project_is_read(generation: str) -> None:
    settings = check_image.read_settings(DOCKER / generation / "generation.env")
    expected = check_image.expected_versions(DOCKER / generation, {"torch": "2.13.0+cpu"}, settings["ATTENTION"])
    assert expected["torch"].split("+")[0] == settings["TORCH"]
    assert {"pip", "transformers", "deepspeed"} <= expected.keys()
    assert ("flash-attn" in expected) == (settings["ATTENTION"] == "flash-attn-2")
    assert "flash-attn" not in check_image.expected_versions(DOCKER / generation, {"torch": "2.13.0+cpu"}, "none")


def test_the_build_finds_what_the_check_imports(tmp_path: Path) -> None:
    """Tunebook is not installed in that stage; without .pth files this checkout is not found here either."""
    mounts = re.findall(r"source=(\S+\.py),target=/build/(\S+\.py)", (DOCKER / "Dockerfile").read_text())
    assert len(mounts) == 2
    for source, target in mounts:
        (tmp_path / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(DOCKER.parent / source, tmp_path / target)
    packages = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(pytest.__file__).parents[1])}
    command = [sys.executable, "-B", "-S", str(tmp_path / "check_image.py")]
    done = subprocess.run(command, env=packages, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.partition(":")[0]) == (2, "Check an image while it is built")


# --- versions


def test_differences_from_the_lock_are_named_in_both_directions() -> None:
    expected = {"trl": "1.16.0", "peft": "0.21.2", "rich": "15.0.0", "torch": "2.13.0"}
    installed = {"trl": "1.15.0", "rich": "15.0.0", "torch": "2.13.0+cpu", "requests": "2.0", "tunebook": "0.1.0"}
    assert check_image.version_problems(expected, installed) == [
        "peft 0.21.2 is locked but not installed",
        "requests 2.0 is installed but in no lock",
        "torch 2.13.0+cpu is installed, but 2.13.0 is locked",
        "trl 1.15.0 is installed, but 1.16.0 is locked",
    ]


# --- architectures

CPU_BUILD = {"cuda": None, "arch_list": []}


@pytest.mark.parametrize(
    ("generation", "changed", "keys"),
    [
        ("hopper", {}, []),
        ("cpu", {}, []),  # the CUDA build serves, too
        ("cpu", CPU_BUILD, []),
        ("hopper", {"version": "2.10.0+cu128", "cuda": "12.8", "arch_list": ["sm_80"]}, ["TORCH", "CUDA", "9.0"]),
        ("hopper", CPU_BUILD, ["CUDA", "9.0"]),
    ],
)
def test_torch_is_compared_with_generation_env(generation: str, changed: dict[str, object], keys: list[str]) -> None:
    torch = {"version": "2.13.0+cu130", "cuda": "13.0", "arch_list": ["sm_80", "sm_90", "compute_120"]} | changed
    settings = check_image.read_settings(DOCKER / generation / "generation.env")
    problems = check_image.torch_problems(settings, check_image.TorchFacts(**torch))
    assert len(problems) == len(keys)
    assert all(re.search(rf"\b{key}\b", problem) for key, problem in zip(keys, problems, strict=True))


# --- the image


def test_a_problem_fails_the_build_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"generation": "hopper", "torch": "2.13.0", "min_driver": 580, "lock_sha256": "aa", "num_packages": 150}
    (tmp_path / "packages.json").write_text(json.dumps(facts | {"attention": "none"}))
    (tmp_path / "sources.sha256").write_text("cc\n")
    monkeypatch.setenv("TORCH", "2.10.0")
    assert check_image.main(["image", str(tmp_path)]) == 1
    assert not (tmp_path / "image.json").exists()
    monkeypatch.delenv("TORCH")
    assert check_image.main(["image", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "image.json").read_text())["sources_sha256"] == "cc"
