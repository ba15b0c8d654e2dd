from __future__ import annotations

import numpy as np
import pytest

from tunebook.evaluate.contamination.words import (
    ANCHOR,
    GRAM,
    hash_runs,
    join,
    random_numbers,
    starts_without_gap,
    words_of,
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The CAT's  state-of-the-art,\n\thas_close()!", "the cat s state of the art has close"),
        ("\ufb01ne \uff21\uff22\uff23 \u2460 Stra\u00dfe", "fine abc 1 stra\u00dfe"),
        ("\u5317\u4eac\u662f 3.5 ok", "\u5317 \u4eac \u662f 3 5 ok"),
        ("\u2026 -- !", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_words_are_without_case_punctuation_and_white_space(text: str, words: str) -> None:
    assert " ".join(words_of(text)) == words


def test_ascii_text_has_the_words_that_it_has_next_to_other_text() -> None:
    text = "".join(map(chr, range(128))) + " It's 10_000 x-rays; (ok) "
    assert words_of(f"{text}\u00e9") == [*words_of(text), "\u00e9"]


def test_a_joined_word_is_found_as_a_whole_word_only() -> None:
    assert join(["art"]) in join(["the", "art"])
    assert join(["art"]) not in join(["part"])


def test_equal_runs_have_equal_hashes_wherever_they_are() -> None:
    numbers = random_numbers(100)
    run = np.arange(1, GRAM + 1, dtype=np.int32)
    text = np.concatenate([[7, 0, 9], run, [0, 3]]).astype(np.int32)
    eights, thirteens = hash_runs(text, numbers)
    assert (len(eights), len(thirteens)) == (len(text) - ANCHOR + 1, len(text) - GRAM + 1)
    assert thirteens[3] == hash_runs(run, numbers)[1][0]
    assert eights[3] == hash_runs(run[:ANCHOR], numbers)[0][0]
    assert len(np.unique(thirteens)) == len(thirteens)
    assert hash_runs(run[::-1], numbers)[1][0] != thirteens[3], "the order of the words counts"


@pytest.mark.parametrize(("length", "num_eights", "num_thirteens"), [(0, 0, 0), (7, 0, 0), (8, 1, 0), (12, 5, 0)])
def test_a_short_text_has_no_long_runs(length: int, num_eights: int, num_thirteens: int) -> None:
    ids = np.ones(length, dtype=np.int32)
    eights, thirteens = hash_runs(ids, random_numbers(1))
    assert (len(eights), len(thirteens)) == (num_eights, num_thirteens)
    assert len(starts_without_gap(ids, GRAM)) == num_thirteens


def test_no_run_goes_over_an_unknown_word() -> None:
    assert starts_without_gap(np.array([1, 2, 0, 3, 4, 5]), 2).tolist() == [True, False, False, True, True]
