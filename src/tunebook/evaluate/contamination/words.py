"""The words of a text, without case, punctuation and white space, and hashes of runs of words."""

from __future__ import annotations

import re
import unicodedata

import numpy as np
import numpy.typing as npt

GRAM = 13  # words of a run that marks an item
ANCHOR = 8  # words of a run by which a whole question is found; shorter questions are compared as a whole
_SEED = 13

# Chinese and Japanese write no spaces: each of their characters is one word.
_ALONE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_ALONE}]|[^\W_{_ALONE}]+")
# One pass over ASCII text: lower case, and a blank for all that is no letter or digit. Ten times as fast as `_WORD`.
_ASCII = "".join(chr(code).lower() if chr(code).isalnum() else " " for code in range(128))


def words_of(text: str) -> list[str]:
    """The normalized words of a text."""
    if text.isascii():
        return text.translate(_ASCII).split()
    return _WORD.findall(unicodedata.normalize("NFKC", text).lower())


def join(words: list[str]) -> str:
    """Words as a text to search in, with a blank around each."""
    return f" {' '.join(words)} "


def random_numbers(num_words: int) -> npt.NDArray[np.uint64]:
    """A random number for each word id, always the same. Shape: (num_words + 1,), where id 0 is an unknown word."""
    return np.random.default_rng(_SEED).integers(0, 2**64, num_words + 1, dtype=np.uint64)


def hash_runs(
    ids: npt.NDArray[np.int32], numbers: npt.NDArray[np.uint64]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """64-bit hashes of every run of 8 and of 13 words: polynomials over the words' random numbers.

    Shapes: (num_words,) -> (num_words - 7,) and (num_words - 12,); both empty for a shorter text.
    """
    base = np.uint64(0x9E3779B97F4A7C15)
    powers = [np.uint64(1)]
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64
        for _ in range(4):
            powers.append(powers[-1] * base)
        one = numbers[ids]
        if len(ids) < GRAM:
            one = np.concatenate([one, np.zeros(GRAM, dtype=np.uint64)])
        two = one[:-1] * powers[1] + one[1:]
        four = two[:-2] * powers[2] + two[2:]
        eight = four[:-4] * powers[4] + four[4:]
        twelve = eight[:-4] * powers[4] + four[8:]
        thirteen = twelve[:-1] * powers[1] + one[12:]
    return eight[: max(0, len(ids) - ANCHOR + 1)], thirteen[: max(0, len(ids) - GRAM + 1)]


def starts_without_gap(ids: npt.NDArray[np.int32], length: int) -> npt.NDArray[np.bool_]:
    """Whether a run of `length` words from each position has no id 0: no unknown word, and no end of a text."""
    gaps = np.concatenate([[0], np.cumsum(ids == 0)])
    return np.asarray(gaps[length:] == gaps[:-length])
