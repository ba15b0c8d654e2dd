"""Nothing is too deep, too closed or too many to be removed, and nothing else is touched."""

from __future__ import annotations

import os

import pytest

from tunebook.evaluate.sandbox.cleaning import become, owned_by, remove, writable_by_all


def test_files_links_and_closed_folders(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    folder = tmp_path / "folder"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "file").write_text("x")
    (folder / "a" / "link").symlink_to(outside)
    (folder / "broken").symlink_to("/nowhere")
    os.mkfifo(folder / "pipe")
    (folder / "moved-1").mkdir()
    (folder / "a" / "b").chmod(0)
    (folder / "a").chmod(0)
    folder.chmod(0)
    remove(str(folder))
    assert not folder.exists()
    assert (outside / "kept").read_text() == "x"


def test_a_link_to_a_folder_is_removed_and_not_the_folder(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    remove(str(tmp_path / "link"))
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_deeper_than_any_path_may_be(tmp_path):
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(700):
        os.mkdir("folder", dir_fd=here)
        inner = os.open("folder", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    remove(str(tmp_path / "folder"))
    assert list(tmp_path.iterdir()) == []


def test_what_a_user_owns_is_found(tmp_path):
    (tmp_path / "mine").write_text("x")
    (tmp_path / "link").symlink_to("/")
    assert sorted(owned_by(os.getuid(), [str(tmp_path), "/nonexistent"])) == [
        str(tmp_path / "link"),
        str(tmp_path / "mine"),
    ]
    assert owned_by(os.getuid() + 1, [str(tmp_path)]) == []


def test_folders_that_everybody_may_write_to(tmp_path):
    for name, mode in (("open", 0o1777), ("closed", 0o755)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    (tmp_path / "same").symlink_to(tmp_path / "open")
    names = [str(tmp_path / name) for name in ("open", "closed", "same", "missing")]
    assert writable_by_all([*names, "/proc"]) == [str(tmp_path / "open")]


def test_it_becomes_nobody_that_the_system_knows():
    with pytest.raises(ValueError, match="uid 0 is no program's"):
        become(0, 1_879_048_192)
    with pytest.raises(ValueError, match="uid 33 is no program's"):
        become(1_879_048_192, 33)
