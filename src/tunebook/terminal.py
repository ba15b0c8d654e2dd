"""Print text, keep the libraries off the terminal, and outlive the reader of the output."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import TextWrapper
from typing import Any

from rich.console import Console
from rich.text import Text


def print_lines(lines: Iterable[str], console: Console, *, style: str = "", indent: int = 6) -> None:
    """Print lines; in a terminal, each is wrapped at words with a hanging indent. A log keeps them whole.

    Not for a command: one that is wrapped cannot be copied. A longer word, such as a path, stays whole.
    """
    if console.is_terminal:
        wrap = TextWrapper(
            console.width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
        )
        lines = map(wrap.fill, lines)
    print_text("\n".join(lines), console, style=style)


def print_text(text: str, console: Console, *, style: str = "") -> None:
    """Print text as it is: brackets are no markup, and no line is broken where someone may copy or search it."""
    console.print(Text(text, style=style), soft_wrap=True)


@contextmanager
def quiet_libraries(log_file: Path | None = None) -> Iterator[None]:
    """Print errors of the libraries, but none of their other log records and warnings; `log_file` gets all of them.

    Libraries add handlers when they are imported, so records are taken before any handler gets them.
    """
    to_file = logging.NullHandler() if log_file is None else logging.FileHandler(log_file)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    to_terminal = logging.Logger.callHandlers

    def call_handlers(logger: logging.Logger, record: logging.LogRecord) -> None:
        to_file.handle(record)
        if record.levelno >= logging.ERROR:
            to_terminal(logger, record)

    was_raising, logging.raiseExceptions = logging.raiseExceptions, False  # a full disk would print one per record
    logging.Logger.callHandlers = call_handlers  # type: ignore[assignment]
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        logging.Logger.callHandlers = to_terminal  # type: ignore[method-assign]
        logging.raiseExceptions = was_raising
        to_file.close()


def outlive_readers() -> None:
    """From now on, this process continues if the reader of its output leaves, as `head` does: the output is dropped.

    For processes that train or evaluate for hours. Streams without a descriptor are left as they are.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with suppress(AttributeError, OSError):  # none, as in a daemon, or not a file
            stream.flush()
            raw = _Outliving(stream.fileno(), "wb", closefd=False)
            same = {"encoding": stream.encoding, "errors": stream.errors}
            setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(raw), line_buffering=True, **same))


class _Outliving(io.FileIO):
    """A pipe or file whose descriptor leads nowhere once nobody reads it, also for processes started later."""

    def write(self, data: Any, /) -> int:
        """Write, or drop what nobody reads."""
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)
