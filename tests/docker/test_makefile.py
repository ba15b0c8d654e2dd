"""What is typed after make: which of it reaches the front door, and what is said where it would not."""

from __future__ import annotations

import re

import pytest


@pytest.mark.parametrize("target", ["report", "verify", "fetch"])
@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ([], ["quickstart"]),
        (["RECIPE=mine"], ["mine"]),
        (["ARGS=outputs/a --json"], ["outputs/a", "--json"]),
        (["RECIPE=mine", "ARGS=--json"], ["mine", "--json"]),
    ],
)
def test_a_recipe_that_is_typed_is_not_lost_beside_args(machine, target, typed, words):
    machine.venv()
    done = machine.command("make", target, *typed)
    assert re.findall(r"^<(.*)>$", done.stdout, flags=re.MULTILINE) == [target, *words], done.stderr


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("recipe=mine", 'recipe=mine would be ignored. Type RECIPE="mine".'),
        ("args=--dry-run", 'Type ARGS="--dry-run".'),
        ("gpu=cpu", 'Type GPU="cpu".'),
        ("where=local", 'Type WHERE="local".'),
        ("training.seed=1", 'training.seed=1 would be ignored. Type ARGS="training.seed=1".'),
    ],
)
def test_what_make_would_ignore_is_refused_with_what_was_meant(machine, refused, typed, told):
    machine.venv()
    done = machine.command("make", "train", "GPUS=all", typed)
    refused(done, told)
    assert done.stdout == ""


def test_what_others_read_from_the_environment_may_have_small_letters(machine):
    machine.venv()
    assert machine.command("make", "list", "https_proxy=proxy:3128", "HF_HUB_OFFLINE=1").returncode == 0
    assert machine.command("make", "train", WHERE="local", recipe="of the environment").returncode == 0
