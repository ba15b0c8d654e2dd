from __future__ import annotations

import json
import pickle

import pytest

from tunebook.evaluate.finish import Finish, FinishLog, GeneratedText, finish_of

EOS = {1, 2}


@pytest.mark.parametrize(
    ("tokens", "text", "finish"),
    [
        ([5, 6, 1, 0, 0], "five six", Finish.eos),
        ([5, 2], "five", Finish.eos),
        ([5, 6, 7], "five six seven", Finish.length),
        ([5, 6, 7], "five\n\nQ: six", Finish.stop),  # the rest of its batch went on
        ([5, 6, 1], "five\n\nQ: six", Finish.stop),  # cut there before its end token
        ([], "", Finish.length),
    ],
)
def test_an_answer_ends_at_whatever_comes_first(tokens: list[int], text: str, finish: Finish) -> None:
    assert finish_of(tokens, text, EOS, ["\n\nQ:", ""]) is finish


def test_a_generated_text_is_a_text_that_keeps_its_end() -> None:
    """A helper process sends it pickled; the harness puts it through filters and JSON."""
    text = GeneratedText.of("yes", Finish.eos)
    again = pickle.loads(pickle.dumps([text]))[0]
    assert (again, again.finish, json.dumps(again)) == ("yes", "eos", '"yes"')


def test_equal_requests_get_their_ends_in_order_and_a_repeated_attempt_begins_anew() -> None:
    log = FinishLog()
    first, second = ("a", {"max_gen_toks": 4, "until": []}), ("b", {"until": [], "max_gen_toks": 4})
    log.note_batch([Finish.length])
    log.note_answer(first)
    log.begin()  # memory ran out
    log.note_batch([Finish.eos, Finish.stop])
    log.note_answer(second)
    log.note_answer(("a", {"until": [], "max_gen_toks": 4}))
    log.note_batch([Finish.length])
    log.note_answer(first)
    found = log.with_finish([first, second, first, ("c", {})], ["1", "2", "3", "4"])
    assert [(text, text.finish) for text in found] == [("1", "stop"), ("2", "eos"), ("3", "length"), ("4", None)]
