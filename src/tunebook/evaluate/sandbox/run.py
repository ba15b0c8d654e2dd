"""Execute programs with their tests, one process each, and write their verdicts. Standard library only.

    run.py < programs.jsonl > verdicts.jsonl      in bubblewrap; a line per program: source, test, time_limit_s
    run.py serve                                  in the `sandbox` service: the same over runner.sock in this folder

This file runs as the first process of its own pid namespace, and programs run as its user. Around both of them,
bubblewrap or the container takes away network, capabilities and every file but Python's and one small disk. Between
this process and a program:

- The kernel drops a program's signals to the first process. This process is not dumpable, so a program can neither
  trace it nor open its memory, descriptors or working directory.
- A program gets three descriptors: itself, its output and its report. The verdicts' stream is out of its reach.
- A filter of system calls refuses sockets, tracing, namespaces, memory that no limit counts, and changes of another
  process's limits and priority.
- After each program `kill(-1)` ends every process but this one at once, and the disk is emptied.

Program and test share a process. A program can cheat its own test, and only that.
"""

# pathlib, and what functions import below, would delay the start of every program.
# ruff: noqa: PTH101, PTH108, PTH123, PTH207, PTH208

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import resource
import select
import signal
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO

LIMITS = {
    "memory_bytes": 512 << 20,  # address space of one process, and resident memory of all of a program's processes
    "num_processes": 32,  # including threads; in the service, the container has this limit
    "disk_bytes": 64 << 20,
    "output_bytes": 1 << 20,
    "num_open_files": 128,
}
FOLDER = "/work"  # the small disk
SOCKET = "runner.sock"
REPORT = 3  # descriptor that a program's process writes its end to
TICK_S = 0.1  # how often memory and output are checked
CLIENT_TIMEOUT_S = 10.0  # for a client that sends or reads
REPORTED = ("passed", "failed", "memory", "disk")  # the ends that a report may name
NUM_LAST_LINES, MAX_TEXT, MAX_REPORT_BYTES = 10, 3000, 1 << 16
PYTHON = [sys.executable, "-I", "-S", "-u", "-B", "-X", "utf8", __file__]
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": FOLDER, "TMPDIR": FOLDER, "LANG": "C.UTF-8"}
EMPTY = f"cd {FOLDER} && chmod -R u+rwx . && find . -mindepth 1 -delete"  # any depth, any file modes
PROGRAM_FILE, TEST_FILE = "<program>", "<test>"
MODULE = "solution"  # not `__main__`: as in code_eval, code under `if __name__ == "__main__"` does not run

PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 4, 22, 38, 2
# Classic BPF over struct seccomp_data: actions and instructions.
ALLOW, KILL, REFUSE, UNKNOWN = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
LOAD, IF_EQUAL, IF_ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets
X32_BIT = 0x40000000  # second table of numbers for the same calls on x86-64
NEW_NAMESPACES = 0x7E020000  # CLONE_NEW*
CLONE3 = 435  # its flags are behind a pointer, which no filter can follow; the C library then falls back to clone
# The same numbers on all machines: io_uring_setup, io_uring_enter, io_uring_register, open_tree, move_mount, fsopen,
# pidfd_getfd, mount_setattr, memfd_secret.
NEWER_CALLS = (425, 426, 427, 428, 429, 430, 438, 442, 447)
# Of each machine: its architecture, clone, prlimit64, and the refused calls: socket, ptrace, shmget, semget, msgget,
# mq_open, keyctl, add_key, request_key, unshare, setns, mount, umount2, pivot_root, chroot, bpf, perf_event_open,
# userfaultfd, process_vm_readv, process_vm_writev, kcmp, memfd_create, name_to_handle_at, open_by_handle_at,
# setpriority, sched_setscheduler, sched_setparam, sched_setattr, sched_setaffinity, ioprio_set.
CALLS = {
    "x86_64": (0xC000003E, 56, 302, (
        41, 101, 29, 64, 68, 240, 250, 248, 249, 272, 308, 165, 166, 155, 161, 321, 298, 323, 310, 311, 312, 319, 303,
        304, 141, 144, 142, 314, 203, 251)),
    "aarch64": (0xC00000B7, 220, 261, (
        198, 117, 194, 190, 186, 180, 219, 217, 218, 97, 268, 40, 39, 41, 51, 280, 241, 282, 270, 271, 272, 279, 264,
        265, 140, 119, 118, 274, 122, 30)),
}  # fmt: skip


