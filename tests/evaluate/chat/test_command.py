from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tunebook.errors import DataError, RequestError
from tunebook.evaluate.chat import chat_command

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


def test_piped_text_is_one_question(
    chat: Callable[..., int], run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe(monkeypatch, "two lines\nof réin\n".encode())
    assert chat() == 0
    assert capfd.readouterr() == ("apple bird\n", CHOSEN.format(run))


def test_a_prompt_beats_what_is_piped(
    chat: Callable[..., int], run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe(monkeypatch, b"")
    assert chat(prompt="/help") == 0  # a question like any other
    assert capfd.readouterr().out == "apple bird\n"


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


def test_a_reader_that_goes_away_is_no_error(run: Path, run_python: Callable[[str], str]) -> None:
    """`tunebook chat ... | head -c 0` in a process of its own, which ends without a word."""
    program = (
        "from pathlib import Path; from tunebook.evaluate.chat import chat_command\n"
        f"raise SystemExit(chat_command({str(run)!r}, Path(), prompt='rain', system=None, max_new_tokens=16, "
        "temperature=0.0, seed=0))"
    )
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run([sys.executable, "-c", program], stdout=writes, stderr=subprocess.PIPE, timeout=60)
    os.close(writes)
    assert (done.returncode, done.stderr) == (0, b"")


def test_requests_are_checked_before_torch_is_imported(run_python: Callable[[str], str]) -> None:
    loaded = run_python("import sys, tunebook.evaluate.chat; print(sorted({'torch', 'lm_eval'} & set(sys.modules)))")
    assert loaded == "[]\n"
