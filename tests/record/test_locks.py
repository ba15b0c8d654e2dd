"""Locks against installed packages: on made-up distributions, and on the project's own locks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tunebook.record.locks import (
    LOCKED_PYTHON,
    generation_versions,
    installed_versions,
    lock_differences,
    locked_versions,
)


def distribution(folder: Path, name: str, version: str, origin: dict[str, object] | None = None) -> None:
    """The metadata of an installed package; `origin` if it did not come from a registry."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if origin is not None:
        (info / "direct_url.json").write_text(json.dumps(origin))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on `sys.path`."""
    monkeypatch.setattr(sys, "path", [str(tmp_path / "first"), str(tmp_path / "second")])
    return tmp_path


def test_a_lock_is_read_for_this_machine_and_by_canonical_name() -> None:
    lock = (
        "# Written by `make lock`\n"
        "Antlr4_Runtime==4.9.3 \\\n    --hash=sha256:00 \\\n    --hash=sha256:01\n    # via hydra\n"
        "colorama==0.4.6 ; sys_platform == 'win32' \\\n    --hash=sha256:02\n"
        "triton==3.7.1 ; sys_platform == 'linux' \\\n    --hash=sha256:03\n"
    )
    assert locked_versions(lock) == {"antlr4-runtime": "4.9.3", "triton": "3.7.1"}


def test_the_first_of_two_installed_versions_counts_and_vendored_copies_do_not(installed: Path) -> None:
    distribution(installed / "first", "Torch", "2.11.0")
    distribution(installed / "second", "torch", "2.13.0")
    distribution(installed / "second", "Antlr4_Runtime", "4.9.3")
    vendored = installed / "second" / "setuptools" / "_vendor"
    distribution(vendored, "zipp", "3.23.0")
    sys.path.append(str(vendored))  # as `import setuptools` does
    assert installed_versions() == {"torch": "2.11.0", "antlr4-runtime": "4.9.3"}


def test_packages_from_a_repository_or_folder_differ_from_the_lock(installed: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    distribution(installed / "first", "trl", "1.16.0", {"vcs_info": {"vcs": "git", "commit_id": commit}})
    distribution(installed / "first", "peft", "0.21.2", {"dir_info": {"editable": True}})
    distribution(installed / "first", "flash-attn", "2.8.3.post2", {"archive_info": {}})  # a wheel named by its path
    distribution(installed / "first", "tunebook", "0.1.0", {"dir_info": {"editable": True}})
    (installed / "first" / "broken-1.0.dist-info").mkdir()
    assert installed_versions() == {
        "trl": "1.16.0 (commit 0123456789ab)", "peft": "0.21.2 (from a folder)", "flash-attn": "2.8.3.post2",
        "tunebook": "0.1.0",
    }  # fmt: skip


def test_every_difference_is_named_in_both_directions_and_optional_packages_may_be_missing() -> None:
    locked = {"torch": "2.13.0", "numpy": "2.4.6", "rich": "15.0.0"}
    optional = {"pytest": "9.2.0", "pip": "26.3", "ray": "2.60.0"}
    found = {
        "torch": "2.13.0+cpu", "rich": "15.0.0", "pytest": "9.2.0", "pip": "24.0", "wandb": "0.31.0", "tunebook": "1",
    }  # fmt: skip
    assert lock_differences(locked, found, optional) == {
        "numpy": {"installed": None, "locked": "2.4.6"},
        "pip": {"installed": "24.0", "locked": "26.3"},
        "torch": {"installed": "2.13.0+cpu", "locked": "2.13.0"},
        "wandb": {"installed": "0.31.0", "locked": None},
    }


def test_the_locked_interpreter_is_that_of_the_images_and_of_the_resolver(project_root: Path) -> None:
    assert f"/lib/python{LOCKED_PYTHON}/" in (project_root / "docker/Dockerfile").read_text()
    assert f'OLDEST_PYTHON = "{LOCKED_PYTHON}"' in (project_root / "docker/make_locks.py").read_text()


def test_the_build_of_torch_decides_which_lock_of_the_cpu_counts(project_root: Path) -> None:
    folder = project_root / "docker/cpu"
    own, registry = ({"torch": version} for version in ("2.13.0+cpu", "2.13.0"))
    assert generation_versions(folder, own)["torch"] == "2.13.0+cpu"
    assert "nvidia-cublas" not in generation_versions(folder, own)
    assert generation_versions(folder, registry)["torch"] == "2.13.0"
    assert generation_versions(folder, registry)["nvidia-cublas"] == "13.1.1.3"
    assert generation_versions(project_root / "docker/hopper", own)["torch"] == "2.13.0"  # a CPU build does not serve
