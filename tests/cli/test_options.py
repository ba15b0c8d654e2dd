from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tunebook.cli.app import settings, split
from tunebook.errors import RequestError


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (None, (None, [])),
        (["quickstart", "a=1"], ("quickstart", ["a=1"])),
        (["a=1", "b=2"], (None, ["a=1", "b=2"])),
        (["+a=1"], (None, ["+a=1"])),
        (["~a"], (None, ["~a"])),
        (["", "a=1"], (None, ["a=1"])),
    ],
)
def test_a_first_word_without_a_value_is_the_recipe(words: list[str] | None, expected: object) -> None:
    assert split(words) == expected


def test_a_bare_word_is_the_first_setting_and_an_unknown_one_is_refused() -> None:
    assert settings(["a/b", "suite=quick"], ("run", "suite")) == {"run": "a/b", "suite": "quick"}
    assert settings(None, ("run",)) == {}
    with pytest.raises(RequestError, match=r"no setting 'siute' here\. Did you mean 'suite'") as raised:
        settings(["siute=quick"], ("run", "suite"))
    assert raised.value.problem_id == "unknown-key"
    for words in (["a", "b"], ["run=a", "run=b"]):
        with pytest.raises(RequestError, match=r"sets run once more, after run=a; type one of them"):
            settings(words, ("run", "suite"))


COMPLETION = """
import sys
from tunebook.cli.app import main
try:
    main()
finally:
    heavy = {"torch", "hydra", "transformers", "omegaconf", "yaml"} & set(sys.modules)
    print(sorted(heavy), file=sys.stderr)
"""


def completed(shell: str, line: str, **environment: str) -> list[str]:
    """What a shell is offered for the last word of a command line, which may be empty."""
    words = line.split(" ")
    variables = {"_TUNEBOOK_COMPLETE": f"complete_{shell}", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    variables |= {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    done = subprocess.run(
        [sys.executable, "-c", COMPLETION],
        env=os.environ | variables | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == "[]\n"  # the time of a completion is that of its imports
    return done.stdout.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_completes_commands_and_recipes(shell: str) -> None:
    offered = {"bash": ["qwen3b_zero2", "qwen3b_zero2_exact"], "fish": ["qwen3b_zero2", "qwen3b_zero2_exact"]}
    offered["zsh"] = ["_arguments", "'*:", ':(("qwen3b_zero2"', '"qwen3b_zero2_exact"))\'']
    assert completed(shell, "tunebook train qwen3b") == offered[shell]


def test_a_word_is_completed_to_what_may_be_typed_there(tmp_path: Path) -> None:
    (tmp_path / "qwen_mine.yaml").write_text("")
    assert completed("bash", "tunebook repo") == ["report"]
    assert completed("bash", f"tunebook plan --recipes-dir {tmp_path} qwen_") == ["qwen_mine"]
    assert completed("bash", "tunebook sweep qwen_", TUNEBOOK_RECIPES=str(tmp_path)) == ["qwen_mine"]
    assert completed("bash", "tunebook train quickstart q") == []  # KEY=VALUE follows a recipe
    missing = str(tmp_path / "missing")
    assert completed("bash", "tunebook train q", TUNEBOOK_RECIPES=missing) == []  # and no error on the prompt
    assert completed("bash", "tunebook init mine --base zero1") == ["zero1_lora"]
