from __future__ import annotations

import pytest

from tunebook.config.choices import Overlong
from tunebook.data.chunks import NEVER_TRAINED, NOTHING_TRAINED, PIECE_NOT_TRAINED, TOO_LONG, fit
from tunebook.data.encode import Document

LONG = Document([1, 2, 3, 4, 5, 6, 7], [-100, -100, 3, -100, -100, -100, 7])


@pytest.mark.parametrize("overlong", list(Overlong))
def test_a_document_that_fits_is_kept_as_it_is(overlong: Overlong) -> None:
    fitted = fit(LONG, 7, overlong)
    assert fitted.pieces == [LONG]
    assert not fitted.was_cut
    assert fitted.num_tokens_lost == 0


def test_cut_keeps_the_beginning() -> None:
    fitted = fit(LONG, 4, Overlong.cut)
    assert fitted.pieces == [Document([1, 2, 3, 4], [-100, -100, 3, -100])]
    assert (fitted.was_cut, fitted.num_tokens_lost, fitted.dropped) == (True, 3, [])


def test_a_cut_that_leaves_nothing_to_train_on_drops_the_document() -> None:
    fitted = fit(LONG, 2, Overlong.cut)
    assert (fitted.pieces, fitted.num_tokens_lost, fitted.dropped) == ([], 7, [NOTHING_TRAINED])


def test_drop_says_why() -> None:
    fitted = fit(LONG, 6, Overlong.drop)
    assert (fitted.pieces, fitted.was_cut, fitted.num_tokens_lost, fitted.dropped) == ([], False, 7, [TOO_LONG])


def test_split_pieces_begin_untrained_and_empty_ones_are_dropped() -> None:
    fitted = fit(LONG, 2, Overlong.split)
    # [1 2] trains nothing; [3 4] would train its first token, which nothing predicts any more; so does [7].
    assert (fitted.pieces, fitted.num_tokens_lost, fitted.dropped) == ([], 7, [PIECE_NOT_TRAINED] * 4)
    fitted = fit(LONG, 5, Overlong.split)
    assert fitted.pieces == [Document([1, 2, 3, 4, 5], [-100, -100, 3, -100, -100]), Document([6, 7], [-100, 7])]
    assert (fitted.was_cut, fitted.num_tokens_lost, fitted.dropped) == (True, 0, [])


def test_a_document_without_a_trained_token_is_dropped() -> None:
    assert fit(Document([1, 2], [-100, -100]), 8, Overlong.cut).dropped == [NEVER_TRAINED]
