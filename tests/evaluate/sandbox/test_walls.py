"""Nothing is too deep, too closed or too many to be removed, and nothing else is touched."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import pytest

from tunebook.evaluate.sandbox.limits import Limits
from tunebook.evaluate.sandbox.walls import FIRST_UIDS, NONE, Wall, WallError, descendants, find_slots, fresh_uids


@pytest.fixture
def slot():
    """Not in pytest's folders, which are closed to the users that programs are."""
    folder = Path(tempfile.mkdtemp(prefix="tunebook-test-", dir="/tmp"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


def in_child(action):
    """Do something in a process of its own, because a wall ends all children of its process; whether it succeeded."""
    process = os.fork()
    if process == 0:
        try:
            action()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitpid(process, 0)[1] == 0


def files_links_and_closed_folders(room):
    Path("a/b").mkdir(parents=True)
    for name in ("a/b/file", "odd \n *", "-rf"):
        Path(name).touch()
    Path("a/link").symlink_to("/etc")
    Path("link").symlink_to("/etc")
    Path("broken").symlink_to("/nowhere")
    os.mkfifo("pipe")
    Path("a/b").chmod(0)
    Path("a").chmod(0)


def deeper_than_any_path_may_be(room):
    for _ in range(30):  # a path may have 4096 bytes
        Path("x" * 200).mkdir()
        os.chdir("x" * 200)


def more_files_than_a_command_may_name(room):
    for number in range(8_700):  # 2 MiB of names
        Path(f"{number}-{'x' * 240}").touch()


def its_own_folder_and_those_of_others(room):
    Path("file").touch()
    if os.geteuid() != os.getuid():  # only root can give each program a uid of its own
        for action in (room.rmdir, room.parent.iterdir, lambda: room.rename(f"{room}-2"), lambda: room.chmod(0o777)):
            with pytest.raises(PermissionError):
                list(action())


@pytest.mark.parametrize(
    "program",
    [
        files_links_and_closed_folders,
        deeper_than_any_path_may_be,
        more_files_than_a_command_may_name,
        its_own_folder_and_those_of_others,
    ],
)
def test_what_a_program_leaves_is_removed(slot, program):
    def trial():
        wall = Wall(NONE, Limits(), slot, 0)
        user, folder = wall.new_home()
        os.chdir(folder)
        if user is not None:
            os.seteuid(user)
        program(Path(folder))
        os.seteuid(os.getuid())
        assert any(Path(folder).iterdir())
        assert not wall.clear()

    assert in_child(trial)
    assert list(slot.iterdir()) == []


def test_what_a_killed_worker_left_is_removed_by_the_next(slot):
    user, folder = Wall(NONE, Limits(), slot, 0).new_home()
    left = Path(folder, "folder")
    left.mkdir()
    if user is not None:
        os.chown(left, user, user)
    left.chmod(0)
    Wall(NONE, Limits(), slot, 0)
    assert list(slot.iterdir()) == []


def test_slots_must_be_disks_of_a_size(tmp_path):
    with pytest.raises(WallError, match=r"is not a separate disk.*--tmpfs .*:size=67108864,nr_inodes=4096,mode=711"):
        find_slots(tmp_path, Limits())
    with pytest.raises(WallError, match="has no size that would stop a program"):
        find_slots(Path("/"), Limits())


def test_uids_are_used_again_only_after_all_others():
    fresh = fresh_uids(3)
    taken = [next(fresh) for _ in range(2048)]
    assert len(set(taken)) == 2048
    assert next(fresh) == taken[0]
    assert min(taken) >= FIRST_UIDS[-1]
    assert not set(taken) & {next(fresh_uids(2)), next(fresh_uids(4))}


# Ends its main thread, after which it looks like a zombie, and goes on in another.
WITHOUT_MAIN_THREAD = """
import ctypes, os, threading, time

def go_on():
    kept = bytearray(200 << 20)
    kept[::4096] = b"x" * len(kept[::4096])
    os.write(1, b".")
    time.sleep(600)

threading.Thread(target=go_on).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_program_whose_main_thread_has_ended_is_still_there_with_its_memory():
    program = subprocess.Popen([sys.executable, "-c", WITHOUT_MAIN_THREAD], stdout=subprocess.PIPE)
    try:
        assert program.stdout.read(1) == b"."
        status = Path(f"/proc/{program.pid}/stat")
        while status.read_text().rpartition(")")[2].split()[0] != "Z":
            pass
        assert descendants(os.getpid())[program.pid] > 200 << 20
    finally:
        program.kill()
        program.communicate()
    assert program.pid not in descendants(os.getpid())
