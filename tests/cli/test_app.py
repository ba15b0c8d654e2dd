"""The exit codes of the command line, and the messages instead of tracebacks."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tunebook import __version__
from tunebook.cli import app as cli
from tunebook.cli.options import task_names
from tunebook.errors import DataError, RequestError
from tunebook.evaluate.command import EvaluationRequest


@pytest.fixture(autouse=True)
def own_signals():
    """Restores the signal handlers, since the command runs in this process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def ended_with(monkeypatch, capsys):
    """The exit code and the messages of `tunebook report` when it ends with an error."""

    def end(error):
        def fail(*_, **__):
            raise error

        monkeypatch.setattr("tunebook.record.run_folder.resolve_run", fail)
        monkeypatch.setattr(sys, "argv", ["tunebook", "report", "latest"])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code, capsys.readouterr().err

    return end


def test_an_error_of_ours_has_its_code_and_a_rule_its_explanation(ended_with):
    broken = DataError("line 17 is broken", problem_id="data-broken-json")
    assert ended_with(broken) == (4, "error: line 17 is broken\n")
    rule = RequestError("no bf16", problem_id="bf16-on-volta")
    assert ended_with(rule) == (2, "error: no bf16\nmore: tunebook explain bf16-on-volta\n")


def test_ctrl_c_is_a_request_to_stop(ended_with):
    assert ended_with(KeyboardInterrupt()) == (6, "interrupted\n")


def test_the_version_is_printed(run):
    assert run("--version")[:2] == (0, f"tunebook {__version__}\n")


@pytest.mark.parametrize("words", [("--compare", "parallelism=ddp,fsdp", "--json"), ("--yaml", "--measure")])
def test_one_thing_is_printed_of_a_plan(run, words):
    code, out, said = run("plan", "quickstart", *words)
    assert (code, out) == (2, "")
    assert "type one of them" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train", "--learning-rate", "1e-4"), "type optimizer.learning_rate=2e-5"),
        (("train", "--rl", "dpo"), "type method=dpo"),
        (("train", "--max_stps", "3"), "typed without dashes, such as training.seed=1"),
        (("train", "--outputs", "mine"), "outputs=VALUE"),
        (("tain", "quickstart"), "'train'"),
        (("serve", "quickstart"), "`tunebook export`"),
        (("merge-lora", "quickstart"), "`tunebook export RUN --merge`"),
    ],
)
def test_a_wrong_option_or_command_says_what_to_type(run, words, said):
    code, _, printed = run(*words)
    assert code == 2
    assert said in printed


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ("latest", None, False)),
        (["What is 2=2?"], ("latest", "What is 2=2?", False)),
        (["Say", "far"], ("latest", "Say far", False)),
        (["quickstart", "far?"], ("quickstart", "far?", False)),
        (["mine"], ("mine", None, False)),
        (["mini"], ("latest", "mini", False)),
        (["org/model", ""], ("org/model", "", False)),
        (["model=gpt2", "mine"], ("gpt2", "mine", True)),
        (["latest"], ("latest", None, False)),
    ],
)
def test_a_word_of_a_chat_is_the_model_if_it_names_one_and_else_the_question(
    run, monkeypatch, tmp_path, words, expected
):
    (tmp_path / "mine" / "2026-01-01T00-00-00Z").mkdir(parents=True)
    (tmp_path / "mine" / "2026-01-01T00-00-00Z" / "run.yaml").touch()
    asked = []
    monkeypatch.setattr("tunebook.evaluate.chat.chat_command", lambda target, _, **rest: asked.append((target, rest)))
    assert run("chat", "--outputs", str(tmp_path), *words)[0] == 0
    ((target, rest),) = asked
    assert (target, rest["question"], rest["is_model"]) == expected
    assert run("chat", "mdel=gpt2")[0] == 2


def test_export_report_and_verify_take_the_newest_run(run, monkeypatch, tmp_path):
    folder = tmp_path / "mine" / "2026-01-01T00-00-00Z"
    folder.mkdir(parents=True)
    (folder / "run.yaml").touch()
    taken = []
    monkeypatch.setattr("tunebook.record.report.write_report", lambda folder, _: taken.append([folder]))
    monkeypatch.setattr("tunebook.commands.verify.verify_command", lambda runs, *_, **__: taken.append(runs) or 0)
    monkeypatch.setattr("tunebook.checkpoint.export.run.export_run", lambda run, *_, **__: taken.append([run]))
    for command in ("report", "verify", "export"):
        code, _, said = run(command, "--outputs", str(tmp_path))
        assert (code, said) == (0, f"the newest run: {folder}\n")
    assert taken == [[folder], [str(folder)], [str(folder)]]


def test_a_full_disk_does_not_fit(ended_with):
    code, said = ended_with(OSError(errno.ENOSPC, "No space left on device"))
    assert code == 3
    assert said.startswith("error: no space is left to write")


def test_unexpected_error_keeps_its_traceback(monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("tunebook.record.run_folder.resolve_run", fail)
    monkeypatch.setattr(sys, "argv", ["tunebook", "report", "latest"])
    with pytest.raises(ZeroDivisionError, match="a bug"):
        cli.main()


@pytest.fixture
def run(monkeypatch, capsys):
    """`run("train", "quickstart")`: the exit code of a command in this process, and what it printed to each stream."""

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["tunebook", *words])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        printed = capsys.readouterr()
        return caught.value.code, printed.out, printed.err

    return command


