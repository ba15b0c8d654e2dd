"""`tunebook chat` with the quickstart's model: one answer for scripts, a conversation in a real (pseudo) terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")
PROMPT = "\n> "


class Screen:
    """A command in a terminal of its own: what is typed reaches it as keys, Ctrl-C as the terminal's signal."""

    def __init__(self, words: list[str], folder: Path) -> None:
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (40, 250))  # lines and columns: long paths are shown in one line
        environment = os.environ | {
            "TERM": "xterm-256color",
            "PATH": f"{folder / '.venv' / 'bin'}:{os.environ['PATH']}",
        }
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *words], stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment
        )
        os.close(theirs)
        self._terminal = ours
        self.text = ""

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._terminal, keys.encode())

    def wait_for(self, text: str, timeout_s: float = 300) -> str:
        """Wait until a text is shown; returns what was shown before it and forgets both."""
        end = time.monotonic() + timeout_s
        while text not in self.text:
            if time.monotonic() > end or not self._read():
                pytest.fail(f"{text!r} was never shown, but:\n{self.text}")
        before, _, self.text = self.text.partition(text)
        return before

    def ask(self, question: str) -> str:
        """Type a line and return what is shown up to the next prompt."""
        self.type(question + "\r")
        self.wait_for(question.split("\n")[-1] + "\n")
        return self.wait_for(PROMPT)

    def end_by(self, keys: str, num_times: int = 12) -> int:
        """Press keys until it ends; the exit code.

        Python hears a Ctrl-C at its prompt only while it waits there, so one that comes a moment earlier is pressed
        again, as a person would.
        """
        for _ in range(num_times):
            self.type(keys)
            end = time.monotonic() + 10
            while self.process.poll() is None and time.monotonic() < end:
                self._read()
            if self.process.poll() is not None:
                return self.process.returncode
        return pytest.fail(f"{keys!r} does not end it:\n{self.text}")

    def _read(self) -> bool:
        """Take in what is shown next; False once the command has ended."""
        readable, _, _ = select.select([self._terminal], [], [], 1)
        if not readable:
            return True
        try:
            shown = os.read(self._terminal, 65536).decode(errors="replace")
        except OSError:  # the other end is closed
            return False
        self.text += _ESCAPES.sub("", shown)
        return True

    def close(self) -> None:
        """End it by force if it is still there."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        os.close(self._terminal)


@pytest.fixture
def open_chat(quickstart, project_root) -> Iterator:
    """Start `tunebook chat RUN ...` in a terminal and wait for its prompt."""
    opened: list[Screen] = []

    def begin(*options: str) -> Screen:
        opened.append(Screen(["tunebook", "chat", str(quickstart.folder), *options], project_root))
        assert "template and tokenizer are those of the run" in opened[-1].wait_for(PROMPT)
        return opened[-1]

    yield begin
    for screen in opened:
        screen.close()


@pytest.fixture(scope="session")
def evaluated(quickstart) -> list[dict[str, str]]:
    """Two held-out questions of each kind of task, with the answers that the evaluation after training got."""
    begin, end = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    chosen: dict[str, list[dict[str, str]]] = {}
    for line in (quickstart.folder / "evaluation" / "after-answers.jsonl").read_text().splitlines():
        answer = json.loads(line)
        question = answer["prompt"].removeprefix(begin).removesuffix(end)
        if "<|im_start|>" not in question:  # one that is no conversation of several turns
            chosen.setdefault(answer["group"], []).append({"question": question, "answer": answer["answer"]})
    return [one for group in chosen.values() for one in group[:2]]


def test_one_answer_for_a_prompt_and_nothing_else(quickstart, evaluated, run):
    for one in evaluated[:2]:
        ended = run(["tunebook", "chat", str(quickstart.folder), one["question"]])
        assert (ended.exit_code, ended.output) == (0, one["answer"].strip() + "\n")  # both streams


def test_a_recipe_means_its_newest_run_and_a_pipe_one_question(quickstart, evaluated, run):
    chat = f"tunebook chat quickstart --outputs {quickstart.outputs} 2>/dev/null"
    ended = run(["bash", "-c", f"printf '%s\\n' '{evaluated[0]['question']}' | {chat}"])
    assert (ended.exit_code, ended.output) == (0, evaluated[0]["answer"].strip() + "\n")


def test_its_answers_are_those_of_the_evaluation(open_chat, evaluated):
    screen = open_chat()
    assert len(evaluated) >= 8
    for one in evaluated:
        assert screen.ask("/reset").strip() == "(a new conversation)"
        assert screen.ask(one["question"]).strip() == one["answer"].strip()


def test_a_conversation_takes_brackets_as_they_are_and_is_ended_by_ctrl_d(open_chat):
    screen = open_chat("--system", "Be [bold] brief")
    screen.ask("Reverse the order: rain key chair")
    screen.ask("[red]Reverse[/red] the order: moon key")
    assert screen.end_by("\x04") == 0
    assert "Traceback" not in screen.text


def test_ctrl_c_ends_a_long_answer_and_then_the_chat(open_chat):
    # At this temperature every token is about as likely, the one that ends an answer too: once in 800.
    screen = open_chat("--temperature", "1000", "--max-new-tokens", "900", "--seed", "1")
    screen.type("Reverse the order: rain key chair\r")
    screen.wait_for("chair\n")
    screen.wait_for(" ")  # the first words of it
    screen.type("\x03")
    assert "(stopped)" in screen.wait_for(PROMPT)
    screen.type("half a line")
    screen.wait_for("half a line")
    assert screen.end_by("\x03") == 0
    assert "Traceback" not in screen.text


def test_another_template_is_refused(quickstart, run, tmp_path):
    import shutil

    copy = shutil.copytree(quickstart.folder, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    with (copy / "model" / "chat_template.jinja").open("a") as file:
        file.write("!")
    ended = run(["tunebook", "chat", str(copy), "Reverse the order: rain key chair"])
    assert ended.exit_code == 4
    assert "the chat template is not the one that" in ended.output
