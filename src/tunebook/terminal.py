"""Print lines of text that wrap at words in a terminal, so that the terminal does not break them inside words."""

from __future__ import annotations

from collections.abc import Iterable

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

_HANGING = 4  # columns by which the rest of a wrapped line is indented more than its start


def print_lines(lines: Iterable[str], console: Console, *, separator: str = " ", style: str = "") -> None:
    """Print lines; in a terminal, each is wrapped at `separator` to its width. A log keeps them whole, to be searched.

    Not for a command: one that is wrapped cannot be copied.
    """
    if console.is_terminal:
        lines = [part for line in lines for part in wrapped(line, console.width, separator)]
    console.print(Text("\n".join(lines), style=style), soft_wrap=True)


def wrapped(line: str, width: int, separator: str = " ") -> list[str]:
    """Wrap a line to `width` columns with a hanging indent; a longer word, such as a path, stays whole."""
    text = line.lstrip(" ")
    indent = " " * (len(line) - len(text))
    first, *rest = text.split(separator)
    parts, current = [], indent + first
    for word in rest:
        longer = current + separator + word
        if cell_len(longer) <= width:
            current = longer
        else:
            parts.append(current.rstrip(" "))
            current = indent + " " * _HANGING + word
    return [*parts, current]
