"""Documents that are tokens already: labels, masks, padding and rows that were packed before."""

from __future__ import annotations

from typing import Any

import pytest

from tunebook.config.choices import Format
from tunebook.data.formats import FormatSettings, Normalizer
from tunebook.data.problems import DocumentError

IDS = [1, 10, 11, 2, 20, 21, 2]


def token_row(record: dict[str, Any]) -> dict[str, Any]:
    return Normalizer(Format.auto, FormatSettings()).row(record)


def labels(**keys: Any) -> list[int]:
    return list(token_row({"input_ids": IDS, **keys})["labels"])


@pytest.mark.parametrize("name", ["completion_mask", "assistant_masks", "loss_mask"])
def test_a_mask_decides_what_is_trained_on(name: str) -> None:
    assert labels(**{name: [0, 0, 0, 0, 1, 1, 1]}) == [-100, -100, -100, -100, 20, 21, 2]
    assert labels(**{name: [False, False, True, True, False, False, False]}) == [-100, -100, 11, 2, -100, -100, -100]


def test_two_masks_count_where_both_do() -> None:
    found = labels(completion_mask=[0, 0, 0, 1, 1, 1, 1], assistant_masks=[0, 0, 1, 1, 1, 0, 0])
    assert found == [-100, -100, -100, 2, 20, -100, -100]


def test_padding_is_left_out() -> None:
    row = token_row({"input_ids": [0, 0, *IDS, 0], "attention_mask": [0, 0, *[1] * 7, 0]})
    assert row == {"input_ids": IDS, "labels": IDS}
    row = token_row({"input_ids": [*IDS, 0], "attention_mask": [*[1] * 7, 0], "labels": [*[-100] * 6, 2, -100]})
    assert row == {"input_ids": IDS, "labels": [*[-100] * 6, 2]}


def test_what_says_nothing_more_is_no_problem() -> None:
    assert labels(position_ids=list(range(7)), token_type_ids=[0] * 7, seq_lengths=[7], attention_mask=[1] * 7) == IDS
    padded = {"input_ids": [0, 0, *IDS, 0], "attention_mask": [0, 0, *[1] * 7, 0]}
    positions = [0, 0, *range(7), 0]  # as some collators number padding
    assert token_row({**padded, "position_ids": positions})["labels"] == IDS


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"completion_mask": [0, 1]}, "'completion_mask' has 2 entries and 'input_ids' 7"),
        ({"completion_mask": [0, 0, 0, 0, 0, 0, 0.5]}, "'completion_mask' must be a list of 0 and 1"),
        ({"assistant_masks": [1, 0, 0, 0, 0, 0, 0]}, "leave no token after the first to train on"),
        ({"attention_mask": [0] * 7}, "leave no token after the first to train on"),
        ({"position_ids": [0, 1, 2, 3, 0, 1, 2]}, "several documents are packed into this row"),
        ({"seq_lengths": [4, 3]}, "several documents are packed into this row"),
    ],
)
def test_what_cannot_be_honoured_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        labels(**keys)
