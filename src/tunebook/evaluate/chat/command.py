"""What `tunebook chat` does: a conversation in a terminal, or one answer for `--prompt` or piped input."""

from __future__ import annotations

import io
import math
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tunebook.errors import RequestError
from tunebook.evaluate.chat.answering import Sampling
from tunebook.evaluate.chat.session import Session, checked_text
from tunebook.evaluate.chat.terminal import Terminal, printable
from tunebook.evaluate.target import Target, find_target


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
    """Talk to a run, a checkpoint, a model folder or a model on the hub; the exit code.

    With `prompt`, or where the input is no terminal, exactly one answer is written to the standard output and
    everything else to the standard error. `system` replaces the run's system prompt; an empty one takes it away.
    Raises: RequestError, DataError for another template than in training, DoesNotFitError.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an answer may hold letters that this terminal cannot show
    sampling = _sampling(max_new_tokens, temperature, seed)
    if system:
        checked_text(system)
    is_terminal = prompt is None and sys.stdin is not None and sys.stdin.isatty()
    question = None if is_terminal else checked_text(_read_input() if prompt is None else prompt)
    found = find_target(target, outputs)
    # Threads that wait by spinning starve each other where something else runs on the same cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    from tunebook.evaluate.chat.loading import quiet_libraries

    with quiet_libraries():
        session, notes = _load(found, sampling, system)
        if question is not None:
            return _answer_once(session, question)
        console = Console(highlight=False)
        lines = [found.name, *notes, "/help lists the commands, Ctrl-D ends"]
        console.print(Text("\n".join(lines), style="dim"), soft_wrap=True)
        _edit_lines()
        Terminal(session, console).run()
    return 0


def _sampling(max_new_tokens: int, temperature: float, seed: int) -> Sampling:
    if max_new_tokens < 1:
        raise RequestError(
            f"--max-new-tokens {max_new_tokens}: an answer has at least one token; try --max-new-tokens 512",
            problem_id="chat-setting",
        )
    if temperature != 0 and not 0.01 <= temperature < math.inf:  # logits divided by less than that overflow
        raise RequestError(
            f"--temperature {temperature}: it is 0 (always the likeliest token) or at least 0.01; try --temperature "
            "0.7",
            problem_id="chat-setting",
        )
    if not 0 <= seed < 2**63:
        raise RequestError(f"--seed {seed}: it is a whole number from 0 on; try --seed 0", problem_id="chat-setting")
    return Sampling(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)


def _load(target: Target, sampling: Sampling, system: str | None) -> tuple[Session, list[str]]:
    """A session with the model, and what to say about it. Importing torch takes most of it for a small model."""
    errors = Console(stderr=True)
    with errors.status(Text(f"loading {target.name}")):
        from tunebook.evaluate.chat.loading import load

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
        answer = session.ask(question, write)
        write("\n")
    except BrokenPipeError:  # the reader has what it wanted; Python would complain again when it closes the stream
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    for note in answer.notes:
        print(f"({note})", file=sys.stderr)
    return 0


def _read_input() -> str:
    """What was piped in, without the line's end."""
    if sys.stdin is None:  # closed by who started this
        return ""
    try:
        return sys.stdin.buffer.read().decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the piped text is not UTF-8 (at byte {error.start}); convert it, for example with iconv",
            problem_id="chat-no-text",
        ) from error


def _edit_lines() -> None:
    """Arrow keys, history and pasting of several lines, where Python was built with them."""
    try:
        import readline
    except ImportError:
        return
    readline.parse_and_bind("set enable-bracketed-paste on")
