"""How much a program may take, and the calls to the kernel by which a process binds itself to it for good."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import struct
from dataclasses import dataclass

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
SECCOMP_MODE_FILTER = 2
SIGKILL = 9

_prctl = ctypes.CDLL(None, use_errno=True).prctl
_prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one program may take. Its test, in a process of its own, is bound to the same."""

    memory_bytes: int = 512 << 20  # address space of a process, and resident in all of them together
    num_processes: int = 32  # with threads; enough for a pool, and far from what fills a machine
    disk_bytes: int = 64 << 20  # in its own folder
    output_bytes: int = 1 << 20  # what it prints; more ends it
    kept_output_bytes: int = 4096  # the end of that, for the record
    num_open_files: int = 128


def bind(limits: Limits, time_limit_s: float) -> None:
    """Bind this process and all that it starts; there is no way back."""
    cpu_s = math.ceil(time_limit_s) + 1  # the clock on the wall comes first; this one is for what it cannot reach
    for what, most in (
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.disk_bytes),
        (resource.RLIMIT_NOFILE, limits.num_open_files),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        _, hard = resource.getrlimit(what)
        allowed = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (allowed, allowed))


def limit_processes(num_processes: int) -> None:
    """Bind this process's user to a number of processes, counted in its user namespace."""
    resource.setrlimit(resource.RLIMIT_NPROC, (num_processes, num_processes))


def give_up_privileges() -> None:
    """No program that this one executes gets more rights than it has, such as by a setuid bit."""
    _call(PR_SET_NO_NEW_PRIVS, 1)


def die_with_parent() -> None:
    """Be killed as soon as the process that started this one is gone."""
    _call(PR_SET_PDEATHSIG, SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of whatever a descendant leaves behind, so that nothing gets out of sight."""
    _call(PR_SET_CHILD_SUBREAPER, 1)


def filter_calls(filter: bytes) -> None:
    """Bind this process to a filter of system calls (`seccomp.program_filter`)."""
    lines = ctypes.create_string_buffer(filter, len(filter))
    content = struct.pack("@HP", len(filter) // 8, ctypes.addressof(lines))  # struct sock_fprog
    header = ctypes.create_string_buffer(content, len(content))
    _call(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(header))


def has_filters() -> bool:
    """Whether this kernel filters system calls."""
    # Asking with a null pointer fails with "bad address" where it does, and with "invalid argument" where it does not.
    _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, None, 0, 0)
    return ctypes.get_errno() == 14


def _call(option: int, value: int, pointer: int | None = None) -> None:
    if _prctl(option, value, pointer, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")
