"""The filter of system calls, followed by hand for single calls; and where `run.py` does not start."""

from __future__ import annotations

import struct
import subprocess
import sys

import pytest

from tunebook.evaluate.sandbox.run import (
    ALLOW,
    CALLS,
    CLONE3,
    IF_EQUAL,
    KILL,
    LOAD,
    REFUSE,
    RETURN,
    UNKNOWN,
    call_filter,
)
from tunebook.evaluate.sandbox.start import RUN_FILE


def verdict(machine: str, number: int, first_argument: int = 0, architecture: int | None = None) -> int:
    """What the filter says of one call: classic BPF, executed."""
    architecture = CALLS[machine][0] if architecture is None else architecture
    data = struct.pack("<IIQQ", number, architecture, 0, first_argument)
    lines = list(struct.iter_unpack("<HBBI", call_filter(machine)))
    at, accumulator = 0, 0
    while True:
        code, if_true, if_false, value = lines[at]
        at += 1
        if code == RETURN:
            return value
        if code == LOAD:
            accumulator = struct.unpack_from("<I", data, value)[0]
        else:
            holds = accumulator == value if code == IF_EQUAL else bool(accumulator & value)
            at += if_true if holds else if_false


@pytest.mark.parametrize("machine", CALLS)
def test_what_the_filter_refuses(machine):
    _, clone, prlimit, refused = CALLS[machine]
    read, socketpair, execve = {"x86_64": (0, 53, 59), "aarch64": (63, 199, 221)}[machine]
    assert {verdict(machine, number) for number in (read, socketpair, execve)} == {ALLOW}
    assert {verdict(machine, number) for number in refused} == {REFUSE}
    assert verdict(machine, 425) == REFUSE  # io_uring_setup
    assert verdict(machine, CLONE3) == UNKNOWN
    new_user, thread, child = 0x10000000, 0x3D0F00, 0x1200011
    assert verdict(machine, clone, new_user) == REFUSE
    assert verdict(machine, clone, thread) == verdict(machine, clone, child) == ALLOW
    assert verdict(machine, prlimit, 0) == ALLOW
    assert verdict(machine, prlimit, 1) == REFUSE
    assert verdict(machine, read | 0x40000000) == UNKNOWN
    assert verdict(machine, read, architecture=0x40000003) == KILL  # 32-bit x86


def test_it_does_not_start_outside_of_a_sandbox(tmp_path):
    command = [sys.executable, "-I", "-S", str(RUN_FILE), "serve"]
    done = subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert not list(tmp_path.iterdir())
