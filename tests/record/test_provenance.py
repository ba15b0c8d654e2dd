from __future__ import annotations

import json
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from tunebook.config.book import book_root
from tunebook.record.locks import installed_versions
from tunebook.record.provenance import (
    describe_code,
    describe_command,
    describe_environment,
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "book"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "code.py").write_text("x = 1\n")
    git(folder, "init", "--quiet")
    return folder


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.invalid")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path) -> str:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "a commit")
    return git(folder, "rev-parse", "HEAD")


def test_code_is_its_commit_and_a_hash_of_what_was_changed_and_added(checkout: Path) -> None:
    head = commit(checkout)
    assert describe_code(checkout) == {"git_commit": head, "git_diff_sha256": None, "is_clean": True, "reason": None}
    hashes = []
    for name, text in (
        ("code.py", "x = 2\n"),
        ("code.py", "x = 3\n"),
        ("added.py", "y = 1\n"),
        ("added.py", "y = 2\n"),
    ):
        (checkout / "src" / name).write_text(text)
        hashes.append(describe_code(checkout)["git_diff_sha256"])
    assert len(set(hashes)) == 4
    assert describe_code(checkout)["git_diff_sha256"] == hashes[-1]  # the same content, the same hash
    assert describe_code(checkout)["is_clean"] is False


def test_missing_commit_checkout_or_git_is_null_with_a_reason(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert describe_code(checkout)["reason"] == "the checkout has no commit yet"
    commit(checkout)
    # An installed book inside somebody's repository must not borrow its commit.
    assert describe_code(checkout / "src") == {
        "git_commit": None, "git_diff_sha256": None, "is_clean": None, "reason": "the book is not a git checkout",
    }  # fmt: skip
    assert describe_code(tmp_path)["reason"] == "the book is not a git checkout"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert describe_code(checkout)["reason"] == "git is not installed"


@pytest.fixture
def image_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The environment of an image for A100s that was built from a checkout with changes."""
    file = tmp_path / "image.json"
    facts = {
        "generation": "ampere", "torch": "2.13.0", "cuda": "13.0", "min_driver": 580,
        "compute_capabilities": ["8.0"], "arch_list": ["sm_80"], "attention": "flash-attn-2", "lock_sha256": "1" * 64,
        "sources_sha256": "2" * 64, "git_commit": "3" * 40, "git_diff_sha256": "4" * 64,
        "base_image": "debian:12.12-slim",
    }  # fmt: skip
    packages = installed_versions()
    del packages["pytest"]  # the lock of what checks the project may be installed besides
    packages.pop("tunebook", None)
    file.write_text(json.dumps(facts | {"packages": packages}))
    monkeypatch.setenv("TUNEBOOK_IMAGE_FILE", str(file))
    return file


def test_code_of_an_image_is_the_one_it_was_built_from(checkout: Path, image_file: Path) -> None:
    commit(checkout)
    expected = {"git_commit": "3" * 40, "git_diff_sha256": "4" * 64, "is_clean": False, "reason": None}
    assert describe_code(checkout) == expected
    text = image_file.read_text()
    image_file.write_text(text.replace(f'"{"4" * 64}"', "null"))
    assert describe_code(checkout) == expected | {"git_diff_sha256": None, "is_clean": True}
    image_file.write_text(text.replace(f'"{"3" * 40}"', "null"))
    assert describe_code(checkout) == {
        "git_commit": None, "git_diff_sha256": None, "is_clean": None,
        "reason": "the image was built without a git checkout",
    }  # fmt: skip


def test_an_image_has_the_lock_that_it_was_built_from(image_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = "a.registry/tunebook@sha256:abc"
    monkeypatch.setenv("TUNEBOOK_IMAGE_DIGEST", reference)
    monkeypatch.setattr(platform, "python_version", lambda: "3.11.2")
    environment = describe_environment("cpu")  # whatever the run computes on
    assert (environment["image_digest"], environment["lock_sha256"]) == (reference, "1" * 64)
    assert environment["lock"]["differences"] == {}
    assert environment["image"] == {
        "generation": "ampere", "sources_sha256": "2" * 64, "torch": "2.13.0", "cuda": "13.0",
        "attention": "flash-attn-2", "base_image": "debian:12.12-slim",
    }  # fmt: skip
    facts = json.loads(image_file.read_text())
    facts["packages"]["torch"] = "2.13.1"
    image_file.write_text(json.dumps(facts))
    environment = describe_environment("cpu")
    assert (environment["lock"]["name"], environment["lock_sha256"]) == ("ampere", None)
    assert environment["lock"]["differences"] == {
        "torch": {"installed": installed_versions()["torch"], "locked": "2.13.1"}
    }


def test_variables_and_commands_are_recorded_without_secrets_and_home_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = describe_environment("cpu")["variables"]
    variables = {
        "HOME": "/home/someone", "NCCL_CONF_FILE": "/home/someone/nccl.conf", "NVIDIA_TF32_OVERRIDE": "0",
        "PYTORCH_ALLOC_CONF": "expandable_segments:False", "HF_TOKEN": "hf_1", "NVIDIA_VISIBLE_DEVICES": "all",
        "TORCH_COMPILE_DISABLE": "1", "TORCHDYNAMO_DISABLE": "1", "TORCH_HOME": "/t", "TORCHINDUCTOR_CACHE_DIR": "/c",
        "WANDB_API_KEY": "0123456789abcdef0123", "NCCL_SECRET": "something-secret-and-long",
        "NCCL_DEBUG_FILE": "/tmp/0123456789abcdef0123",
    }  # fmt: skip
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    assert describe_environment("cpu")["variables"] == recorded | {
        "NCCL_CONF_FILE": "~/nccl.conf", "NVIDIA_TF32_OVERRIDE": "0", "NCCL_DEBUG_FILE": "/tmp/***",
        "PYTORCH_ALLOC_CONF": "expandable_segments:False", "TORCH_COMPILE_DISABLE": "1", "TORCHDYNAMO_DISABLE": "1",
    }  # fmt: skip
    words = ["tunebook", "train", "--recipes-dir", "/x/0123456789abcdef0123", "seed=1"]
    assert describe_command(words) == ["tunebook", "train", "--recipes-dir", "/x/***", "seed=1"]
    arguments = ["dataset.path=/home/someone/data.jsonl", f"model.path={book_root()}/recipes/x", "a=/home/someones/b"]
    assert describe_command(["/home/someone/.venv/bin/tunebook", *arguments]) == [
        "tunebook", "dataset.path=~/data.jsonl", "model.path=book:recipes/x", "a=/home/someones/b",
    ]  # fmt: skip
    assert describe_command(["/x/tunebook/__main__.py", "plan"]) == ["tunebook", "plan"]
