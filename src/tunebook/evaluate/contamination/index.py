"""The index of all items: hashes of their runs of words, to look up those of the training documents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tunebook.evaluate.contamination.items import Item, ItemGroup
from tunebook.evaluate.contamination.words import (
    ANCHOR,
    GRAM,
    hash_runs,
    join,
    random_numbers,
    starts_without_gap,
    words_of,
)

_SLOTS_PER_HASH = 16  # of the table that distinguishes most of the documents' runs without a search
MAX_WORDS = 2000  # of a text whose runs are looked for; the whole question is always compared
_FEWEST_BITS, _MOST_BITS = 16, 28


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Distinct runs of words, sorted by hash."""

    length: int
    hashes: npt.NDArray[np.uint64]
    ids: npt.NDArray[np.int32]  # (num_runs, length): the words themselves, since two runs may share a hash
    table: npt.NDArray[np.bool_]  # whether some hash begins with these bits

    def find(
        self, ids: npt.NDArray[np.int32], hashes: npt.NDArray[np.uint64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return positions in a text whose run of words is one of these, and which one it is. Shapes: (num_found,)."""
        bits = np.uint64(64 - (len(self.table).bit_length() - 1))
        near = np.flatnonzero(self.table[(hashes >> bits).astype(np.int64)] & starts_without_gap(ids, self.length))
        runs = np.searchsorted(self.hashes, hashes[near])
        runs[runs == len(self.hashes)] = 0
        is_hit = self.hashes[runs] == hashes[near] if len(self.hashes) else np.zeros(0, dtype=bool)
        positions, runs = near[is_hit], runs[is_hit]
        words = ids[positions[:, None] + np.arange(self.length)]
        is_same = (words == self.ids[runs]).all(axis=1)
        return positions[is_same], runs[is_same]


@dataclass(frozen=True, kw_only=True)
class Question:
    """How a whole question is recognized in a document."""

    texts: tuple[str, ...]  # normalized, see `words.join`; all must be there
    answers: tuple[str, ...]  # the same; only for a short question
    is_short: bool  # each text must be a whole turn or field


@dataclass(frozen=True, kw_only=True)
class ItemIndex:
    """All items of all groups, numbered from 0 in their order."""

    groups: Sequence[ItemGroup]
    vocabulary: dict[str, int]  # ids from 1
    numbers: npt.NDArray[np.uint64]
    grams: Runs
    pair_items: npt.NDArray[np.int64]  # which item ...
    pair_grams: npt.NDArray[np.int64]  # ... has which gram, without common ones
    is_in_passage: npt.NDArray[np.bool_]  # and whether that is in the longest of several fields
    anchors: Runs
    items_of_anchor: list[list[int]]
    items_of_short: dict[str, list[int]]  # by the longest text of a short question
    questions: list[Question]

    @property
    def num_items(self) -> int:
        """Number of items of all groups."""
        return len(self.questions)


def build_index(groups: Sequence[ItemGroup]) -> ItemIndex:
    """Index the items of all groups. Memory grows by about 100 bytes for each of a text's first 2000 words."""
    items = [item for group in groups for item in group.items]
    limits = np.array([group.max_items_with_run for group in groups for _ in group.items], dtype=np.int64)
    which = np.array([place for place, group in enumerate(groups) for _ in group.items], dtype=np.int64)
    vocabulary: dict[str, int] = {}
    ids, owners, is_asked, is_passage = _encode(items, vocabulary)
    numbers = random_numbers(len(vocabulary))
    eights, thirteens = hash_runs(ids, numbers)
    starts = np.flatnonzero(starts_without_gap(ids, GRAM))
    starts = starts[_is_rare(thirteens[starts], owners[starts], which, limits)]
    grams, runs = _runs(ids, thirteens, starts, GRAM)
    pairs, first = _distinct_pairs(owners[starts], runs)
    questions = [_question(item) for item in items]
    chosen = _choose_anchors(ids, owners, is_asked, eights)
    anchors, runs = _runs(ids, eights, chosen, ANCHOR)
    items_of_anchor: list[list[int]] = [[] for _ in range(len(anchors.hashes))]
    for run, owner in zip(runs.tolist(), owners[chosen].tolist(), strict=True):
        items_of_anchor[run].append(owner)
    return ItemIndex(
        groups=groups,
        vocabulary=vocabulary,
        numbers=numbers,
        grams=grams,
        pair_items=pairs[0],
        pair_grams=pairs[1],
        is_in_passage=is_passage[starts[first]],
        anchors=anchors,
        items_of_anchor=items_of_anchor,
        items_of_short=_short_items(questions),
        questions=questions,
    )


def _distinct_pairs(
    items: npt.NDArray[np.int64], runs: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return each pair of an item and a run once, and where it is first. Shapes: (2, num_pairs), (num_pairs,)."""
    order = np.lexsort((runs, items))
    pairs = np.stack([items[order], runs[order]])
    is_new = np.ones(len(order), dtype=bool)
    is_new[1:] = (pairs[:, 1:] != pairs[:, :-1]).any(axis=0)
    return pairs[:, is_new], order[is_new]


def _encode(
    items: Sequence[Item], vocabulary: dict[str, int]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return the word ids of all texts with a 0 after each, and of each word its item, whether it is asked, and whether
    it is in the passage that a question is about.
    """
    ids: list[int] = []
    owners, lengths, asked, passages = [], [], [], []
    for number, item in enumerate(items):
        passage = item.question.index(max(item.question, key=len)) if len(item.question) > 1 else -1
        for place, text in enumerate(item.texts):
            words = words_of(text)[:MAX_WORDS]
            ids += [vocabulary.setdefault(word, len(vocabulary) + 1) for word in words]
            ids.append(0)
            owners.append(number)
            lengths.append(len(words) + 1)
            asked.append(place < len(item.question))
            passages.append(place == passage)
    return (
        np.array(ids, dtype=np.int32),
        np.repeat(np.array(owners, dtype=np.int64), lengths),
        np.repeat(np.array(asked, dtype=bool), lengths),
        np.repeat(np.array(passages, dtype=bool), lengths),
    )


def _is_rare(
    hashes: npt.NDArray[np.uint64],
    owners: npt.NDArray[np.int64],
    which: npt.NDArray[np.int64],
    limits: npt.NDArray[np.int64],
) -> npt.NDArray[np.bool_]:
    """Whether each run is in few distinct items of its group; `which` group and which limit an item has."""
    order = np.lexsort((owners, hashes, which[owners]))
    group, sorted_hashes, item = which[owners][order], hashes[order], owners[order]
    is_new = np.ones(len(order), dtype=bool)  # the first of a run in a group
    is_new[1:] = (group[1:] != group[:-1]) | (sorted_hashes[1:] != sorted_hashes[:-1])
    is_other = is_new.copy()  # the first of a run in an item
    is_other[1:] |= item[1:] != item[:-1]
    run = np.cumsum(is_new) - 1
    counts = np.bincount(run, weights=is_other) if len(run) else np.zeros(0)
    rare = np.empty(len(order), dtype=bool)
    rare[order] = counts[run] <= limits[item]
    return rare


def _runs(
    ids: npt.NDArray[np.int32], hashes: npt.NDArray[np.uint64], starts: npt.NDArray[np.int64], length: int
) -> tuple[Runs, npt.NDArray[np.int64]]:
    """Return the distinct runs that begin at `starts`, and which one each of them is."""
    distinct, first, run = np.unique(hashes[starts], return_index=True, return_inverse=True)
    bits = min(_MOST_BITS, max(_FEWEST_BITS, (_SLOTS_PER_HASH * len(distinct)).bit_length()))
    table = np.zeros(1 << bits, dtype=bool)
    table[(distinct >> np.uint64(64 - bits)).astype(np.int64)] = True
    words = ids[starts[first][:, None] + np.arange(length)]
    return Runs(length=length, hashes=distinct, ids=words, table=table), run.reshape(-1)


def _choose_anchors(
    ids: npt.NDArray[np.int32],
    owners: npt.NDArray[np.int64],
    is_asked: npt.NDArray[np.bool_],
    hashes: npt.NDArray[np.uint64],
) -> npt.NDArray[np.int64]:
    """Return where each question's rarest run of 8 words begins: one in few items, and of rare words.

    A run that begins many questions would be in many documents, and each would have to be compared with each of them.
    """
    starts = np.flatnonzero(starts_without_gap(ids, ANCHOR) & is_asked[: max(0, len(ids) - ANCHOR + 1)])
    if not len(starts):
        return starts
    _, run, counts = np.unique(hashes[starts], return_inverse=True, return_counts=True)
    frequency = np.concatenate([[0.0], np.cumsum(np.log(np.bincount(ids)[ids]))])
    commonness = frequency[starts + ANCHOR] - frequency[starts]
    order = np.lexsort((commonness, counts[run.reshape(-1)], owners[starts]))
    _, first = np.unique(owners[starts][order], return_index=True)
    return np.asarray(starts[order[first]])


def _question(item: Item) -> Question:
    words = [found for text in item.question if (found := words_of(text))]
    is_short = max(map(len, words), default=0) < ANCHOR
    needs_answer = sum(map(len, words)) < ANCHOR
    answers = [found for text in item.answers if (found := words_of(text))] if needs_answer else []
    return Question(texts=tuple(map(join, words)), answers=tuple(map(join, answers)), is_short=is_short)


def _short_items(questions: Sequence[Question]) -> dict[str, list[int]]:
    found: defaultdict[str, list[int]] = defaultdict(list)
    for number, question in enumerate(questions):
        if question.is_short and question.texts:
            found[max(question.texts, key=len)].append(number)
    return dict(found)
