"""Recognizing a full disk in errors of every library."""

import errno
from types import SimpleNamespace

import pytest

from tunebook.errors import DoesNotFitError
from tunebook.hardware.disk import is_disk_full, require_space


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


@pytest.mark.parametrize(("needed", "fits"), [(2**30, True), (2**30 + 1, False)])
def test_free_space_is_required(monkeypatch, tmp_path, needed, fits):
    folder, disk = tmp_path / "not" / "there" / "yet", SimpleNamespace(total=2**60, free=2**30)
    monkeypatch.setattr("shutil.disk_usage", lambda path: disk if path == tmp_path else None)
    if fits:
        require_space(folder, needed, "this")
    else:
        with pytest.raises(DoesNotFitError) as raised:
            require_space(folder, needed, "this")
        assert raised.value.problem_id == "disk-full"
    disk.total = 0  # a file system that does not count
    require_space(folder, needed, "this")
