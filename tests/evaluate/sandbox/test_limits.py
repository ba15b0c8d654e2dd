"""The filter of system calls, followed by hand for single calls, and tried on this kernel."""

from __future__ import annotations

import errno
import platform
import struct
import subprocess
import sys

import pytest

from tunebook.evaluate.sandbox.limits import (
    ALLOW,
    ARCHITECTURES,
    CLONE,
    CLONE3,
    KILL,
    REFUSE,
    REFUSED_CALLS,
    UNKNOWN,
    kernel_has_filters,
    program_filter,
)


def verdict(machine: str, number: int, first_argument: int = 0, architecture: int | None = None) -> int:
    """What the filter says of one call: classic BPF, executed."""
    architecture = ARCHITECTURES[machine] if architecture is None else architecture
    data = struct.pack("<IIQQ", number, architecture, 0, first_argument)
    lines = list(struct.iter_unpack("<HBBI", program_filter(machine)))
    at, accumulator = 0, 0
    while True:
        code, if_true, if_false, value = lines[at]
        at += 1
        if code == 0x06:
            return value
        if code == 0x20:
            accumulator = struct.unpack_from("<I", data, value)[0]
        else:
            holds = accumulator == value if code == 0x15 else bool(accumulator & value)
            at += if_true if holds else if_false


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_what_it_refuses_and_what_it_lets_pass(machine):
    read, socketpair, execve = {"x86_64": (0, 53, 59), "aarch64": (63, 199, 221)}[machine]
    assert {verdict(machine, number) for number in (read, socketpair, execve)} == {ALLOW}
    assert {verdict(machine, number) for number in REFUSED_CALLS[machine]} == {REFUSE}
    assert verdict(machine, 425) == REFUSE  # io_uring_setup
    assert verdict(machine, CLONE3) == UNKNOWN
    new_user, thread, child = 0x10000000, 0x3D0F00, 0x1200011
    assert verdict(machine, CLONE[machine], new_user) == REFUSE
    assert verdict(machine, CLONE[machine], thread) == ALLOW
    assert verdict(machine, CLONE[machine], child) == ALLOW
    assert verdict(machine, read | 0x40000000) == UNKNOWN
    assert verdict(machine, read, architecture=0x40000003) == KILL  # 32-bit x86


def test_a_machine_that_is_not_known_has_no_filter():
    assert program_filter("riscv64") is None


def test_it_holds_on_this_kernel():
    if not kernel_has_filters() or program_filter() is None:
        pytest.skip(f"this kernel filters no calls of {platform.machine()}")
    code = (
        "import errno, os, socket, threading\n"
        "from tunebook.evaluate.sandbox.limits import Limits, bind_process, program_filter\n"
        "bind_process(Limits(), 20.0, num_processes=0, filter=program_filter())\n"
        "socket.socketpair()[0].close()\n"
        "thread = threading.Thread(target=print, args=('thread',)); thread.start(); thread.join()\n"
        "os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0)\n"
        "try:\n    socket.socket()\nexcept OSError as error:\n    print(error.errno)\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["thread", str(errno.EPERM)], done.stderr
