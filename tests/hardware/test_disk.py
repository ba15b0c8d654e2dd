"""Recognizing a full disk in errors of every library."""

import errno
from types import SimpleNamespace

import pytest

from tunebook.errors import DoesNotFitError
from tunebook.hardware.disk import disk_full, is_disk_full, no_space, require_space


def raised_from(cause):
    try:
        raise RuntimeError("saving failed") from cause
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),  # safetensors 0.8
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 645568 vs 645456"),  # torch 2.13
        raised_from(OSError(errno.ENOSPC, "No space left on device")),
        RuntimeError("basic_ios::clear: iostream error"),  # torch 2.13, where the disk fills up within a file's header
    ],
)
def test_a_full_disk(error):
    assert is_disk_full(error)


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "Permission denied"), ValueError("no"), raised_from(None)])
def test_anything_else(error):
    assert not is_disk_full(error)


def test_the_error_says_what_to_do(tmp_path):
    assert disk_full(tmp_path).exit_code == 3
    assert "training.keep_checkpoints=1" in disk_full(tmp_path).message


@pytest.mark.parametrize(
    ("needed", "free", "said"),
    [
        (2**30, 2**30, None),
        (40.5 * 2**30, 3 * 2**30, "3 GiB free and this takes about 40.5 GiB; free some space, keep fewer"),
        (2**20, 900 * 2**10, "900 KiB free and this takes about 1 MiB; "),
        (2**60, 15_000 * 2**30, "14.65 TiB free and this takes about 1.049e+06 TiB; "),
        (1024, 0, "0 bytes free and this takes about 1 KiB; "),
    ],
)
def test_free_space_is_required(monkeypatch, tmp_path, needed, free, said):
    folder, disk = tmp_path / "not" / "there" / "yet", SimpleNamespace(total=2**60, free=free)
    monkeypatch.setattr("shutil.disk_usage", lambda path: disk if path == tmp_path else None)
    if said is None:
        require_space(folder, needed, "this")
    else:
        with pytest.raises(DoesNotFitError) as raised:
            require_space(folder, needed, "this")
        assert raised.value.message.startswith(f"the disk of {folder} has {said}")
    disk.total = 0  # a file system that does not count
    require_space(folder, needed, "this")


def test_message_names_what_has_no_space(tmp_path):
    error = no_space("the report", tmp_path, "write elsewhere: x")
    assert (error.exit_code, error.problem_id) == (3, "disk-full")
    assert error.message.startswith(
        f"no space is left for the report: the disk of {tmp_path}, or a quota on it, is full"
    )
    assert error.message.endswith(" is full; write elsewhere: x")
