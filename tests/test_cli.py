"""The command line's endings: which exit code, and what is printed instead of a traceback."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys

import pytest

from tunebook import cli
from tunebook.errors import DataError


@pytest.fixture
def ended_with(monkeypatch, capsys):
    """The exit code and the messages of `tunebook report` when it ends with an error."""

    def end(error):
        def fail(*_, **__):
            raise error

        monkeypatch.setattr("tunebook.record.run_folder.resolve_run", fail)
        monkeypatch.setattr(sys, "argv", ["tunebook", "report", "latest"])
        before = signal.getsignal(signal.SIGTERM)
        try:
            with pytest.raises(SystemExit) as caught:
                cli.main()
        finally:
            signal.signal(signal.SIGTERM, before)
        return caught.value.code, capsys.readouterr().err

    return end


def test_an_error_of_ours_has_its_code_and_names_its_explanation(ended_with):
    assert ended_with(DataError("line 17 is broken", problem_id="data-broken-json")) == (
        4,
        "error: line 17 is broken\nmore: tunebook explain data-broken-json\n",
    )


def test_ctrl_c_is_a_request_to_stop(ended_with):
    assert ended_with(KeyboardInterrupt()) == (6, "interrupted\n")


def test_a_full_disk_does_not_fit(ended_with):
    code, said = ended_with(OSError(errno.ENOSPC, "No space left on device"))
    assert code == 3
    assert said.startswith("error: no space is left to write")


def test_what_nobody_expected_keeps_its_traceback(monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("tunebook.record.run_folder.resolve_run", fail)
    monkeypatch.setattr(sys, "argv", ["tunebook", "report", "latest"])
    with pytest.raises(ZeroDivisionError, match="a bug"):
        cli.main()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture
def run(monkeypatch, capsys):
    """`run("train", "quickstart")`: the exit code of a command in this process, and what it printed to each stream."""

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["tunebook", *words])
        before = signal.getsignal(signal.SIGTERM)
        try:
            with pytest.raises(SystemExit) as caught:
                cli.main()
        finally:
            signal.signal(signal.SIGTERM, before)
        printed = capsys.readouterr()
        return caught.value.code, printed.out, printed.err

    return command


def test_an_option_that_should_be_an_override_is_told_how(run):
    code, _, said = run("train", "quickstart", "--seed", "3")
    assert code == 2
    assert "Settings are typed as key=value, without dashes" in said


def test_data_warns_of_what_it_does_not_read(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))
    turns = [{"role": "user", "content": "leaf"}, {"role": "assistant", "content": "horse"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": turns}))
    words = ("dataset=jsonl", f"dataset.path={tmp_path / 'chat.jsonl'}", "dataset.name=organisation/name")
    code, shown, _ = run("data", "quickstart", *words, "dataset.num_workers=1", "--samples", "1")
    assert code == 0
    assert "warning: dataset.name (from override 'dataset.name=organisation/name'): dataset.source=files does" in shown
    assert "[[horse<|im_end|>]]" in shown


PROGRAM = """
import os, signal, sys, time
from tunebook.cli import _interrupt_on_sigterm
_interrupt_on_sigterm()
if "fork" in sys.argv:
    worker = os.fork()
    if worker == 0:
        time.sleep(20)
    time.sleep(0.2)
    os.kill(worker, signal.SIGTERM)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) + 100)
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(20)
except KeyboardInterrupt:
    sys.exit(6)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("words", "code"), [([], 6), (["fork"], 100 - signal.SIGTERM)])
def test_sigterm_interrupts_the_command_and_ends_its_workers_in_silence(words, code):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, timeout=30, env=dict(os.environ)
    )
    assert (done.returncode, done.stderr) == (code, "")
