"""The training documents of a run as text, and its validation documents as items, read from their sources.

They are read again and not taken from the prepared tokens, which know neither a document's origin nor the text that was
cut off.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.config.schema import RunConfig
from tunebook.data.corpus import Corpus, CorpusKind
from tunebook.data.prepare import vocabulary
from tunebook.data.turns import texts_of_turn
from tunebook.errors import DataError
from tunebook.evaluate.contamination.items import Item, ItemGroup, document_item
from tunebook.evaluate.contamination.search import Texts
from tunebook.files import cache_root

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

MAX_VALIDATION_ITEMS = 10_000  # of a larger part, so many from all over it: the index keeps items in memory
VALIDATION = "validation part"  # with a blank, which no task has in its name
_BATCH = 500  # documents in memory ...
_BATCH_CHARACTERS = 4_000_000  # ... and their text that is searched at once


@dataclass(frozen=True, kw_only=True)
class Documents:
    """The documents of a run, while their files are open."""

    corpus: Corpus
    tokenizer: PreTrainedTokenizerBase | None  # only for documents that are tokens

    def batches(self) -> Iterator[list[Texts]]:
        """The training documents in their order, each as its turns or fields."""
        for batch in self.corpus.train.iter(batch_size=_BATCH):
            documents: list[Texts] = []
            size = 0
            for row in _rows(batch):
                documents.append(self._texts(row))
                size += sum(map(len, documents[-1]))
                if size > _BATCH_CHARACTERS:
                    yield documents
                    documents, size = [], 0
            if documents:
                yield documents

    def origin(self, number: int) -> str:
        """Where a training document is from, such as `train.jsonl:17`."""
        return str(self.corpus.train[number]["origin"])

    def validation_group(self) -> ItemGroup | None:
        """The validation documents as items; None without a validation part."""
        part = self.corpus.validation
        if part is None:
            return None
        step = max(1.0, len(part) / MAX_VALIDATION_ITEMS)
        numbers = [int(place * step) for place in range(min(len(part), MAX_VALIDATION_ITEMS))]
        items = [
            self._item(number, row)
            for start in range(0, len(numbers), _BATCH)
            for number, row in zip(numbers[start : start + _BATCH], self._chosen(part, numbers, start), strict=True)
        ]
        return ItemGroup(name=VALIDATION, items=items, num_all=len(part))

    def _chosen(self, part: datasets.Dataset, numbers: list[int], start: int) -> list[dict[str, Any]]:
        return _rows(part[numbers[start : start + _BATCH]])

    def _item(self, number: int, row: dict[str, Any]) -> Item:
        is_tokens = self.corpus.kind is CorpusKind.tokens
        return document_item(number, {"text": self._decode(row)} if is_tokens else row)

    def _texts(self, row: Mapping[str, Any]) -> Texts:
        kind = self.corpus.kind
        if kind is CorpusKind.conversation:
            return [text for turn in row["messages"] for text in texts_of_turn(turn)]
        if kind is CorpusKind.prompt_completion:
            return [row["prompt"], row["completion"]]
        return [self._decode(row) if kind is CorpusKind.tokens else row["text"]]

    def _decode(self, row: Mapping[str, Any]) -> str:
        assert self.tokenizer is not None
        return str(self.tokenizer.decode(row["input_ids"], skip_special_tokens=True))


def _rows(batch: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


@contextmanager
def open_documents(config: RunConfig, recorded: Sequence[Mapping[str, Any]] | None) -> Iterator[Documents]:
    """Read the documents of a run into temporary files. `recorded` are the sources in its manifest.

    Raises: RequestError or DataError if they cannot be read any more, or are not those that the run was trained on.
    """
    from tunebook.data.sources import load_corpus
    from tunebook.model.tokenizer import load_tokenizer

    folder = results_folder()
    vocab_size, eos_token_id = vocabulary(config)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        corpus = load_corpus(config.dataset, cache_dir=Path(name), vocab_size=vocab_size, eos_token_id=eos_token_id)
        _require_same(corpus, recorded)
        is_tokens = corpus.kind is CorpusKind.tokens
        tokenizer = load_tokenizer(config.model, is_padded=False) if is_tokens else None
        yield Documents(corpus=corpus, tokenizer=tokenizer)


def results_folder() -> Path:
    """The folder of kept results and temporary files, made if it is not there."""
    folder = cache_root() / "contamination"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def is_same_data(sources: Sequence[Mapping[str, Any]], recorded: Sequence[Mapping[str, Any]]) -> bool:
    """Whether two lists of source records are of the same contents."""
    one, other = ([(record.get("sha256"), record.get("revision")) for record in each] for each in (sources, recorded))
    return one == other


def _require_same(corpus: Corpus, recorded: Sequence[Mapping[str, Any]] | None) -> None:
    """Raises: DataError if a source is not as it was when the run was trained."""
    if recorded is not None and not is_same_data([asdict(record) for record in corpus.records], recorded):
        names = ", ".join(str(record["location"]) for record in recorded)
        raise DataError(
            f"{names}: not as it was when the run was trained; put that version back to have it compared",
            problem_id="training-data-changed",
        )
