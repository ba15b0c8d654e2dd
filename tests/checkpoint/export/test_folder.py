"""The folder of an export: never over anything, room asked for first, renamed when whole, nothing left otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tunebook.checkpoint.export.write import new_folder
from tunebook.errors import DoesNotFitError, RequestError


def test_what_exists_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("file", "dangling", "."):
        with pytest.raises(RequestError) as raised, new_folder(tmp_path / name):
            pass
        assert raised.value.problem_id == "export-target"


def test_it_has_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    place = tmp_path / "new" / "export"
    with new_folder(place) as work:
        assert work.parent == place.parent and work.name == ".export.unfinished"
        (work / "a").write_text("x")
        assert not place.exists()
    assert [path.name for path in place.parent.iterdir()] == ["export"]
    assert (place / "a").read_text() == "x"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("x"), RequestError("x")])
def test_a_failed_one_leaves_no_trace(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), new_folder(tmp_path / "export") as work:
        (work / "a").write_text("x")
        raise error
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_really_full_keeps_nothing(tmp_path: Path, small_disk: Callable[[Path, int], Any]) -> None:
    disk = small_disk(tmp_path / "disk", 2**20)
    disk.fill(leave_bytes=2**16)
    with (
        pytest.raises(DoesNotFitError),
        new_folder(disk.folder / "export") as work,
    ):
        (work / "config.json").write_text("{}")
        (work / "model.safetensors").write_bytes(bytes(2**17))
    assert [path.name for path in disk.folder.iterdir()] == ["filler"]
    assert disk.free_bytes == 2**16
