"""What counts as exact, as overlapping, as a shared passage, and as nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tunebook.evaluate.contamination.index import Runs, build_index
from tunebook.evaluate.contamination.items import Item, ItemGroup
from tunebook.evaluate.contamination.search import NONE, Found, Search, Texts
from tunebook.evaluate.contamination.words import GRAM


def words(start: int, number: int) -> str:
    """Words that no other call has, unless it names the same numbers."""
    return " ".join(f"w{place}" for place in range(start, start + number))


def group_of(*items: Item, name: str = "task") -> ItemGroup:
    return ItemGroup(name=name, items=list(items), num_all=len(items))


def search(groups: Sequence[ItemGroup], documents: Sequence[Texts], batch: int = 2) -> Found:
    one = Search(build_index(groups))
    for start in range(0, len(documents), batch):
        one.add(documents[start : start + batch])
    return one.finish()


def test_a_whole_question_is_found_in_any_template_and_case() -> None:
    item = Item(number=0, question=(words(0, 30),))
    documents = [["nothing of it"], [f"Q) {words(0, 30).upper().replace(' ', ', ')}!? Say yes."]]
    found = search([group_of(item)], documents)
    assert found.exact_in.tolist() == [1]
    assert (found.num_found.tolist(), found.num_grams.tolist()) == ([18], [18])


def test_a_part_is_found_with_its_share_and_its_document() -> None:
    item = Item(number=0, question=(words(0, 30),))
    found = search([group_of(item)], [["x"], ["y"], ["z"], [words(5, 13) + " and other words"]])
    assert found.exact_in.tolist() == [NONE]
    assert (found.num_found.tolist(), found.num_grams.tolist(), found.part_in.tolist()) == ([1], [18], [3])
    assert search([group_of(item)], [[words(5, 12)]]).num_found.tolist() == [0]


def test_a_shared_passage_is_no_whole_question_but_passage_and_question_are() -> None:
    passage = words(0, 40)
    items = [Item(number=n, question=(passage, f"is it number {name}")) for n, name in enumerate(("one", "two"))]
    found = search([group_of(*items)], [[f"Is it number one?\n\n{passage}", "Yes"]])
    assert found.exact_in.tolist() == [0, NONE]
    assert (found.num_found - found.num_in_passage).tolist() == [0, 0]
    assert found.num_found.tolist() == [28, 28]
    apart = search([group_of(*items)], [[passage], ["is it number two"]])
    assert apart.exact_in.tolist() == [NONE, NONE], "both must be in one document"


def test_the_words_of_two_turns_or_two_documents_are_no_run() -> None:
    item = Item(number=0, question=(words(0, 20),))
    found = search([group_of(item)], [[words(0, 10), words(10, 10)], [words(0, 12)], [words(12, 8)]])
    assert (found.num_found.tolist(), found.exact_in.tolist()) == ([0], [NONE])


def test_an_answer_is_searched_but_does_not_make_an_item_exact() -> None:
    item = Item(number=0, question=(words(0, 20),), answers=(words(50, 20),), others=(words(80, 20),))
    found = search([group_of(item)], [[f"the text {words(50, 20)}"]])
    assert (found.exact_in.tolist(), found.num_found.tolist(), found.num_in_passage.tolist()) == ([NONE], [8], [0])
    assert search([group_of(item)], [[words(0, 20), "another answer"]]).exact_in.tolist() == [0]


def test_eight_to_twelve_words_are_found_within_a_text() -> None:
    item = Item(number=0, question=("Do Iran and Afghanistan speak the same language?",))
    document = ["Question: do iran and afghanistan speak the same language\nAnswer: no"]
    assert search([group_of(item)], [["x"], document]).exact_in.tolist() == [1]


@pytest.mark.parametrize(
    ("document", "is_found"),
    [
        (["What is the capital of France?", "It is Paris."], True),
        (["what is the capital of france", "Lyon"], False),
        (["Tell me: what is the capital of France? It is Paris."], False),
        (["What is the capital of France and why?", "Paris"], False),
    ],
)
def test_a_short_question_needs_a_turn_of_its_own_and_the_answer(document: list[str], is_found: bool) -> None:
    item = Item(number=0, question=("What is the capital of France?",), answers=("Paris",))
    assert search([group_of(item)], [document]).exact_in.tolist() == [0 if is_found else NONE]


def test_text_of_many_items_is_ignored_and_the_items_are_still_found() -> None:
    """An instruction of 20 words before every question, as a prompt template."""
    items = [Item(number=n, question=(f"{words(0, 20)} {words(100 * n + 100, 20)}",)) for n in range(30)]
    documents = [[words(0, 20)], [f"{words(0, 20)} {words(300, 20)}"]]
    found = search([group_of(*items)], documents)
    assert np.flatnonzero(found.num_found).tolist() == [2]
    assert np.flatnonzero(found.exact_in != NONE).tolist() == [2]
    few = search([group_of(*items[:3])], [[words(0, 20)]])
    assert few.num_found.tolist() == [0, 0, 0], "in a small task half of the items is many"


def test_items_of_one_task_do_not_make_those_of_another_common() -> None:
    many = group_of(*(Item(number=n, question=(words(0, 20),)) for n in range(30)), name="many")
    one = group_of(Item(number=0, question=(words(0, 20),)), name="one")
    assert search([many, one], [[words(0, 15)]]).num_found.tolist() == [0] * 30 + [3]


def test_text_of_many_documents_is_ignored_but_not_a_repeated_item() -> None:
    licence, question = words(0, 30), words(100, 30)
    items = [Item(number=0, question=(f"{licence} {words(50, 30)}",)), Item(number=1, question=(question,))]
    documents: list[Texts] = [[f"{licence} {words(1000 + 20 * n, 10)}"] for n in range(40)]
    documents += [[question] for _ in range(40)] + [["nothing"] for _ in range(100)]
    found = search([group_of(*items)], documents)
    assert found.num_found.tolist() == [0, 0]
    assert found.exact_in.tolist() == [NONE, 40]


def test_a_run_with_the_same_hash_and_other_words_is_not_found() -> None:
    table = np.ones(1 << 16, dtype=bool)
    ids = np.arange(1, GRAM + 1, dtype=np.int32)
    runs = Runs(length=GRAM, hashes=np.array([77], dtype=np.uint64), ids=ids[None, :], table=table)
    for text, expected in ((ids, [0]), (ids[::-1].copy(), [])):
        assert runs.find(text, np.array([77], dtype=np.uint64))[0].tolist() == expected


def test_nothing_to_look_for_and_nothing_to_look_in() -> None:
    assert search([], [["a text"]]).exact_in.tolist() == []
    empty = search([group_of(Item(number=0, question=("",)))], [["", "a text"], []])
    assert (empty.exact_in.tolist(), empty.num_grams.tolist()) == ([NONE], [0])
    assert search([group_of(Item(number=0, question=(words(0, 20),)))], []).num_found.tolist() == [0]
