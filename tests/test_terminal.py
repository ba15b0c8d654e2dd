"""Lines wrap at words in a terminal, with an indent; elsewhere they stay whole."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from tunebook.terminal import outlive_readers, print_lines, quiet_libraries

LINES = ["Batch", "  packed rows of up to 1024 tokens on 8 GPUs or ranks, 1 per pass; how many are worked out later"]


def printed(lines, width, *, is_terminal=True):
    console = Console(width=width, force_terminal=is_terminal, color_system=None)
    with console.capture() as capture:
        print_lines(lines, console)
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [30, 60, 80, 120])
def test_a_terminal_gets_whole_words_and_all_of_them(width):
    first, *rest = printed(LINES, width)
    assert first == "Batch" and max(map(len, rest)) <= width
    assert " ".join(" ".join(rest).split()) == LINES[1].strip()
    assert rest[0].startswith("  packed") and all(line.startswith(" " * 6) and line[6] != " " for line in rest[1:])
    assert (len(rest) > 1) == (width < len(LINES[1]))


def test_a_log_gets_each_line_whole():
    assert printed(LINES, 40, is_terminal=False) == LINES


def test_a_path_stays_whole_so_that_it_can_be_copied():
    path = "/a/" + "long-" * 6
    assert printed([f"  read from {path} today"], 40) == ["  read from", f"      {path}", "      today"]


def test_what_looks_like_markup_is_printed():
    assert printed(["[bold]a[/b] \\"], 40) == ["[bold]a[/b] \\"]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize(("goes_on", "expected"), [(True, 0), (False, 1)], ids=str)
def test_a_process_goes_on_without_a_reader_if_it_is_to(stream, goes_on, expected):
    """Also what it starts afterwards, and what rich prints, which otherwise ends the process."""
    program = (
        "import subprocess, sys; from rich.console import Console; from tunebook.terminal import outlive_readers\n"
        f"{'outlive_readers()' if goes_on else ''}\n"
        f"print('read', file=sys.{stream}, flush=True)\n"
        "sys.stdin.read()\n"  # until the reader has left
        f"for _ in range(3): Console(stderr={stream == 'stderr'}).print('not read')\n"
        f"print('not read', file=sys.{stream}, flush=True)\n"
        f"subprocess.run([sys.executable, '-c', 'import sys; print(1, file=sys.{stream}, flush=True)'], check=True)\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, **(pipes | {stream: subprocess.PIPE}), text=True) as process:
        reader = getattr(process, stream)
        assert reader.readline() == "read\n"
        reader.close()
        process.stdin.close()
        assert min(process.wait(), 1) == expected


def test_output_that_is_read_is_as_it_was():
    program = (
        "import sys; from tunebook.terminal import outlive_readers; before = sys.stdout; outlive_readers()\n"
        "print('ü', end='', flush=True); print(sys.stdout.isatty(), sys.stdout.encoding == before.encoding)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout, done.stderr) == ("üFalse True\n", "")


def test_a_stream_that_is_no_file_stays(monkeypatch):
    for stream in (None, io.StringIO()):
        monkeypatch.setattr(sys, "stdout", stream)
        outlive_readers()
        assert sys.stdout is stream


@pytest.fixture
def library() -> Iterator[logging.Logger]:
    """The logger of a library that prints by a handler of its own, as transformers does."""
    logger = logging.getLogger("a_library")
    yield logger
    logger.handlers.clear()


@pytest.mark.filterwarnings("always")
def test_of_the_libraries_only_errors_are_printed_and_a_file_has_all(
    library: logging.Logger, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "log.txt"
    for log_file in (None, file):
        with quiet_libraries(log_file):
            library.addHandler(logging.StreamHandler())  # imported only now
            library.warning("chatter")
            warnings.warn("sample code", stacklevel=1)
            library.error("broken")
        library.handlers.clear()
    assert capfd.readouterr().err == "broken\n" * 2
    logged = file.read_text()
    assert all(text in logged for text in ("a_library WARNING chatter", "sample code", "a_library ERROR broken"))
    library.addHandler(logging.StreamHandler())
    library.warning("printed again")
    assert capfd.readouterr().err == "printed again\n"


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_full_disk_is_not_told_once_for_every_record(
    library: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    was_raising = logging.raiseExceptions
    with pytest.raises(OSError, match="No space left"), quiet_libraries(Path("/dev/full")):
        library.warning("said")
    assert capfd.readouterr().err == ""
    assert logging.raiseExceptions is was_raising
