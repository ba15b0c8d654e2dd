"""Disk space for what recipes write, and the hub's cache and token."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from huggingface_hub import constants

from tunebook.doctor import storage
from tunebook.doctor.findings import Level
from tunebook.doctor.storage import (
    Space,
    cached_bytes,
    checkpoint_bytes,
    checkpoint_space,
    disk,
    disks,
    hub_space,
)
from tunebook.hardware.disk import existing

from .conftest import only, resolved

GIB = 2**30
P = 3085938688  # of Qwen2.5-3B
NAME, COMMIT = "some-organization/some-model", "0123456789abcdef0123456789abcdef01234567"
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("words", "weight", "optimizer"),
    [
        (["parallelism=ddp"], 4, 8),
        (["parallelism=fsdp"], 4, 8),
        (["parallelism=zero2"], 4, 16),  # two moments, and DeepSpeed's copies of the weights
        (["parallelism=ddp", "precision.master_weights=bf16"], 2, 4),
        (["parallelism=ddp", "optimizer=adamw_8bit"], 4, 2),
    ],
)
def test_bytes_of_a_checkpoint(words: list[str], weight: int, optimizer: int) -> None:
    assert checkpoint_bytes(resolved("qwen3b_zero2", *words)) == (weight, optimizer)


def test_checkpoints_kept_one_more_in_writing_and_the_model_at_the_end(tmp_path: Path) -> None:
    config = resolved("qwen3b_zero2", "parallelism=ddp")  # saves, and keeps 2
    space = checkpoint_space(config, tmp_path)
    assert space.needed == P * (4 + 3 * 12)
    assert "3 checkpoints of 34.49 GiB (training.keep_checkpoints=2" in space.why


def test_the_best_checkpoint_is_kept_too(tmp_path: Path) -> None:
    words = ["training.evaluate_every_steps=10", "training.save_every_steps=10", "dataset.validation_share=0.05"]
    config = resolved("qwen3b_zero2", "parallelism=ddp", *words, "training.load_best_at_end=true")
    space = checkpoint_space(config, tmp_path)
    assert space.needed == P * (4 + 4 * 12)
    assert "4 checkpoints of 34.49 GiB (training.keep_checkpoints=2, the best and the one in writing)" in space.why


def test_only_the_model_at_the_end_where_nothing_is_saved_meanwhile(tmp_path: Path) -> None:
    config = resolved("qwen3b_zero2", "parallelism=ddp", "training.save_every_steps=null")
    assert checkpoint_space(config, tmp_path).needed == P * 4


def test_an_adapter_is_too_small_to_count(tmp_path: Path) -> None:
    assert checkpoint_space(resolved("zero2_lora"), tmp_path).needed == 0
    assert checkpoint_space(None, tmp_path).needed == 0


def test_downloads_are_in_the_published_format(tmp_path: Path) -> None:
    space = hub_space(resolved("qwen3b_zero2"), tmp_path)
    assert space.needed == P * 2
    assert space.why.startswith("Qwen/Qwen2.5-3B")
    for word in ("model.weights=random", "model=quickstart"):
        assert hub_space(resolved("qwen3b_zero2", word), tmp_path).needed == 0


def test_what_is_in_the_cache_is_not_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(storage, "cached_bytes", lambda name, revision: None if name == "Qwen/Qwen2.5-3B" else 0)
    assert hub_space(resolved("qwen3b_zero2"), tmp_path).needed == 0


def test_partial_download_is_subtracted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(storage, "cached_bytes", lambda *_: 1000)
    found = hub_space(resolved("qwen3b_zero2"), tmp_path)
    assert (found.needed, found.why) == (P * 2 - 1000, "the rest of Qwen/Qwen2.5-3B (5.748 GiB)")


def test_a_name_that_the_hub_cannot_have_is_not_cached() -> None:
    assert cached_bytes("no/such/form", None) == cached_bytes("some-organization/some-model", None) == 0


def space(needed: int) -> Space:
    return Space(purpose="run folders", folder=Path("/a"), needed=needed, why="checkpoints")


@pytest.mark.parametrize(
    ("needed", "free", "level"),
    [
        (10 * GIB, 15 * GIB, Level.ok),
        (10 * GIB, 15 * GIB - 1, Level.warning),
        (10 * GIB, 10 * GIB, Level.warning),
        (10 * GIB, 10 * GIB - 1, Level.error),
        (0, 5 * GIB, Level.ok),
        (0, GIB, Level.warning),
    ],
)
def test_free_space_at_its_thresholds(needed: int, free: int, level: Level) -> None:
    assert disk([space(needed)], free).level is level


def spaces_of(*words: str) -> list[Space]:
    config = resolved("qwen3b_zero2", "parallelism=ddp", *words)
    return [checkpoint_space(config, Path("/a")), hub_space(config, Path("/b"))]


@pytest.mark.parametrize(
    ("words", "free", "offered"),
    [
        # Bytes a parameter: 4 of the model at the end, 12 of a checkpoint, 2 of the download
        ((), 30 * P, "training.keep_checkpoints=1, with which 86.22 GiB are needed; or another disk: "),
        ((), 30 * P - 1, "training.save_every_steps=null (nothing to resume from), with which 17.24 GiB are needed; "),
        ((), 6 * P - 1, "another disk: outputs=FOLDER (115 GiB), HF_HOME=FOLDER in front of the command (5.748 GiB); "
         "training.save_every_steps=null (nothing to resume from) still needs 17.24 GiB"),
        (("training.save_every_steps=null",), 6 * P - 1, "another disk: outputs=FOLDER (11.5 GiB), HF_HOME=FOLDER "),
        (("training.keep_checkpoints=1",), 30 * P - 1, "training.save_every_steps=null (nothing to resume from), "),
        (("training.load_best_at_end=true",), 30 * P - 1, "another disk: outputs=FOLDER (149.4 GiB), HF_HOME=FOLDER in "
         "front of the command (5.748 GiB); training.keep_checkpoints=1 still needs 120.7 GiB"),
    ],
    ids=["one", "none", "too_small", "already_none", "already_one", "best"],
)  # fmt: skip
def test_only_changes_with_which_everything_fits_are_offered(words: tuple[str, ...], free: int, offered: str) -> None:
    found = disk(spaces_of(*words), free)
    assert found.level is Level.error
    assert found.fix is not None and found.fix.startswith(offered)


def test_what_is_offered_then_fits() -> None:
    assert disk(spaces_of("training.keep_checkpoints=1"), 30 * P).level is not Level.error
    assert disk(spaces_of("training.save_every_steps=null"), 6 * P).level is not Level.error


def test_fix_searches_the_disk_of_the_folder() -> None:
    """`du -x` stays on the disk of its folder, so `/` would show nothing of another disk."""
    other = Space(purpose="run folders", folder=Path("/proc/self"), needed=0)
    assert disk([other], 0).fix == "free some space: du -xhd1 /proc | sort -h"
    on_root = [Space(purpose="run folders", folder=Path("/"), needed=0), hub_space(None, Path("/"))]
    assert disk(on_root, 0).fix == "free some space: du -xhd1 / | sort -h, docker system df, hf cache ls"


def test_needs_on_the_same_disk_are_added(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    spaces = [
        Space(purpose="runs", folder=tmp_path / "a" / "outputs", needed=2**60, why="checkpoints"),
        Space(purpose="models", folder=tmp_path / "b", needed=2**60, why="weights"),
    ]
    (found,) = disks(spaces)
    assert found.level is Level.error
    assert found.data["needed_gib"] == 2 * 2**30
    assert "checkpoints; weights" in found.what


def test_a_folder_that_cannot_be_written_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(storage.os, "access", lambda path, mode: False)
    found = only(list(disks([Space(purpose="run folders", folder=tmp_path / "x", needed=0)])), "folder-not-writable")
    assert found.level is Level.error
    assert str(tmp_path) in found.what


def test_file_in_place_of_a_folder_is_an_error() -> None:
    (found,) = disks([Space(purpose="prepared data", folder=Path("/dev/null/prepared"), needed=0)])
    assert (found.id, found.level) == ("folder-not-writable", Level.error)
    assert found.what == "/dev/null is not a folder, and prepared data go to /dev/null/prepared"


def test_a_folder_that_cannot_be_entered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(storage.os, "access", lambda path, mode: not mode & os.X_OK)
    assert "folder-not-writable" in {found.id for found in disks([Space(purpose="a", folder=tmp_path, needed=0)])}


def test_path_in_an_unreadable_folder_does_not_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(_: Path) -> bool:
        raise PermissionError("closed")

    monkeypatch.setattr(Path, "exists", refuse)
    assert existing(tmp_path / "a" / "b") == tmp_path


def test_the_nearest_folder_that_is_there(tmp_path: Path) -> None:
    assert existing(tmp_path / "a" / "b") == tmp_path
    assert existing(tmp_path) == tmp_path


# --- the hub


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The file of the hub's token with these permissions."""
    file = tmp_path / "token"
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(file))

    def write(mode: int) -> Path:
        file.write_text("hf_secretsecretsecret")
        file.chmod(mode)
        return file

    return write


