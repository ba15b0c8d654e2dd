"""Command lines of other tools are refused with what to type instead."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tunebook import cli

Answer = Callable[..., str]


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Answer]:
    """What a command line that is a wrong request is answered with: `answer("train", "--lr", "1")`."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.chdir(tmp_path)

    def of(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["tunebook", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 2
        return capsys.readouterr().err

    yield of
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        ("run quickstart training.seed=3", "no command 'run'; type: tunebook train quickstart training.seed=3\n"),
        ("sft quickstart", "type: tunebook train quickstart\n"),
        ("finetune --config x.yaml", "type: tunebook train --config x.yaml\n"),
        ("evaluate run=latest", "type: tunebook eval run=latest\n"),
        ("test quickstart", "type: tunebook eval quickstart\n"),
        ("infer run=latest", "type: tunebook chat run=latest\n"),
        ("generate --prompt 'a b'", "type: tunebook chat --prompt 'a b'\n"),
        ("serve run=latest", "type: tunebook export run=latest\nTunebook serves nothing"),
        ("merge run=latest", "type: tunebook export run=latest --merge\n"),
        ("preprocess quickstart", "type: tunebook data quickstart\n"),
        ("dpo quickstart", "there is no command 'dpo'.\nTunebook does supervised fine-tuning alone"),
        ("quickstart training.max_steps=3", "type: tunebook train quickstart training.max_steps=3\n"),
        ("training.max_steps=3", "type: tunebook train training.max_steps=3\n"),
        ("tain quickstart", "there is no command 'tain'. Did you mean 'train'? Commands: chat, data, diff"),
    ],
)  # fmt: skip
def test_a_command_of_another_tool_is_answered_with_ours(answer: Answer, words: str, instead: str) -> None:
    assert instead in answer(*shlex.split(words))


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        ("train quickstart -m training.seed=0,1 --dry-run",
         "there is no option '-m'; type: tunebook sweep quickstart training.seed=0,1 --dry-run\n"),
        ("train quickstart --multirun training.seed=0,1", "type: tunebook sweep quickstart training.seed=0,1\n"),
        ("-m train quickstart training.seed=0,1", "type: tunebook sweep quickstart training.seed=0,1\n"),
        ("train quickstart --cfg job", "there is no option '--cfg'; type: tunebook plan quickstart --yaml\n"),
        ("train quickstart --config-dir /recipes --dry-run",
         "type: tunebook train quickstart --dry-run --recipes-dir /recipes\n"),
        ("train quickstart --config-name other training.seed=1", "type: tunebook train other training.seed=1\n"),
        ("train --config my/own.yaml --dry-run", "type: tunebook train own --dry-run --recipes-dir my\n"),
        ("train quickstart --learning_rate 1e-4 --dry-run",
         "error: '--learning_rate': there is no key 'learning_rate' as in transformers, TRL, axolotl, LLaMA-Factory, "
         "ms-swift. Did you mean 'optimizer.learning_rate'? Type optimizer.learning_rate=1e-4."),
        ("train quickstart --learning-rate=1e-4", "Type optimizer.learning_rate=1e-4."),
        ("train quickstart --bf16 --dry-run", "type precision=bf16 instead"),
        ("train quickstart --bf16 training.seed=1", "type precision=bf16 instead"),
        ("train quickstart -lr 1e-4", "type optimizer.learning_rate=1e-4 instead"),
        ("train quickstart --max_steps -1", "Type training.max_steps=null."),
        ("train quickstart --training.max_steps 20",
         "'--training.max_steps': settings have no dashes; type training.max_steps=20\n"),
        ("train quickstart --parallelism zero2", "type parallelism=zero2\n"),
        ("train quickstart --run_folder /x", "there is no option '--run_folder'; type --run-folder /x\n"),
        ("train quickstart --dry_run", "there is no option '--dry_run'; type --dry-run\n"),
        ("train quickstart --dry-rn", "there is no option '--dry-rn'. Did you mean '--dry-run'?\nSettings are typed"),
        ("train quickstart --neftune_noise_alpha 5", "it is not offered"),
        ("eval --model org/name --tasks gsm8k --num_fewshot 5",
         "there is no option '--model'; type model=org/name\nthere is no option '--tasks'; type tasks=gsm8k\n"
         "there is no option '--num_fewshot'; type --num-fewshot 5\n"),
        ("chat --run latest", "there is no option '--run'; type run=latest\n"),
        ("export --run latest", "type the run alone: tunebook export latest\n"),
        ("report --learning_rate 1", "there is no option '--learning_rate'."),
        ("export latest merge=true to=out",
         "'merge=true': options have dashes; type --merge\n'to=out': options have dashes; type --to out\n"),
        ("export latest merge=false", "'merge=false': options have dashes; type nothing\n"),
        ("train quickstart --lr 1e-4 --seed 3 --lr 2e-4", "Type training.seed=3. "),
        ("chat --model org/name", "there is no option '--model'; type model=org/name\n"),
        ("explain --lora_r", "type: tunebook explain lora_r\n"),
    ],
)  # fmt: skip
def test_an_option_of_another_tool_is_answered_with_ours(answer: Answer, words: str, instead: str) -> None:
    assert instead in answer(*shlex.split(words))


def test_every_option_is_answered_at_once(answer: Answer) -> None:
    said = answer("train", "quickstart", "--lr", "1e-4", "--lora_r", "8", "--dry-run", "--unheard-of", "x")
    assert said.startswith("error: '--lr': there is no key 'lr'")
    assert "type optimizer.learning_rate=1e-4 instead" in said
    assert "\n'--lora_r': there is no key 'lora_r'" in said
    assert "\nthere is no option '--unheard-of'.\nSettings are typed as key=value" in said


@pytest.mark.parametrize(
    "words", ["export run=/x/y", "report run=/x/y", "verify run=/x/y", "reproduce run=/x/y", "diff run=/x/y run=/z",
              "chat run=/x/y --prompt hi", "chat model=/x/y --prompt hi", "export /x/y"],
)  # fmt: skip
def test_a_run_may_be_named_as_a_setting(answer: Answer, words: str) -> None:
    assert "there is no run '/x/y'" in answer(*words.split())


def test_a_run_without_a_name_and_two_of_them_are_refused(answer: Answer) -> None:
    assert "'run=' names no run; type run=FOLDER" in answer("export", "run=")
    assert "run= and model= both say what is talked to" in answer("chat", "run=a", "model=b")
    assert "Type model=org/name instead" in answer("eval", "model_name_or_path=org/name")
