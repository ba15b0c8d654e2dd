"""What the benchmark of a start types and sums up."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from start_up import LARGE, ONE_STEP, median_of, words_of


def arguments(*words: str, large: bool = False) -> argparse.Namespace:
    return argparse.Namespace(recipe="qwen3b_zero2", words=list(words), large=large)


def test_what_was_typed_replaces_what_is_added() -> None:
    words = words_of(arguments("packing.row_length=512", "evaluation=quick", large=True))
    assert words[0] == "qwen3b_zero2"
    assert "packing.row_length=512" in words
    assert "packing.row_length=8192" not in words
    keys = [word.split("=")[0] for word in words[1:]]
    assert len(keys) == len(set(keys)) == len(ONE_STEP) + len(LARGE) + 1
    assert words_of(arguments()) == ["qwen3b_zero2", *ONE_STEP]


@pytest.mark.parametrize(("words", "tokens"), [([], 32768), (["hardware.gpus_per_node=2"], 65536)], ids=["one", "two"])
def test_every_gpu_has_the_same_tokens(words: list[str], tokens: int) -> None:
    assert f"training.global_tokens={tokens}" in words_of(arguments(*words, large=True))


def test_medians_are_phase_by_phase() -> None:
    lines = [
        {"first_step_s": total, "launcher": {"plan": plan}, "rank": {"model": model}}
        for total, plan, model in ((9.0, 1.0, 8.0), (8.0, 3.0, 5.0), (7.0, 2.0, 5.5))
    ]
    assert median_of(lines) == {"first_step_s": 8.0, "launcher": {"plan": 2.0}, "rank": {"model": 5.5}}
