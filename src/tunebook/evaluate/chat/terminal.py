"""The conversation in a terminal: a prompt, streamed answers, a few commands that begin with a slash."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.text import Text

from tunebook.errors import RequestError, TunebookError, did_you_mean
from tunebook.evaluate.chat.session import Session
from tunebook.second_interrupt import forget_interrupts

PROMPT = "> "
HELP = """\
/reset          forget the conversation, keep the system prompt
/system TEXT    begin again under another system prompt; /system shows it, /system "" takes it away
/save FILE      write the conversation to FILE.jsonl, in a format that can be trained on
/help           this list
/exit           end; so do Ctrl-D, and Ctrl-C here at the prompt
Ctrl-C ends an answer that is being written.
A space in front of a slash makes the line a question."""

_COMMAND = re.compile(r"/([a-zA-Z]+)(?:\s+(.*))?", re.DOTALL)
# A model may write anything, also what would move the cursor, change colours or fill the clipboard.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """The text without what a terminal would obey; lines and tabs stay."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


class Terminal:
    """Reads questions and commands until the user ends it."""

    def __init__(self, session: Session, console: Console, read_line: Callable[[str], str] = input) -> None:
        self._session = session
        self._console = console
        self._read_line = read_line
        self._commands: dict[str, Callable[[str], None]] = {
            "reset": self._reset,
            "system": self._system,
            "save": self._save,
            "help": lambda _: self._say(HELP),
            "exit": self._exit,
        }

    def run(self) -> None:
        """Talk until /exit, Ctrl-D, or Ctrl-C at the prompt."""
        try:
            while True:
                self._take(self._read_line(PROMPT))
        except (EOFError, KeyboardInterrupt):
            self._console.print()

    def _take(self, line: str) -> None:
        command = _COMMAND.fullmatch(line.rstrip())
        try:
            if command is not None:
                self._find(command[1])((command[2] or "").strip())
            elif line.strip():
                self._answer(line.strip())
        except TunebookError as error:
            self._say(error.message, style="red")

    def _find(self, name: str) -> Callable[[str], None]:
        found = self._commands.get(name.lower())
        if found is None:
            known = [f"/{known}" for known in self._commands]
            raise RequestError(
                f"there is no command /{name}.{did_you_mean('/' + name, known)} /help lists them; a space in front of "
                "the slash makes the line a question",
                problem_id="chat-command",
            )
        return found

    def _answer(self, question: str) -> None:
        def show(piece: str) -> None:
            self._console.out(printable(piece), end="", highlight=False)

        try:
            with _interruptible() as is_interrupted:
                answer = self._session.ask(question, show, is_interrupted)
        finally:
            self._console.print()
        for note in answer.notes:
            self._say(f"({note})")

    def _reset(self, _words: str) -> None:
        self._session.reset()
        self._say("(a new conversation)")

    def _system(self, words: str) -> None:
        if not words:
            prompt = self._session.system_prompt
            self._say("(no system prompt)" if prompt is None else f"system prompt: {prompt}")
            return
        self._session.set_system_prompt(None if words in ('""', "''") else words)
        self._say("(a new conversation under this system prompt)" if self._session.system_prompt else "(a new "
                  "conversation without a system prompt)")  # fmt: skip

    def _save(self, words: str) -> None:
        if not words:
            raise RequestError("say where: /save chat.jsonl", problem_id="chat-save")
        file = self._session.save(_unquoted(words))
        self._say(f"(saved: {file})")

    def _exit(self, _words: str) -> None:
        raise EOFError

    def _say(self, text: str, style: str = "dim") -> None:
        self._console.print(Text(printable(text), style=style), soft_wrap=True)


def _unquoted(words: str) -> str:
    """A path as typed, with the quotes or backslashes that a shell would have taken away."""
    try:
        parts = shlex.split(words)
    except ValueError:
        return words
    return parts[0] if len(parts) == 1 else words


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C end the answer at its next token; a second one, when none comes, ends the chat."""
    requests: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        if requests:
            raise KeyboardInterrupt
        requests.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(requests)
        forget_interrupts()
    finally:
        signal.signal(signal.SIGINT, before)
