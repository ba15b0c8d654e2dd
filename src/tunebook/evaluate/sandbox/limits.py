"""Resource limits of a program, applied to its process before the program starts.

The system call filter is a second layer behind uids or namespaces. It refuses calls that a right answer never needs and
that outlive or reach beyond a program's own processes: sockets, tracing, memory that no limit counts (System V, memfd),
keyrings, namespaces, mounts. A refused call fails with EPERM, so that most programs continue.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import platform
import resource
import signal
import struct
from dataclasses import dataclass

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
SECCOMP_MODE_FILTER = 2
_prctl = ctypes.CDLL(None, use_errno=True).prctl
_prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]

# Actions and instructions of a filter: classic BPF over struct seccomp_data.
ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSE, UNKNOWN = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
LOAD_WORD, JUMP_EQUAL, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
NUMBER_AT, ARCHITECTURE_AT, FIRST_ARGUMENT_AT = 0, 4, 16
X32_BIT = 0x40000000  # second table of numbers for the same calls on x86-64
NEW_NAMESPACES = 0x7E020000  # CLONE_NEW*: user, mount, pid, net, ipc, uts, cgroup
CLONE3 = 435  # its flags are behind a pointer, which no filter can follow; the C library then falls back to clone
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE = {"x86_64": 56, "aarch64": 220}
# Numbers of refused calls, from the kernel's asm/unistd_64.h and asm-generic/unistd.h, in this order: socket, ptrace,
# shmget, semget, msgget, mq_open, keyctl, add_key, request_key, unshare, setns, mount, umount2, pivot_root, chroot,
# bpf, perf_event_open, userfaultfd, process_vm_readv, process_vm_writev, kcmp, memfd_create, name_to_handle_at,
# open_by_handle_at. Newer calls have the same number on all machines: io_uring_setup, io_uring_enter,
# io_uring_register, open_tree, move_mount, fsopen, pidfd_getfd, mount_setattr, memfd_secret.
NEWER_CALLS = (425, 426, 427, 428, 429, 430, 438, 442, 447)
REFUSED_CALLS = {
    "x86_64": (41, 101, 29, 64, 68, 240, 250, 248, 249, 272, 308, 165, 166, 155, 161, 321, 298, 323, 310, 311, 312,
               319, 303, 304, *NEWER_CALLS),
    "aarch64": (198, 117, 194, 190, 186, 180, 219, 217, 218, 97, 268, 40, 39, 41, 51, 280, 241, 282, 270, 271, 272,
                279, 264, 265, *NEWER_CALLS),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one program. Its test, in a separate process, has the same limits."""

    memory_bytes: int = 512 << 20  # address space of one process, and resident memory of all together
    num_processes: int = 32  # including threads; enough for a pool, far below what overloads a machine
    disk_bytes: int = 64 << 20  # in its own folder
    output_bytes: int = 1 << 20  # printed bytes; more ends the program
    kept_output_bytes: int = 4096  # tail of the output, for the record
    num_open_files: int = 128


def bind_process(limits: Limits, time_limit_s: float, *, num_processes: int, filter: bytes | None) -> None:
    """Apply the limits irrevocably to this process and its descendants; it also dies with its parent.

    `num_processes` is 0 if the limit is set inside a user namespace. `filter` is None if it is set elsewhere.
    """
    _call(PR_SET_NO_NEW_PRIVS, 1)  # setuid bits grant no more rights
    die_with_parent()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # signals that the worker ignores would be ignored here, too
    for what, most in (
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.disk_bytes),
        (resource.RLIMIT_NOFILE, limits.num_open_files),
        (resource.RLIMIT_CPU, math.ceil(time_limit_s) + 1),  # the wall-clock limit comes first
        (resource.RLIMIT_NPROC, num_processes or resource.RLIM_INFINITY),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        _, hard = resource.getrlimit(what)
        finite = [limit for limit in (most, hard) if limit != resource.RLIM_INFINITY]
        allowed = min(finite, default=resource.RLIM_INFINITY)
        resource.setrlimit(what, (allowed, allowed))
    if filter is not None:
        lines = ctypes.create_string_buffer(filter, len(filter))
        content = struct.pack("@HP", len(filter) // 8, ctypes.addressof(lines))  # struct sock_fprog
        header = ctypes.create_string_buffer(content, len(content))
        _call(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(header))


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    _call(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants' orphans, so that every process stays visible."""
    _call(PR_SET_CHILD_SUBREAPER, 1)


def kernel_has_filters() -> bool:
    """Whether this kernel filters system calls."""
    # A null pointer fails with "bad address" if the kernel filters system calls, otherwise with "invalid argument".
    _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, None, 0, 0)
    return ctypes.get_errno() == errno.EFAULT


def _call(option: int, value: int, pointer: int | None = None) -> None:
    if _prctl(option, value, pointer, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def program_filter(machine: str = platform.machine()) -> bytes | None:
    """Return the system call filter for a machine type, or None if its call numbers are unknown here."""
    if machine not in ARCHITECTURES:
        return None

    def line(code: int, value: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("<HBBI", code, if_true, if_false, value)  # the jumps skip that many lines

    filter = [
        line(LOAD_WORD, ARCHITECTURE_AT),
        line(JUMP_EQUAL, ARCHITECTURES[machine], if_true=1),
        line(RETURN, KILL),  # such as 32-bit calls, which have other numbers
        line(LOAD_WORD, NUMBER_AT),
        line(JUMP_ANY_BIT, X32_BIT, if_false=1),
        line(RETURN, UNKNOWN),
        line(JUMP_EQUAL, CLONE3, if_false=1),
        line(RETURN, UNKNOWN),
    ]
    for number in REFUSED_CALLS[machine]:
        filter += [line(JUMP_EQUAL, number, if_false=1), line(RETURN, REFUSE)]
    filter += [
        line(JUMP_EQUAL, CLONE[machine], if_false=3),
        line(LOAD_WORD, FIRST_ARGUMENT_AT),
        line(JUMP_ANY_BIT, NEW_NAMESPACES, if_false=1),
        line(RETURN, REFUSE),
        line(RETURN, ALLOW),
    ]
    return b"".join(filter)
