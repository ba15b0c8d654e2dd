from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tunebook.errors import DataError, DoesNotFitError, RequestError
from tunebook.evaluate.chat.session import Session
from tunebook.evaluate.chat.terminal import HELP, Terminal, chat_command, printable

Sessions = Callable[..., Session]


def talk(session: Any, lines: Iterable[str], *, color: bool = False) -> str:
    """What the terminal shows while these lines are typed, and then Ctrl-D."""
    waiting = iter(lines)
    screen = io.StringIO()

    def read_line(prompt: str) -> str:
        screen.write(prompt)
        line = next(waiting, None)
        if line is None:
            raise EOFError
        screen.write(line + "\n")
        return line

    console = Console(file=screen, width=100, force_terminal=color, color_system="standard" if color else None)
    Terminal(session, console, read_line).run()
    return screen.getvalue()


class Scene:
    """A session whose answer is what a test does."""

    def __init__(self, act: Callable[[Callable[[str], None], Callable[[], bool]], list[str]]) -> None:
        self._act = act
        self.system_prompt: str | None = None

    def ask(self, _question: str, on_text: Callable[[str], None], is_interrupted: Callable[[], bool]) -> list[str]:
        return self._act(on_text, is_interrupted)


def saying(text: str) -> Scene:
    """A session that always answers with this text."""

    def act(on_text: Callable[[str], None], _is_interrupted: Callable[[], bool]) -> list[str]:
        on_text(text)
        return []

    return Scene(act)


def test_questions_are_answered_with_what_was_said_before(session: Sessions) -> None:
    chat = session("apple bird")
    assert talk(chat, ["rain", "", "   ", "key"]) == "> rain\napple bird\n> \n>    \n> key\napple bird\n> \n"
    assert [turn["content"] for turn in chat.turns] == ["rain", "apple bird", "key", "apple bird"]


def test_streamed_text_is_no_markup_and_not_wrapped(session: Sessions) -> None:
    chat = session("[red] :x w", max_new_tokens=40)
    assert talk(chat, ["[bold]rain[/bold]"], color=True).startswith("> [bold]rain[/bold]\n[red] :x w\n")
    assert chat.turns[0]["content"] == "[bold]rain[/bold]"
    long = saying("wort " * 60)
    assert "wort " * 60 in talk(long, ["x"])


def test_what_a_terminal_would_obey_is_not_passed_on() -> None:
    assert printable("a\x1b[31mb\x07\x9b2Jc\rd\te\nf é🦊") == "a\ufffd[31mb\ufffd\ufffd2Jc\ufffdd\te\nf é🦊"
    scene = saying("\x1b]0;title\x07")
    assert "\x1b" not in talk(scene, ["x"])


def test_notes_stand_under_the_answer(session: Sessions) -> None:
    shown = talk(session("apple bird", max_new_tokens=1), ["rain"])
    assert shown == "> rain\napple\n(cut off after --max-new-tokens 1)\n> \n"


def test_reset_and_system(session: Sessions) -> None:
    chat = session("apple")
    shown = talk(chat, ["rain", "/reset", "/system", "/system Be [bold] brief", "/system", '/system ""', "/system"])
    assert shown.splitlines()[2:] == [
        "> /reset", "(a new conversation)", "> /system", "(no system prompt)", "> /system Be [bold] brief",
        "(a new conversation with this system prompt)", "> /system", "system prompt: Be [bold] brief",
        '> /system ""', "(a new conversation without a system prompt)", "> /system", "(no system prompt)", "> ",
    ]  # fmt: skip
    assert chat.turns == []


@pytest.mark.parametrize("typed", ["/save {}", "/SAVE   {} ", "/save '{}'", '/save "{}"'])
def test_save(session: Sessions, tmp_path: Path, typed: str) -> None:
    file = tmp_path / "chat.jsonl"
    shown = talk(session("apple"), ["rain", typed.format(file), "/save"])
    assert f"(saved: {file})" in shown
    assert "say where: /save chat.jsonl" in shown
    assert '"content": "apple"' in file.read_text()


def test_save_to_a_name_with_spaces(session: Sessions, tmp_path: Path) -> None:
    talk(session("apple"), ["rain", f"/save {tmp_path}/my chat.jsonl", f"/save {tmp_path}/it's.jsonl"])
    assert (tmp_path / "my chat.jsonl").is_file()
    assert (tmp_path / "it's.jsonl").is_file()


def test_help_and_exit(session: Sessions) -> None:
    assert talk(session("apple"), ["/help", "/exit", "rain"]) == f"> /help\n{HELP}\n> /exit\n\n"
    assert all(f"/{name}" in HELP for name in ("reset", "system", "save", "help", "exit"))


def test_a_misspelt_command_is_no_question(session: Sessions) -> None:
    chat = session("apple")
    shown = talk(chat, ["/rest", "/Reset", "/", "/etc/passwd", " /rest"])
    assert "there is no command /rest. Did you mean '/reset'? /help lists them" in shown
    assert [turn["content"] for turn in chat.turns[::2]] == ["/", "/etc/passwd", "/rest"]


