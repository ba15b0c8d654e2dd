"""`tunebook chat` in the terminal: one answer for `--prompt` or piped input, or a conversation with slash commands."""

from __future__ import annotations

import io
import math
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.text import Text

from tunebook.errors import RequestError, TunebookError, did_you_mean
from tunebook.evaluate.chat import Sampling
from tunebook.evaluate.chat.session import Session, checked_text
from tunebook.evaluate.target import Target, find_target
from tunebook.second_interrupt import forget_interrupts
from tunebook.terminal import print_text, quiet_libraries

PROMPT = "> "
HELP = """\
/reset          forget the conversation, keep the system prompt
/system TEXT    start again with another system prompt; /system shows it, /system "" removes it
/save FILE      write the conversation to FILE.jsonl, in a format that can be trained on
/help           this list
/exit           end; so do Ctrl-D, and Ctrl-C here at the prompt
Ctrl-C ends an answer that is being written.
A space in front of a slash makes the line a question."""

_COMMAND = re.compile(r"/([a-zA-Z]+)(?:\s+(.*))?", re.DOTALL)
# A model may write anything, including sequences that move the cursor, change colors or fill the clipboard.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Replace control characters in the text; line breaks and tabs stay."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def chat_command(
    target: str,
    outputs: Path,
    *,
    prompt: str | None,
    system: str | None,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> int:
    """Chat with a run, a checkpoint, a model folder or a model on the hub; return the exit code.

    With `prompt` or piped input, exactly one answer goes to stdout and everything else to stderr. `system` replaces the
    run's system prompt; an empty one removes it. Raises: RequestError, DataError if the template differs from training,
    DoesNotFitError.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an answer may hold characters that the terminal lacks
    sampling = _sampling(max_new_tokens, temperature, seed)
    if system:
        checked_text(system)
    is_terminal = prompt is None and sys.stdin is not None and sys.stdin.isatty()
    question = None if is_terminal else checked_text(_read_input() if prompt is None else prompt)
    found = find_target(target, outputs)
    # Threads that busy-wait starve each other if other processes run on the same cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with quiet_libraries():
        session, notes = _load(found, sampling, system)
        if question is not None:
            return _answer_once(session, question)
        console = Console(highlight=False)
        lines = [found.name, *notes, "/help lists the commands, Ctrl-D ends"]
        print_text("\n".join(lines), console, style="dim")
        with suppress(ImportError):  # Python may lack it: no arrow keys, history or multi-line paste
            import readline

            readline.parse_and_bind("set enable-bracketed-paste on")
        Terminal(session, console).run()
    return 0


def _sampling(max_new_tokens: int, temperature: float, seed: int) -> Sampling:
    if max_new_tokens < 1:
        raise RequestError(
            f"--max-new-tokens {max_new_tokens}: an answer has at least one token; try --max-new-tokens 512",
            problem_id="chat-setting",
        )
    if temperature != 0 and not 0.01 <= temperature < math.inf:  # dividing logits by less than that overflows
        raise RequestError(
            f"--temperature {temperature}: it is 0 (always the likeliest token) or at least 0.01; try --temperature "
            "0.7",
            problem_id="chat-setting",
        )
    if not 0 <= seed < 2**63:
        raise RequestError(f"--seed {seed}: it is a whole number from 0 on; try --seed 0", problem_id="chat-setting")
    return Sampling(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)


def _load(target: Target, sampling: Sampling, system: str | None) -> tuple[Session, list[str]]:
    """Load the model and return a session and notes. For a small model, importing torch takes the longest."""
    with Console(stderr=True).status(Text(f"loading {target.name}")):
        from tunebook.evaluate.chat.model import load

        loaded = load(target)
        session = Session(loaded.model, sampling, loaded.system_prompt if system is None else system)
    notes = [", ".join([*loaded.notes[:1], f"context {loaded.model.context_tokens:,} tokens"]), *loaded.notes[1:]]
    if session.system_prompt is not None:
        whose = "the run's" if system is None else "yours"
        notes.append(f"system prompt ({whose}): {printable(session.system_prompt)}")
    return session, notes


def _answer_once(session: Session, question: str) -> int:
    is_shown = sys.stdout.isatty()

    def write(piece: str) -> None:
        sys.stdout.write(printable(piece) if is_shown else piece)
        sys.stdout.flush()

    try:
        notes = session.ask(question, write)
        write("\n")
    except BrokenPipeError:  # the reader closed the pipe; Python would raise again when it closes the stream
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    for note in notes:
        print(f"({note})", file=sys.stderr)
    return 0


def _read_input() -> str:
    """Read the piped text, without its final line ending."""
    if sys.stdin is None:  # closed by the parent process
        return ""
    try:
        return sys.stdin.buffer.read().decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the piped text is not UTF-8 (at byte {error.start}); convert it, for example with iconv",
            problem_id="chat-no-text",
        ) from error


class Terminal:
    """Reads questions and commands until the user quits."""

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
        """Chat until /exit, Ctrl-D, or Ctrl-C at the prompt."""
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
                notes = self._session.ask(question, show, is_interrupted)
        finally:
            self._console.print()
        for note in notes:
            self._say(f"({note})")

    def _reset(self, _argument: str) -> None:
        self._session.reset()
        self._say("(a new conversation)")

    def _system(self, argument: str) -> None:
        if not argument:
            prompt = self._session.system_prompt
            self._say("(no system prompt)" if prompt is None else f"system prompt: {prompt}")
            return
        self._session.set_system_prompt(None if argument in ('""', "''") else argument)
        self._say("(a new conversation with this system prompt)" if self._session.system_prompt else "(a new "
                  "conversation without a system prompt)")  # fmt: skip

    def _save(self, argument: str) -> None:
        if not argument:
            raise RequestError("say where: /save chat.jsonl", problem_id="chat-save")
        file = self._session.save(_unquoted(argument))
        self._say(f"(saved: {file})")

    def _exit(self, _argument: str) -> None:
        raise EOFError

    def _say(self, text: str, style: str = "dim") -> None:
        print_text(printable(text), self._console, style=style)


def _unquoted(argument: str) -> str:
    """Return a typed path without the quotes or backslashes that a shell would remove."""
    try:
        parts = shlex.split(argument)
    except ValueError:
        return argument
    return parts[0] if len(parts) == 1 else argument


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C end the answer at its next token; a second Ctrl-C ends the chat if no token comes."""
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