def main(arguments: list[str]) -> None:
    """Run one program if this is its process (`program`); else judge all of them."""
    if arguments[:1] == ["program"]:
        run_program(num_processes=int(arguments[1]))
    if os.getpid() != 1:
        sys.exit("run.py kills every process that it can, so it starts only as the first one of a sandbox")
    if os.uname().machine not in CALLS:
        sys.exit(f"run.py has no filter of system calls for {os.uname().machine}, so it executes nothing here")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a handler, the kernel drops a program's signals
    _prctl(PR_SET_DUMPABLE, 0)
    if arguments == ["serve"]:
        serve()
    judge_all(sys.stdin.buffer, sys.stdout.buffer, num_processes=LIMITS["num_processes"])


def serve() -> None:
    """Judge what is sent to the socket in this folder, one connection after another."""
    import socket

    with socket.socket(socket.AF_UNIX) as listener:
        if os.path.lexists(SOCKET):  # left by a container that was stopped
            os.unlink(SOCKET)
        listener.bind(SOCKET)
        os.chmod(SOCKET, 0o660)
        listener.listen()
        while True:
            connection, _ = listener.accept()
            connection.settimeout(CLIENT_TIMEOUT_S)
            try:
                with connection, connection.makefile("rb") as programs, connection.makefile("wb") as verdicts:
                    # The kernel counts a uid's processes in all containers: this container has the limit instead.
                    judge_all(programs, verdicts, num_processes=0)
            except (OSError, ValueError) as error:  # a client that is gone, or that sends no programs
                print(f"sandbox: {error}", file=sys.stderr, flush=True)


def judge_all(programs: BinaryIO, verdicts: BinaryIO, *, num_processes: int) -> None:
    """Write a verdict for each line of programs. Raises: OSError, ValueError for a line that is no program."""
    for line in programs:
        program = json.loads(line)
        if not isinstance(program, dict) or not {"source", "test", "time_limit_s"} <= program.keys():
            raise ValueError("a line is no program")
        try:
            verdict = judge(program, num_processes)
        except OSError as error:  # and not for the client, which may be gone
            raise RuntimeError("the sandbox failed") from error
        verdicts.write(json.dumps(verdict | {"version": version()}).encode() + b"\n")
        verdicts.flush()