def test_data_warns_of_what_it_does_not_read(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))
    turns = [{"role": "user", "content": "leaf"}, {"role": "assistant", "content": "horse"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": turns}))
    words = ("dataset=file", f"dataset.path={tmp_path / 'chat.jsonl'}", "dataset.name=organization/name")
    code, shown, _ = run("data", "quickstart", *words, "dataset.num_workers=1", "--samples", "1")
    assert code == 0
    assert "warning: dataset.name (from override 'dataset.name=organization/name')" in shown
    assert "[[horse<|im_end|>]]" in shown


def test_data_of_fewer_documents_than_a_step_can_be_looked_at(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path))
    code, shown, _ = run("data", "quickstart", "dataset.max_documents=9", "dataset.num_workers=1", "--samples", "0")
    assert code == 0 and "train: 9 documents" in shown
    code, _, said = run("train", "quickstart", "dataset.max_documents=9", "--dry-run")
    assert code == 2 and "training.global_samples=9" in said


def test_plan_and_dry_run_are_the_same_plan(run):
    code, planned, _ = run("plan", "quickstart", "training.seed=3")
    assert code == 0
    assert run("train", "quickstart", "training.seed=3", "--dry-run") == (0, planned, "")
    code, shown, said = run("plan", "quickstart", "training.sead=3", "--json")
    assert (code, said) == (2, "")
    assert json.loads(shown)["problems"][0]["id"] == "unknown-key"


def test_eval_hands_on_what_was_asked(run, monkeypatch, tmp_path):
    asked = []

    def evaluate(request, outputs, _console):
        asked.append((request, outputs))
        raise DataError("that is all")

    monkeypatch.setattr("tunebook.evaluate.command.evaluate_command", evaluate)
    options = ("--limit", "3", "--num-fewshot", "0", "--batch-size", "auto")
    assert run("eval", "run=a/b", "suite=quickstart", *options, "--outputs", str(tmp_path))[0] == 4
    expected = EvaluationRequest(run="a/b", suite="quickstart", limit=3, num_fewshot=0, batch_size="auto")
    assert asked.pop() == (expected, tmp_path)
    run("eval", "a/b", "--processes", "2")
    expected = EvaluationRequest(run="a/b", processes=2)
    assert asked.pop() == (expected, Path("outputs"))
    code, _, said = run("eval", "suit=quick")
    assert code == 2
    assert "there is no setting 'suit' here. Did you mean 'suite'?" in said


def test_eval_takes_tasks():
    assert task_names({"tasks": "[gsm8k,ifeval]"}) == task_names({"tasks": "gsm8k, ifeval"}) == ["gsm8k", "ifeval"]
    assert (task_names({"tasks": ""}), task_names({})) == ([], None)


@pytest.mark.parametrize("words", ["eval run=a model=b", "chat run=a model=b", "fetch suite=a tasks=b"])
def test_settings_that_exclude_each_other_are_refused(run, words):
    code, _, message = run(*words.split())
    assert code == 2
    assert "exclude each other" in message


PROGRAM = """
import os, signal, sys, time
from tunebook.cli.app import _interrupt_on_request
number = signal.Signals[sys.argv[1]]
if "ignored" in sys.argv:
    signal.signal(number, signal.SIG_IGN)
_interrupt_on_request()
if "fork" in sys.argv:
    worker = os.fork()
    if worker == 0:
        time.sleep(20)
    time.sleep(0.2)
    os.kill(worker, number)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) + 100)
try:
    os.kill(os.getpid(), number)
    time.sleep(0.1 if "ignored" in sys.argv else 20)
except KeyboardInterrupt:
    if "again" in sys.argv:
        os.kill(os.getpid(), number)
    sys.exit(6)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["SIGTERM"], 6),
        (["SIGTERM", "fork"], 100 - signal.SIGTERM),
        (["SIGHUP"], 6),
        (["SIGHUP", "fork"], 100 - signal.SIGHUP),
        (["SIGHUP", "again"], 6),  # the shell tells of a closed terminal, and so does the kernel
        (["SIGHUP", "ignored"], 0),  # by nohup
    ],
    ids=["term", "term-fork", "hup", "hup-fork", "hup-again", "hup-ignored"],
)
def test_a_signal_interrupts_the_command_and_ends_its_workers_in_silence(words, code):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, timeout=30, env=dict(os.environ)
    )
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize("value", ["main\ntouch injected", "main\x1b]0;x\x07"], ids=ascii)
def test_a_recipe_with_a_line_break_for_a_job_script_ends_with_2_and_shows_none(run, tmp_path, monkeypatch, value):
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))
    head = "# @package _global_\ndefaults:\n  - quickstart\n  - override /launcher: slurm\n  - _self_\n"
    (tmp_path / "evil.yaml").write_text(f"{head}launcher:\n  partition: {json.dumps(value)}\n")
    code, out, said = run("train", "evil", "--recipes-dir", str(tmp_path), "--dry-run")
    assert code == 2
    assert "#SBATCH" not in out
    assert "tunebook explain control-characters" in out + said
    assert not any(sign in out + said for sign in "\r\u2028\x1b\x07")
