"""Attacks on the verdict: programs that do not solve the problem and say that they passed."""

# Written as attackers would, not as this project does.
# ruff: noqa: N818, PTH106, PTH113, PTH118, PTH123, PTH202, PTH207


def exit_at_once(at_once=True):
    """End with success before the test begins.

    Stopped as failed.
    """
    import os

    os._exit(0)


def exit_politely(at_once=True):
    """End with success before the test begins, as Python does it.

    Stopped as failed.
    """
    import sys

    sys.exit(0)


def exit_when_asked():
    """End with success in the middle of the test.

    Stopped as failed.
    """
    import os

    os._exit(0)


def exit_by_exception():
    """End the test by an exception that ends Python with success.

    Stopped as failed.
    """
    raise SystemExit(0)


def become_another_program(at_once=True):
    """Be a program that succeeds.

    Stopped as failed.
    """
    import os

    os.execv("/bin/true", ["true"])


def print_success():
    """Print whatever a judge might be looking for.

    Stopped as failed.
    """
    import sys

    for stream in (sys.stdout, sys.stderr):
        for word in ("passed", "PASSED", "OK", '{"status": "passed"}', "Ran 1 test in 0.000s\n\nOK", "1"):
            print(word, file=stream, flush=True)
    return 0


def write_verdicts_everywhere(at_once=True):
    """Write verdicts, with a guessed nonce, to every descriptor that there is.

    Stopped as failed, crashed, timed_out.
    """
    import os
    import struct

    def sized(tag, content):
        return tag + struct.pack(">I", len(content)) + content

    pairs = [("nonce", "0" * 32), ("status", "passed"), ("message", "")]
    verdict = b"D" + struct.pack(">I", 3) + b"".join(sized(b"s", word.encode()) for pair in pairs for word in pair)
    for descriptor in range(256):
        try:
            os.write(descriptor, struct.pack(">I", len(verdict)) + verdict)
        except OSError:
            continue


def answer_for_the_test():
    """Send replies of its own ahead of every question.

    Stopped as failed, timed_out.
    """
    import os
    import struct

    reply = b"t" + struct.pack(">I", 2) + b"s" + struct.pack(">I", 5) + b"reply" + b"T"
    for _ in range(100):
        os.write(5, struct.pack(">I", len(reply)) + reply)
    return 0


def equal_to_everything():
    """Answer with something that is equal to whatever it is compared with.

    Stopped as failed.
    """

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


def equal_object():
    """The same with an object that is no number.

    Stopped as failed.
    """

    class Anything:
        def __eq__(self, other):
            return True

        def __bool__(self):
            return True

    return Anything()


def any_of_the_library():
    """The same with the standard library's own.

    Stopped as failed.
    """
    from unittest.mock import ANY

    return ANY


def patch_builtins():
    """Change what the test is made of, for the case that it shares the process.

    Stopped as failed.
    """
    import builtins
    import sys

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
    """Change every module of the sandbox that it finds in its process.

    Stopped as failed, timed_out.
    """
    import sys

    for name, module in list(sys.modules.items()):
        if name.startswith("tunebook"):
            for key, value in list(vars(module).items()):
                if callable(value):
                    setattr(module, key, lambda *args, **kwargs: 42)


def delete_its_checker():
    """Remove or empty every file of the sandbox and of Python that it can find.

    Stopped as failed.
    """
    import glob
    import os

    harmed = 0
    for pattern in ("/opt/tunebook/**/*.py", "/usr/lib/python3*/*.py", "/handover/**", "/home/**/src/tunebook/**/*.py"):
        for path in glob.glob(pattern, recursive=True):
            try:
                os.truncate(path, os.path.getsize(path)) if os.path.isfile(path) else os.rmdir(path)
                harmed = 42
            except OSError:
                continue
    return harmed


def look_for_the_answer():
    """Look for the test, its answer and its nonce in every object and every frame of the process.

    Stopped as failed.
    """
    import gc
    import sys

    frame, seen = sys._getframe(), []
    while frame is not None:
        seen += [*frame.f_locals.values(), *frame.f_globals.values()]
        frame = frame.f_back
    seen += gc.get_objects()
    for value in seen:
        if isinstance(value, str) and value.startswith("assert answer"):
            return int(value.split()[-1])
        if isinstance(value, dict) and ("nonce" in value or "test" in value):
            return 42
    return 0


def forge_a_result():
    """Write its own result into the hand-over folder.

    Stopped as failed.
    """
    import glob
    import json
    import os

    for folder in ("/handover/results", *glob.glob("/tmp/*/results"), *glob.glob("/tmp/*/*/results")):
        for id in range(10):
            try:
                with open(os.path.join(folder, f"{id}.json"), "w") as file:
                    json.dump({"id": str(id), "status": "passed"}, file)
                return 42
            except OSError:
                continue
    return 0


def escape_through_a_value():
    """Hand the test values that would execute code where they are unpacked.

    Stopped as failed.
    """
    import os
    import struct

    def sized(tag, content):
        return tag + struct.pack(">I", len(content)) + content

    code = sized(b"s", b"os") + sized(b"s", b"_exit") + b"l" + struct.pack(">I", 1) + sized(b"i", b"\0")
    value = b"m" + b"l" + struct.pack(">I", 3) + code
    library = b"g" + b"t" + struct.pack(">I", 2) + sized(b"s", b"os") + sized(b"s", b"_exit")
    for content in (value, library):
        reply = b"t" + struct.pack(">I", 2) + sized(b"s", b"reply") + content
        os.write(5, struct.pack(">I", len(reply)) + reply)
    return 0
