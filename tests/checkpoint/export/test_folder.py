"""The folder of an export: never over anything, room asked for first, renamed when whole, nothing left otherwise."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tunebook.checkpoint.export.folder import check_target, new_folder
from tunebook.errors import DoesNotFitError, RequestError


def test_what_exists_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    for name, what in (("file", "is a file"), ("dangling", "exists"), (".", "exists")):
        with pytest.raises(RequestError, match=f"{what}, and an export never writes over") as raised:
            check_target(tmp_path / name, tmp_path / "run")
        assert raised.value.problem_id == "export-target"
    assert check_target(tmp_path / "new", tmp_path / "run") == tmp_path / "new"


@pytest.mark.parametrize("inside", ["checkpoints/checkpoint-3/export", "model/export", "exports/../model/x"])
def test_a_place_in_what_is_exported_is_refused(tmp_path: Path, inside: str) -> None:
    with pytest.raises(RequestError, match="whose files are listed in its records"):
        check_target(tmp_path / inside, tmp_path)


def test_it_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    place = tmp_path / "new" / "export"
    with new_folder(place) as work:
        assert work.parent == place.parent and work.name.startswith(".export.unfinished-")
        (work / "a").write_text("x")
        assert not place.exists()
    assert [path.name for path in place.parent.iterdir()] == ["export"]
    assert (place / "a").read_text() == "x"


EXPORTS = """
import sys
from pathlib import Path
from tunebook.checkpoint.export.folder import new_folder



with new_folder(Path(sys.argv[1])) as work:
    (work / "model.safetensors").write_bytes(bytes(1000))
    print(work, flush=True)
    sys.stdin.read()
"""


def begun(place: Path) -> tuple[subprocess.Popen[str], Path]:
    """An export in a process of its own, that has written a file, and the folder that it works in."""
    process = subprocess.Popen(
        [sys.executable, "-c", EXPORTS, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_export_has_left_is_removed_by_the_next_and_another_at_work_is_not(tmp_path: Path) -> None:
    place = tmp_path / "[model] 1"
    (killed, left), (at_work, kept), (_, other) = begun(place), begun(place), (None, tmp_path / ".other.unfinished-1-a")
    other.mkdir()
    killed.kill()
    killed.communicate()
    assert (left / "model.safetensors").stat().st_size == 1000
    with new_folder(place) as work:
        assert sorted(tmp_path.iterdir()) == sorted([work, kept, other])
    at_work.communicate("")
    assert at_work.returncode != 0  # its place was taken meanwhile
    assert sorted(tmp_path.iterdir()) == sorted([place, other])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("x"), RequestError("x")])
def test_a_failed_one_leaves_no_trace(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), new_folder(tmp_path / "new" / "deep" / "export") as work:
        (work / "a").write_text("x")
        raise error
    assert not list(tmp_path.iterdir())


def test_a_folder_that_came_into_being_meanwhile_stays(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="was created during the export"), new_folder(tmp_path / "export"):
        (tmp_path / "export").mkdir()
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


@pytest.mark.parametrize(
    ("code", "kind", "says"),
    [
        (errno.ENOSPC, DoesNotFitError, "filled up during the export, and nothing of it was kept"),
        (errno.EDQUOT, DoesNotFitError, "filled up"),
        (errno.EROFS, RequestError, r"cannot be written: Read-only .*--to FOLDER"),
        (errno.EACCES, RequestError, "cannot be written"),
    ],
)
def test_what_the_system_says_is_put_into_words(tmp_path: Path, code: int, kind: type[Exception], says: str) -> None:
    words = {errno.EROFS: "Read-only file system"}.get(code, "words")
    with pytest.raises(kind, match=says), new_folder(tmp_path / "export"):
        raise OSError(code, words, "model.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_really_full_keeps_nothing(tmp_path: Path, small_disk: Callable[[Path, int], Any]) -> None:
    disk = small_disk(tmp_path / "disk", 2**20)
    disk.fill(leave_bytes=2**16)
    with (
        pytest.raises(DoesNotFitError, match="filled up during the export"),
        new_folder(disk.folder / "export") as work,
    ):
        (work / "config.json").write_text("{}")
        (work / "model.safetensors").write_bytes(bytes(2**17))
    assert [path.name for path in disk.folder.iterdir()] == ["filler"]
    assert disk.free_bytes == 2**16


def test_a_folder_that_is_really_read_only_is_refused(tmp_path: Path, small_disk: Callable[[Path, int], Any]) -> None:
    disk = small_disk(tmp_path / "disk", 2**20)
    disk.set_read_only(True)
    said = r"cannot be written: Read-only file system .*--to FOLDER"
    with pytest.raises(RequestError, match=said), new_folder(disk.folder / "export"):
        pass
