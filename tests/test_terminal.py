"""Lines wrap at words in a terminal and elsewhere stay whole; output outlives its reader; libraries stay quiet."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from tunebook.terminal import print_lines, quiet_libraries

LINES = ["Batch", "  packed rows of up to 1024 tokens on 8 GPUs or ranks, 1 per pass; how many are worked out later"]


def printed(lines, width, *, is_terminal=True):
    console = Console(width=width, force_terminal=is_terminal, color_system=None)
    with console.capture() as capture:
        print_lines(lines, console)
    return capture.get().splitlines()


@pytest.mark.parametrize("width", [30, 120])
def test_a_terminal_gets_whole_words_and_all_of_them(width):
    first, *rest = printed(LINES, width)
    assert first == "Batch" and max(map(len, rest)) <= width
    assert " ".join(" ".join(rest).split()) == LINES[1].strip()
    assert (len(rest) > 1) == (width < len(LINES[1]))


def test_a_log_gets_each_line_whole():
    assert printed(LINES, 40, is_terminal=False) == LINES


def test_a_path_stays_whole_so_that_it_can_be_copied():
    path = "/a/" + "long-" * 12
    assert printed([f"  read from {path} today"], 40) == ["  read from", f"      {path}", "      today"]


def test_what_looks_like_markup_is_printed():
    assert printed(["[bold]a[/b] \\"], 40) == ["[bold]a[/b] \\"]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_process_continues_without_a_reader(stream):
    """Also a process that it starts afterwards, and rich, which otherwise ends the process."""
    program = (
        "import subprocess, sys; from rich.console import Console; from tunebook.terminal import outlive_readers\n"
        "outlive_readers()\n"
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
        assert process.wait() == 0


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
