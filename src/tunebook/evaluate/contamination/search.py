"""Look for the items in the training documents: each document is read once, a batch of them at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tunebook.evaluate.contamination.index import ItemIndex, Question
from tunebook.evaluate.contamination.words import ANCHOR, hash_runs, join, words_of

MAX_DOCUMENTS_WITH_RUN = 10  # a run of words in more documents is common text ...
MAX_SHARE_WITH_RUN = 0.01  # ... if it is also in more than this share of them: upsampled items are still found
NONE = -1  # in place of a document's number

Texts = Sequence[str]  # the turns or fields of one document


@dataclass(frozen=True, kw_only=True)
class Found:
    """What was found of each item. Shapes: (num_items,)."""

    exact_in: npt.NDArray[np.int64]  # the first document with the whole question; NONE without one
    num_grams: npt.NDArray[np.int64]  # distinct runs of 13 words that are not common text
    num_found: npt.NDArray[np.int64]  # those of them that are in a document
    num_in_passage: npt.NDArray[np.int64]  # those found ones that are in the longest field of several
    part_in: npt.NDArray[np.int64]  # the document in which most of them were found first; NONE without one


class Search:
    """Collects what documents share with the items."""

    def __init__(self, index: ItemIndex) -> None:

        self.index = index
        self.num_documents = 0
        self._num_with = np.zeros(len(index.grams.hashes), dtype=np.int64)  # documents
        self._first_with = np.full(len(index.grams.hashes), NONE, dtype=np.int64)
        self._exact_in = np.full(index.num_items, NONE, dtype=np.int64)

    def add(self, documents: Sequence[Texts]) -> None:
        """Look for the items in a batch of documents, which are numbered in the order in which they are added."""
        words = [[words_of(text) for text in document] for document in documents]
        get = self.index.vocabulary.get
        ids: list[int] = []
        lengths = []
        for texts in words:
            before = len(ids)
            for text in texts:
                ids += [get(word, 0) for word in text]
                ids.append(0)  # no run continues in the next text
            lengths.append(len(ids) - before)
        owners = np.repeat(np.arange(len(documents)), lengths)
        self._add_runs(np.array(ids, dtype=np.int32), owners, words)
        self._add_short(words)
        self.num_documents += len(documents)

    def _add_runs(
        self, ids: npt.NDArray[np.int32], owners: npt.NDArray[np.int64], words: Sequence[Sequence[list[str]]]
    ) -> None:

        eights, thirteens = hash_runs(ids, self.index.numbers)
        positions, grams = self.index.grams.find(ids, thirteens)
        if len(positions):
            pairs = np.unique(np.stack([grams, owners[positions]]), axis=1)  # sorted by gram, then by document
            distinct, first, counts = np.unique(pairs[0], return_index=True, return_counts=True)
            self._num_with[distinct] += counts
            is_new = self._first_with[distinct] == NONE
            self._first_with[distinct[is_new]] = pairs[1][first[is_new]] + self.num_documents
        positions, anchors = self.index.anchors.find(ids, eights)
        if len(positions):
            pairs = np.unique(np.stack([owners[positions], anchors]), axis=1)
            for document, anchor in zip(*pairs.tolist(), strict=True):
                self._compare(document, self.index.items_of_anchor[anchor], words[document])

    def _add_short(self, words: Sequence[Sequence[list[str]]]) -> None:
        for document, texts in enumerate(words):
            for text in texts:
                if len(text) < ANCHOR and (items := self.index.items_of_short.get(join(text))):
                    self._compare(document, items, texts)

    def _compare(self, document: int, items: Sequence[int], texts: Sequence[list[str]]) -> None:
        """Compare a document with the questions that it may hold."""
        left = [item for item in items if self._exact_in[item] == NONE]
        joined = [join(text) for text in texts] if left else []
        for item in left:
            if _holds(joined, self.index.questions[item]):
                self._exact_in[item] = self.num_documents + document

    def finish(self) -> Found:
        """Return what was found."""
        index = self.index
        most = max(MAX_DOCUMENTS_WITH_RUN, int(MAX_SHARE_WITH_RUN * self.num_documents))
        kept = self._num_with[index.pair_grams] <= most
        items, grams = index.pair_items[kept], index.pair_grams[kept]
        is_found = self._num_with[grams] > 0
        part_in = np.full(index.num_items, NONE, dtype=np.int64)
        if is_found.any():
            pairs = np.stack([items[is_found], self._first_with[grams[is_found]]])
            (owners, documents), counts = np.unique(pairs, axis=1, return_counts=True)
            order = np.argsort(counts, kind="stable")  # the last one assigned is the one with the most
            part_in[owners[order]] = documents[order]
        return Found(
            exact_in=self._exact_in,
            num_grams=np.bincount(items, minlength=index.num_items),
            num_found=np.bincount(items[is_found], minlength=index.num_items),
            num_in_passage=np.bincount(items[is_found & index.is_in_passage[kept]], minlength=index.num_items),
            part_in=part_in,
        )


def _holds(texts: Sequence[str], question: Question) -> bool:
    """Whether a document has a whole question, and the answer to a short one."""

    def has(part: str) -> bool:
        return part in texts if question.is_short else any(part in text for text in texts)

    return all(map(has, question.texts)) and all(any(part in text for text in texts) for part in question.answers)
