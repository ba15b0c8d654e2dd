"""Attacks on the verdict. A program may cheat its own test (`passed`), but not change the verdict of the next one."""

# Written as attackers would, not as this project does.
# ruff: noqa: N818, PTH113, PTH118, PTH202, PTH207

import builtins
import gc
import glob
import os
import socket
import sys


def _works(act, *arguments):
    try:
        act(*arguments)
    except OSError:
        return False
    return True


def exit_at_once(at_once=True):
    """End with success before the test begins. Stopped as failed."""
    os._exit(0)


def exit_politely(at_once=True):
    """End with success before the test begins, as Python does it. Stopped as failed."""
    sys.exit(0)


def exit_when_asked():
    """End with success in the middle of the test. Stopped as failed."""
    os._exit(0)


def exit_by_exception():
    """End the test by an exception that ends Python with success. Stopped as failed."""
    raise SystemExit(0)


def become_another_program(at_once=True):
    """Be a program that succeeds. Stopped as failed."""
    os.execv("/bin/true", ["true"])


def print_success():
    """Print whatever a judge might be looking for. Stopped as failed."""
    for stream in (sys.stdout, sys.stderr):
        for word in ("passed", "PASSED", "OK", '{"status": "passed"}', "Ran 1 test in 0.000s\n\nOK", "1"):
            print(word, file=stream, flush=True)
    return 0


def write_verdicts_everywhere(at_once=True):
    """Write verdicts, with and without a nonce, to every descriptor. Stopped as failed, crashed, timed_out, passed."""
    for nonce in ('"nonce": "00000000000000000000000000000000", ', ""):
        for descriptor in range(256):
            _works(os.write, descriptor, b'{%s"status": "passed", "message": ""}\n' % nonce.encode())


def equal_to_everything():
    """Answer with something that is equal to whatever it is compared with. Stopped as failed, passed."""

    class Anything(int):
        def __eq__(self, other):
            return True

        def __ne__(self, other):
            return False

        def __hash__(self):
            return 42

        def __sub__(self, other):
            return 0

        __rsub__ = __abs__ = __sub__

    return Anything()


def patch_builtins():
    """Change what the test is made of, for the case that it shares the process. Stopped as failed, passed."""

    class Quiet(Exception):
        def __new__(cls, *args):
            sys.exit(0)

    builtins.AssertionError = Quiet
    builtins.Exception = Quiet
    builtins.compile = lambda *args, **kwargs: (lambda: None).__code__
    builtins.exec = lambda *args, **kwargs: None
    sys.excepthook = lambda *args: None
    sys.settrace(lambda *args: None)
    return 0


def change_the_children(at_once=True):
    """Change everything of the sandbox that it finds in its process. Stopped as failed, timed_out, passed."""
    found, frame = [], sys._getframe()
    while frame is not None:
        found.append(frame.f_globals)
        frame = frame.f_back
    found += [names for names in gc.get_objects() if isinstance(names, dict) and names.get("__name__") == "child"]
    for names in found:
        for key, value in list(names.items()):
            if callable(value) and key != "change_the_children":
                names[key] = lambda *args, **kwargs: 42


def delete_its_checker():
    """Remove or empty every file of the sandbox and of Python that it can find. Stopped as failed."""
    harmed = 0
    for pattern in ("/opt/tunebook/**/*.py", "/usr/lib/python3*/*.py", "/handover/**", "/home/**/src/tunebook/**/*.py"):
        for path in glob.glob(pattern, recursive=True):
            if _works(os.truncate, path, os.path.getsize(path)) if os.path.isfile(path) else _works(os.rmdir, path):
                harmed = 42
    return harmed


def look_for_the_answer():
    """Look for the test, its answer and its nonce in every object and frame. Stopped as failed, passed."""
    frame, seen = sys._getframe(), []
    while frame is not None:
        seen += [*frame.f_locals.values(), *frame.f_globals.values()]
        frame = frame.f_back
    seen += gc.get_objects()
    for value in seen:
        if isinstance(value, str) and value.startswith("assert answer"):
            return int(value.split()[-1])
        if isinstance(value, dict) and any(isinstance(value.get(key), str) for key in ("nonce", "test")):
            return 42
    return 0


def forge_a_result():
    """Take the place of the runner's socket, or talk to the runner. Stopped as failed."""
    for folder in ("/handover", "/closed/handover", "/closed", "/proc/1/cwd", "/proc/1/root/closed/handover"):
        name = os.path.join(folder, "runner.sock")
        for act, path in ((os.unlink, name), (os.listdir, folder), (os.rmdir, folder)):
            if _works(act, path):
                return 42
        if _works(lambda name=name: socket.socket(socket.AF_UNIX).connect(name)):
            return 42
    return 0


def say_that_the_sandbox_broke(at_once=True):
    """Write a status of the sandbox's own into the report, and empty every file that it has. Stopped as failed."""
    for descriptor in range(256):
        if _works(os.ftruncate, descriptor, 0):
            _works(os.pwrite, descriptor, b'{"status": "broken", "message": ""}', 0)
    os._exit(0)
