"""A filter of system calls for programs, as the kernel takes it: a second wall behind uids or namespaces.

It refuses what a right answer never needs and what would outlive or reach beyond a program's own processes: sockets,
tracing, memory that no limit counts (System V, memfd), keyrings, namespaces, mounts. A refused call fails with
"operation not permitted", so that most programs go on. Where the kernel has no filters the other walls stand alone.
"""

from __future__ import annotations

import errno
import platform
import struct

ALLOW = 0x7FFF0000
KILL = 0x80000000
REFUSE = 0x00050000 | errno.EPERM
UNKNOWN = 0x00050000 | errno.ENOSYS

LOAD_WORD, JUMP_EQUAL, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06  # classic BPF
NUMBER_AT, ARCHITECTURE_AT, FIRST_ARGUMENT_AT = 0, 4, 16  # in struct seccomp_data, little-endian
X32_BIT = 0x40000000  # another table of numbers for the same calls on x86-64
NEW_NAMESPACES = 0x7E020000  # CLONE_NEW*: user, mount, pid, net, ipc, uts, cgroup

# The numbers of the calls, from the kernel's asm/unistd_64.h and asm-generic/unistd.h.
MACHINES: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (0xC000003E, {
        "socket": 41, "ptrace": 101, "shmget": 29, "semget": 64, "msgget": 68, "mq_open": 240, "keyctl": 250,
        "add_key": 248, "request_key": 249, "unshare": 272, "setns": 308, "mount": 165, "umount2": 166,
        "pivot_root": 155, "chroot": 161, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
        "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "memfd_create": 319,
        "name_to_handle_at": 303, "open_by_handle_at": 304, "clone": 56,
    }),
    "aarch64": (0xC00000B7, {
        "socket": 198, "ptrace": 117, "shmget": 194, "semget": 190, "msgget": 186, "mq_open": 180, "keyctl": 219,
        "add_key": 217, "request_key": 218, "unshare": 97, "setns": 268, "mount": 40, "umount2": 39,
        "pivot_root": 41, "chroot": 51, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282,
        "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "memfd_create": 279,
        "name_to_handle_at": 264, "open_by_handle_at": 265, "clone": 220,
    }),
}  # fmt: skip
# Newer calls have one number on all machines.
EVERYWHERE = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "pidfd_getfd": 438, "mount_setattr": 442, "memfd_secret": 447,
}  # fmt: skip
CLONE3 = 435  # its flags are behind a pointer, which no filter can follow; the C library then uses clone


def program_filter(machine: str | None = None) -> bytes | None:
    """The filter for this machine, or None where its system calls are not known here."""
    known = MACHINES.get(machine or platform.machine())
    if known is None:
        return None
    architecture, numbers = known
    clone = numbers["clone"]
    refused = [number for name, number in {**numbers, **EVERYWHERE}.items() if name != "clone"]
    filter = [
        _line(LOAD_WORD, ARCHITECTURE_AT),
        _line(JUMP_EQUAL, architecture, if_true=1),
        _line(RETURN, KILL),  # such as 32-bit calls, which have other numbers
        _line(LOAD_WORD, NUMBER_AT),
        _line(JUMP_ANY_BIT, X32_BIT, if_false=1),
        _line(RETURN, UNKNOWN),
        _line(JUMP_EQUAL, CLONE3, if_false=1),
        _line(RETURN, UNKNOWN),
    ]
    for number in refused:
        filter += [_line(JUMP_EQUAL, number, if_false=1), _line(RETURN, REFUSE)]
    filter += [
        _line(JUMP_EQUAL, clone, if_false=3),
        _line(LOAD_WORD, FIRST_ARGUMENT_AT),
        _line(JUMP_ANY_BIT, NEW_NAMESPACES, if_false=1),
        _line(RETURN, REFUSE),
        _line(RETURN, ALLOW),
    ]
    return b"".join(filter)


def _line(code: int, value: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    """One instruction: `struct sock_filter`. The jumps skip that many instructions."""
    return struct.pack("<HBBI", code, if_true, if_false, value)
