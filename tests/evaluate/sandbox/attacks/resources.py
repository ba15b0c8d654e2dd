"""Attacks that take all there is: processes, memory, time, disk, output."""

# Written as attackers would, not as this project does.
# ruff: noqa: PTH101, PTH102, PTH123, SIM105

import ctypes
import os
import resource
import signal
import sys
import threading
import time


def fork_bomb():
    """Fork in every process, a hundred times. Stopped as failed, timed_out, crashed, left_processes, memory."""
    end = time.time() + 20
    count = 0
    while time.time() < end:
        try:
            if os.fork() == 0:
                continue
            count += 1
        except OSError:
            time.sleep(0.001)
        if count > 100:
            return 42
    return 0


def thread_bomb():
    """A thousand threads. Stopped as failed, timed_out, memory."""
    for _ in range(1000):
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
    return 42


def memory_bomb():
    """Eight gigabytes, touched. Stopped as memory."""
    held = []
    for _ in range(512):
        held.append(bytearray(b"x" * (16 << 20)))
    return 42


def memory_in_many_processes():
    """Four gigabytes, in twenty processes that each stay below the limit of one. Stopped as memory."""
    for _ in range(20):
        if os.fork() == 0:
            held = b"x" * (200 << 20)
            time.sleep(30)
            os._exit(len(held))
    time.sleep(14)
    return 42


def memory_of_the_system():
    """Memory that no process's limit counts: a file without a name, and a segment of System V. Stopped as failed."""
    libc = ctypes.CDLL(None, use_errno=True)
    segment = libc.shmget(0, 32 << 20, 0o1666)
    try:
        return 42 if os.memfd_create("x") >= 0 else 0
    except OSError:
        return 42 if segment >= 0 else 0


def endless_loop():
    """Never done. Stopped as timed_out."""
    while True:
        pass


def endless_start(at_once=True):
    """Never done, before its test begins. Stopped as timed_out."""
    while True:
        pass


def sleep_and_ignore_signals():
    """Asleep, deaf to every signal that can be ignored. Stopped as timed_out."""
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(100)


def output_flood():
    """A hundred megabytes of output. Stopped as output."""
    for _ in range(100):
        print("x" * (1 << 20))
    return 42


def output_flood_from_a_child():
    """Output without end, from another process, past Python. Stopped as output."""
    if os.fork() == 0:
        while True:
            os.write(2, b"y" * 65536)
    time.sleep(2.5)
    return 42


def disk_fill():
    """A gigabyte in files of sixteen megabytes. Stopped as disk."""
    for number in range(64):
        with open(f"file-{number}", "wb") as file:
            file.write(bytes(16 << 20))
    return 42


def disk_fill_by_one_file():
    """A hundred megabytes in one file, without writing a byte of it. Stopped as disk, failed."""
    with open("file", "wb") as file:
        file.truncate(100 << 20)
        file.seek(99 << 20)
        file.write(b"x")
    return 42


def many_files():
    """More files than a disk has entries for. Stopped as disk, timed_out, memory."""
    for number in range(1_000_000):
        open(f"file-{number}", "wb").close()
    return 42


def deep_recursion():
    """Deeper than the stack. Stopped as failed, crashed, memory, timed_out."""
    sys.setrecursionlimit(10**9)
    nested = None
    for _ in range(10**6):
        nested = [nested]
    return 42 if repr(nested) else 0


def deep_folders():
    """Two thousand closed folders in each other. Stopped as left_processes, failed, disk."""
    for _ in range(2000):
        os.mkdir("folder", 0o700)
        os.chdir("folder")
    open("file", "w").close()
    for _ in range(2000):
        os.chdir("..")
        os.chmod("folder", 0)
    return 41


def raise_its_limits():
    """Give itself more. Stopped as failed."""
    for what in (resource.RLIMIT_NPROC, resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU):
        resource.setrlimit(what, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return 42


def daemon_behind_a_right_answer():
    """Answer right, and go on in the background in a session of its own. Stopped as left_processes."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for descriptor in range(64):
                try:
                    os.close(descriptor)
                except OSError:
                    pass
            while True:
                time.sleep(1)
        os._exit(0)
    return 42