def look(*words: str):
    config = resolved("qwen3b_zero2", *words)
    return storage.check_storage(config, Path("outputs"))


def test_without_a_token(token) -> None:
    found = only(look(), "hub-token")
    assert (found.level, found.data["is_there"]) == (Level.ok, False)
    assert only(look("training.push_to_hub=me/model"), "hub-token").level is Level.error


@pytest.mark.parametrize(("mode", "level"), [(0o600, Level.ok), (0o644, Level.warning), (0o640, Level.warning)])
def test_a_token_is_never_printed(token, mode: int, level: Level) -> None:
    file = token(mode)
    findings = look("training.push_to_hub=me/model")
    found = only(findings, "hub-token")
    assert (found.level, found.data) == (level, {"is_there": True, "source": str(file)})
    assert "secret" not in repr(findings)


@pytest.mark.parametrize("variable", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"])
def test_a_token_in_the_environment(token, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "hf_secretsecretsecret")
    findings = look()
    assert only(findings, "hub-token").what == f"a token for the hub is in {variable}"
    assert "secret" not in repr(findings)


def test_a_model_to_download_and_a_machine_told_to_stay_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = only(look(), "hub-model")
    assert (found.level, "hf download Qwen/Qwen2.5-3B; then" in found.fix) == (Level.error, True)
    pinned = only(look("model.revision=v1"), "hub-model").fix
    assert pinned is not None and "hf download Qwen/Qwen2.5-3B --revision v1; then" in pinned
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert only(look(), "hub-model").level is Level.ok
    assert "hub-model" not in {found.id for found in look("model.weights=random")}


def test_the_older_variable_of_a_machine_told_to_stay_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is used if the newer one is not set, as in the hub's library."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    found = only(look(), "hub-model")
    assert (found.level, "TRANSFORMERS_OFFLINE forbids" in found.what) == (Level.error, True)
    assert found.fix is not None and found.fix.endswith("or unset TRANSFORMERS_OFFLINE")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert only(look(), "hub-model").level is Level.ok


def test_a_token_that_cannot_be_read_is_a_finding_among_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path))
    findings = look()
    found = only(findings, "hub-token")
    assert (found.level, found.data["is_there"]) == (Level.error, False)
    assert found.fix is not None and found.fix.startswith(f"rm -r {tmp_path}, then hf auth login")
    assert "disk-space" in {other.id for other in findings}


