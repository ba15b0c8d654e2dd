"""The folder of an export: never over anything, room asked for first, renamed when whole, nothing left otherwise."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace

import pytest

from tunebook.checkpoint.export.folder import beside, check_room, check_target
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


def test_room_is_asked_for_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimpleNamespace(total=10 * 2**30, free=2**30)
    monkeypatch.setattr("shutil.disk_usage", lambda _: disk)
    check_room(tmp_path / "a" / "b", 2**30 - 50_000_000)
    with pytest.raises(DoesNotFitError, match=r"has 1\.00 GiB free and the export takes 3\.00 GiB; .*--to"):
        check_room(tmp_path / "a" / "b", 3 * 2**30)
    disk.total = 0  # a file system that does not count
    check_room(tmp_path, 3 * 2**30)


def test_it_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    place = tmp_path / "new" / "export"
    with beside(place) as work:
        assert work.parent == place.parent and work.name.startswith(".export.unfinished-")
        (work / "a").write_text("x")
        assert not place.exists()
    assert [path.name for path in place.parent.iterdir()] == ["export"]
    assert (place / "a").read_text() == "x"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("x"), RequestError("x")])
def test_a_failed_one_leaves_no_trace(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), beside(tmp_path / "new" / "deep" / "export") as work:
        (work / "a").write_text("x")
        raise error
    assert not list(tmp_path.iterdir())


def test_a_folder_that_came_into_being_meanwhile_stays(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="came into being while"), beside(tmp_path / "export"):
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
    with pytest.raises(kind, match=says), beside(tmp_path / "export"):
        raise OSError(code, words, "model.safetensors")
    assert not list(tmp_path.iterdir())