def version() -> str:
    """Return a hash of this file, by which an evaluation finds a service with other code."""
    import hashlib

    with open(__file__, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def judge(program: dict[str, Any], num_processes: int) -> dict[str, Any]:
    """Execute one program; return its status, a message, its last lines of output and its seconds."""
    started, time_limit_s = time.monotonic(), float(program["time_limit_s"])
    files = [os.memfd_create(name) for name in ("source", "output", "report")]
    source, output, report = files
    try:
        with open(source, "wb", closefd=False) as file:
            file.write(json.dumps(program).encode())
        os.lseek(source, 0, os.SEEK_SET)
        copies = [(os.POSIX_SPAWN_DUP2, *pair) for pair in ((source, 0), (output, 1), (output, 2), (report, REPORT))]
        command = [*PYTHON, "program", str(num_processes)]
        process = os.posix_spawn(command[0], command, ENVIRONMENT, file_actions=copies, setsid=True)
        exceeded = watch(process, output, started, time_limit_s)
        exit_code = None if exceeded else os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        has_left_processes = end_all()
        if os.fstat(source).st_size and not exceeded:
            exceeded = "broken", f"its process did not start (exit code {exit_code})"
        exceeded = exceeded or exceeded_limit(output)
        status, message = exceeded or conclude(os.pread(report, MAX_REPORT_BYTES, 0), exit_code)
        size = os.fstat(output).st_size
        end = os.pread(output, MAX_TEXT, max(0, size - MAX_TEXT)).decode(errors="replace")
    finally:
        for descriptor in files:
            os.close(descriptor)
    if status == "passed" and has_left_processes:
        status, message = "left_processes", "its test passed, but it left processes behind"
    empty_disk()
    seconds = round(time.monotonic() - started, 3)
    last_lines = end.splitlines()[-NUM_LAST_LINES:]
    return {"status": status, "message": message[:MAX_TEXT], "last_lines": last_lines, "seconds": seconds}


def watch(process: int, output: int, started: float, time_limit_s: float) -> tuple[str, str] | None:
    """Wait until a process ends; return the status and message of the limit that it exceeded first, if it did."""
    ended = os.pidfd_open(process)
    try:
        while (left_s := started + time_limit_s - time.monotonic()) > 0:
            if select.select([ended], [], [], min(TICK_S, left_s))[0]:
                return None
            if exceeded := exceeded_limit(output):
                return exceeded
        return "timed_out", f"it was not done after {time_limit_s:g} s"
    finally:
        os.close(ended)


def exceeded_limit(output: int) -> tuple[str, str] | None:
    """Return the status and message of the limit of memory or output that a program exceeds, if it does."""
    if os.fstat(output).st_size > LIMITS["output_bytes"]:
        return "output", f"it printed more than {LIMITS['output_bytes'] >> 10} KiB"
    if resident_bytes() > LIMITS["memory_bytes"]:
        return "memory", f"it used more than {LIMITS['memory_bytes'] >> 20} MiB of memory"
    return None


def resident_bytes() -> int:
    """Return the memory of all other processes. A process whose main thread has ended has it in another thread."""
    import glob

    pages: dict[str, int] = {}
    for task in glob.iglob("/proc/[0-9]*/task/[0-9]*"):
        process = task.split("/")[2]
        try:
            with open(f"{task}/stat", "rb") as file:
                number = int(file.read().rpartition(b")")[2].split()[21])
        except OSError:  # it has just ended
            continue
        pages[process] = max(pages.get(process, 0), number)
    return resource.getpagesize() * sum(number for process, number in pages.items() if process != "1")


def end_all() -> bool:
    """Kill every process but this one; return whether there were any that had not ended."""
    were_left = False
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
            were_left = True
            os.kill(-1, signal.SIGKILL)
            os.waitpid(-1, 0)
        except ChildProcessError:  # all have ended: orphans become children of the first process
            return were_left
        except ProcessLookupError:  # the last one ended by itself meanwhile
            continue


def empty_disk() -> None:
    """Remove the program's files. Raises: RuntimeError, after which no other program may run here."""
    os.chmod(FOLDER, 0o700)
    if os.listdir(FOLDER) and (os.system(EMPTY) or os.listdir(FOLDER)):
        raise RuntimeError("the files of a program could not be removed")


def conclude(report: bytes, exit_code: int | None) -> tuple[str, str]:
    """Return the status and the message of a program that exceeded no limit, from its report and its exit code."""
    try:
        found = json.loads(report)
        if found["status"] in REPORTED:
            return found["status"], str(found["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        pass  # the program ended its process, or wrote something else into the report
    if exit_code is None or exit_code >= 0:
        return "failed", f"it ended before its test did (exit code {exit_code})"
    if exit_code == -signal.SIGXCPU:
        return "timed_out", "it used up its time on the CPU"
    return "crashed", f"it ended before its test did (killed by signal {-exit_code})"


def run_program(num_processes: int) -> None:
    """Limit this process, execute the program and its test, and report how they ended."""
    os.chdir(FOLDER)
    with open(0, "rb", closefd=False) as file:
        program = json.load(file)
    os.umask(0o077)
    limit(program["time_limit_s"], num_processes)
    os.ftruncate(0, 0)  # says that the program begins; it cannot say so itself, or take it back
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    module = sys.modules[MODULE] = type(sys)(MODULE)
    result = {"status": "passed", "message": ""}
    try:
        exec(compile(program["source"], PROGRAM_FILE, "exec", dont_inherit=True), module.__dict__)
        exec(compile(program["test"], TEST_FILE, "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:  # as in code_eval, whatever is raised is a failure
        result = explain(error)
    os.write(REPORT, json.dumps(result).encode())
    os._exit(0)  # at once: the program may have left threads running


def explain(error: BaseException) -> dict[str, str]:
    """Describe why a program failed, with the last lines of program and test that were executed."""
    lines = {getattr(error, "filename", None): getattr(error, "lineno", None)}  # of a SyntaxError
    traceback = error.__traceback__
    while traceback is not None:
        lines[traceback.tb_frame.f_code.co_filename] = traceback.tb_lineno
        traceback = traceback.tb_next
    files = [file for file in (PROGRAM_FILE, TEST_FILE) if lines.get(file)]
    where = "".join(f" ({file.strip('<>')}, line {lines[file]})" for file in files)
    text = str(error)[:MAX_TEXT]
    status = "memory" if isinstance(error, MemoryError) else "failed"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        status = "disk"
    return {"status": status, "message": f"{type(error).__name__}{': ' if text else ''}{text}{where}"}


def limit(time_limit_s: float, num_processes: int) -> None:
    """Limit this process and its descendants, irrevocably. `num_processes` is 0 if the container limits them."""
    for what, most in (
        (resource.RLIMIT_AS, LIMITS["memory_bytes"]),
        (resource.RLIMIT_FSIZE, LIMITS["disk_bytes"]),
        (resource.RLIMIT_NOFILE, LIMITS["num_open_files"]),
        (resource.RLIMIT_CPU, math.ceil(time_limit_s) + 1),  # the wall-clock limit comes first
        (resource.RLIMIT_NPROC, num_processes or resource.RLIM_INFINITY),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        allowed = min(
            (bound for bound in (most, hard) if bound != resource.RLIM_INFINITY), default=resource.RLIM_INFINITY
        )
        resource.setrlimit(what, (allowed, allowed))
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # the kernel kills programs first
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    filter = call_filter(os.uname().machine)
    lines = ctypes.create_string_buffer(filter, len(filter))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(filter) // 8, ctypes.addressof(lines)))
    _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(header))


def call_filter(machine: str) -> bytes:
    """Return the filter of system calls for a machine type."""
    architecture, clone, prlimit, refused = CALLS[machine]
    filter = [
        (LOAD, 0, 0, ARCHITECTURE),
        (IF_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),  # such as 32-bit calls, which have other numbers
        (LOAD, 0, 0, NUMBER),
        (IF_ANY_BIT, 0, 1, X32_BIT),
        (RETURN, 0, 0, UNKNOWN),
        (IF_EQUAL, 0, 1, CLONE3),
        (RETURN, 0, 0, UNKNOWN),
    ]
    for number in (*refused, *NEWER_CALLS):
        filter += [(IF_EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    filter += [
        (IF_EQUAL, 0, 3, clone),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (IF_ANY_BIT, 0, 4, NEW_NAMESPACES),
        (RETURN, 0, 0, REFUSE),
        (IF_EQUAL, 0, 2, prlimit),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (IF_EQUAL, 0, 1, 0),  # the calling process
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, REFUSE),
    ]
    return b"".join(struct.pack("<HBBI", *line) for line in filter)


def _prctl(option: int, value: int, pointer: int | None = None) -> None:
    call = ctypes.CDLL(None, use_errno=True).prctl
    call.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    if call(option, value, pointer, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main(sys.argv[1:])