def test_unreadable_token_file_is_ignored_if_a_variable_is_set(token, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("closed")

    monkeypatch.setenv("HF_TOKEN", "hf_secretsecretsecret")
    monkeypatch.setattr(Path, "stat", refuse)
    assert storage._token(None).what == "a token for the hub is in HF_TOKEN"


@pytest.fixture
def snapshot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder in which the hub's library keeps this model's files."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--some-organization--some-model"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    folder = model / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    return folder


def test_an_index_counts_only_with_all_of_its_shards(snapshot: Path) -> None:
    assert cached_bytes(NAME, None) == 0
    (snapshot / INDEX).write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    assert cached_bytes(NAME, None) == 0
    (snapshot / "1.safetensors").write_bytes(b"x" * 1000)
    assert cached_bytes(NAME, None) == 1000
    (snapshot / "2.safetensors").write_bytes(b"x")
    assert cached_bytes(NAME, None) is None
    assert cached_bytes(NAME, COMMIT) is None
    assert cached_bytes(NAME, "f" * 40) == 0


def test_a_single_file_is_all_of_them(snapshot: Path) -> None:
    (snapshot / "model.safetensors").write_bytes(b"x")
    assert cached_bytes(NAME, None) is None


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}'])
def test_a_damaged_index_names_nothing(snapshot: Path, content: str) -> None:
    (snapshot / INDEX).write_text(content)
    assert cached_bytes(NAME, None) == 0