def test_an_error_does_not_end_the_chat(session: Sessions) -> None:
    shown = talk(session("apple", context=40), ["rain " * 50, "rain"])
    assert "the question has" in shown
    assert shown.endswith("> rain\napple\n> \n")

    def fail(*_: object) -> list[str]:
        raise DoesNotFitError("the GPU ran out of memory")

    assert "the GPU ran out of memory\n> \n" in talk(Scene(fail), ["x"])


def test_ctrl_c_ends_the_answer_and_not_the_chat() -> None:
    def act(on_text: Callable[[str], None], is_interrupted: Callable[[], bool]) -> list[str]:
        on_text("half")
        assert not is_interrupted()
        signal.raise_signal(signal.SIGINT)
        assert is_interrupted()
        return ["stopped"]

    before = signal.getsignal(signal.SIGINT)
    assert talk(Scene(act), ["one", "two"]) == "> one\nhalf\n(stopped)\n> two\nhalf\n(stopped)\n> \n"
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_ends_the_chat_when_no_token_comes() -> None:
    def act(*_: object) -> list[str]:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second one was not heard")

    before = signal.getsignal(signal.SIGINT)
    assert talk(Scene(act), ["one", "two"]) == "> one\n\n\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_at_the_prompt_ends_the_chat(session: Sessions) -> None:
    def read_line(_prompt: str) -> str:
        raise KeyboardInterrupt

    Terminal(session("apple"), Console(file=io.StringIO()), read_line).run()


CHOSEN = "the newest finished run of quickstart: {}\n"


@pytest.fixture(autouse=True)
def environment_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture
def chat(run: Path) -> Callable[..., int]:
    """The command on the run, with the defaults of the command line."""

    def command(target: str = "quickstart", **settings: Any) -> int:
        defaults: dict[str, Any] = {
            "prompt": None, "system": None, "max_new_tokens": 16, "temperature": 0.0, "seed": 0
        }  # fmt: skip
        return chat_command(target, run.parents[1], **(defaults | settings))

    return command


def pipe(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))


def test_a_prompt_gets_one_answer_and_nothing_else_on_stdout(
    chat: Callable[..., int], run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert chat(prompt="rain") == 0
    assert capfd.readouterr() == ("apple bird\n", CHOSEN.format(run))


@pytest.mark.parametrize(
    ("piped", "prompt"),
    [("two lines\nof réin\n".encode(), None), (b"", "/help")],  # a prompt is a question like any other
)
def test_one_question_is_piped_or_a_prompt(
    chat: Callable[..., int],
    run: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    piped: bytes,
    prompt: str | None,
) -> None:
    pipe(monkeypatch, piped)
    assert chat(prompt=prompt) == 0
    assert capfd.readouterr() == ("apple bird\n", CHOSEN.format(run))


def test_what_is_to_be_said_about_an_answer_goes_to_stderr(
    chat: Callable[..., int], run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert chat(prompt="rain", max_new_tokens=1) == 0
    assert capfd.readouterr() == (
        "apple\n",
        CHOSEN.format(run) + "(cut off after --max-new-tokens 1)\n",
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt": " "}, "nothing to answer"),
        ({"prompt": "a\udcff"}, "not UTF-8"),
        ({"prompt": "a", "system": "\udcff"}, "not UTF-8"),
        ({"prompt": "a", "max_new_tokens": 0}, "--max-new-tokens 0: .*try --max-new-tokens 512"),
        ({"prompt": "a", "temperature": -0.5}, r"--temperature -0\.5: .*try --temperature 0\.7"),
        ({"prompt": "a", "temperature": 0.001}, "at least 0.01"),
        ({"prompt": "a", "temperature": float("nan")}, "--temperature nan"),
        ({"prompt": "a", "seed": -1}, "--seed -1: .*try --seed 0"),
        ({"prompt": "a", "target": "quickstrat"}, "Did you mean 'quickstart'"),
        ({"prompt": "rain " * 2000}, "make it shorter"),
    ],
)
def test_wrong_requests_say_what_to_type(chat: Callable[..., int], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        chat(**settings)


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "nothing to answer"), (b"\xff\xfe", r"not UTF-8 \(at byte 0\)")]
)
def test_piped_input_that_is_no_text(
    chat: Callable[..., int], monkeypatch: pytest.MonkeyPatch, content: bytes, message: str
) -> None:
    pipe(monkeypatch, content)
    with pytest.raises(RequestError, match=message):
        chat()


def test_a_changed_template_ends_with_the_code_of_wrong_data(chat: Callable[..., int], run: Path) -> None:
    (run / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(DataError, match="not the one that") as raised:
        chat(prompt="rain")
    assert raised.value.exit_code == 4


def test_a_reader_that_goes_away_is_no_error(
    chat: Callable[..., int], run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `tunebook chat ... | head -c 0`."""
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w", encoding="utf-8") as stdout:  # which raises no error either when it is closed
        monkeypatch.setattr(sys, "stdout", stdout)
        assert chat(str(run), prompt="rain") == 0
        monkeypatch.undo()
    assert capfd.readouterr().err == ""


def test_requests_are_checked_before_torch_is_imported(run_python: Callable[[str], str]) -> None:
    loaded = run_python("import sys, tunebook.evaluate.chat; print(sorted({'torch', 'lm_eval'} & set(sys.modules)))")
    assert loaded == "[]\n"
