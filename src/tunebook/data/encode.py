"""Turn documents into token ids and labels: what the model reads, and which of it the loss counts. Touches no files.

Labels are the token's own id where it is trained on and -100 elsewhere (the model shifts them by one). The first label
is always -100: nothing predicts a document's first token, and in a packed row it would be the end of another document.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunebook.config.choices import TrainOn
from tunebook.data.corpus import CorpusKind, Row
from tunebook.data.formats import IGNORED_LABEL
from tunebook.data.span_tokens import SpanTokenizer
from tunebook.data.template import ConversationRenderer, Rendered, Span
from tunebook.errors import DataError, RequestError
from tunebook.model.tokenizer import stop_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REWRITTEN = "earlier assistant turns not trained on, because the chat template changes them once more turns follow"
STRADDLING = "a token reaches over the boundary between prompt and answer, and counts as the answer's"


@dataclass(frozen=True)
class Document:
    """One tokenised document. Shapes: both (num_tokens,)."""

    input_ids: list[int]
    labels: list[int]

    @property
    def num_trained(self) -> int:
        """Tokens that the loss counts."""
        return len(self.labels) - self.labels.count(IGNORED_LABEL)


class Encoder:
    """Tokenises and masks documents of one kind; `notes` counts what a person should be told.

    Raises: RequestError when `train_on` asks for turns that this kind of document does not have, or conversations are
    to be rendered without a chat template.
    """

    def __init__(self, kind: CorpusKind, train_on: TrainOn, tokenizer: PreTrainedTokenizerBase | None) -> None:
        if train_on is TrainOn.assistant and kind is CorpusKind.text:
            raise RequestError(
                "dataset.train_on=assistant: these documents are plain text, in which nobody is the assistant; type "
                "dataset.train_on=everything",
                problem_id="train-on-without-roles",
            )
        self.notes: Counter[str] = Counter()
        self._everything = train_on is TrainOn.everything
        methods: dict[CorpusKind, Callable[[Sequence[Row]], list[Document]]] = {
            CorpusKind.conversation: self._conversations,
            CorpusKind.text: self._texts,
            CorpusKind.prompt_completion: self._completions,
            CorpusKind.tokens: self._tokens,
        }
        self._encode = methods[kind]
        if kind is CorpusKind.tokens:
            return
        assert tokenizer is not None, "only documents of tokens need no tokenizer"
        self._backend: Any = tokenizer.backend_tokenizer
        self._eos_id: int = tokenizer.eos_token_id
        self._bos_id: int | None = tokenizer.bos_token_id
        self._bos_token = tokenizer.bos_token
        self._stop_ids = stop_token_ids(tokenizer)
        if kind is CorpusKind.conversation:
            # The template writes the special tokens; a tokenizer adding its own would double them.
            self._tokenizer = SpanTokenizer(self._backend)
            self._renderer = ConversationRenderer(tokenizer)

    def encode(self, rows: Sequence[Row]) -> list[Document]:
        """The rows as documents, in order. Raises: DataError naming the row's `origin`."""
        return self._encode(rows)

    def _conversations(self, rows: Sequence[Row]) -> list[Document]:
        rendered = [self._render(row) for row in rows]
        tokenised = self._tokenizer.tokenise([one.text for one in rendered], [one.spans for one in rendered])
        documents = []
        for row, one, tokens in zip(rows, rendered, tokenised, strict=True):
            ids = tokens.ids
            self._refuse_two_bos(ids, row["origin"], "the chat template writes it twice; correct the template")
            if self._everything:
                self._require_stop(ids, row["origin"])
                labels = all_labels(ids)
            else:
                labels = self._labels_of_ranges(ids, tokens.ranges, row["origin"])
            self.notes[REWRITTEN] += one.num_rewritten > 0
            self.notes[STRADDLING] += tokens.num_straddling
            documents.append(Document(ids, labels))
        return documents

    def _render(self, row: Row) -> Rendered:
        if self._everything:  # then it does not matter where the assistant's turns are
            return Rendered(text=self._renderer.text(row["messages"], row["origin"]), spans=[])
        return self._renderer.render(row["messages"], row["origin"])

    def _labels_of_ranges(self, ids: list[int], ranges: list[Span], origin: str) -> list[int]:
        labels = [IGNORED_LABEL] * len(ids)
        for first, after_last in ranges:
            trained = ids[first:after_last]
            self._require_stop(trained, origin)
            labels[first:after_last] = trained
        if labels:
            labels[0] = IGNORED_LABEL
        return labels

    def _texts(self, rows: Sequence[Row]) -> list[Document]:
        documents = []
        for row, encoding in zip(rows, self._backend.encode_batch([row["text"] for row in rows]), strict=True):
            ids = self._ended(encoding.ids)
            self._refuse_two_bos(ids, row["origin"], "the text begins with it and the tokenizer adds one; remove it")
            documents.append(Document(ids, all_labels(ids)))
        return documents

    def _completions(self, rows: Sequence[Row]) -> list[Document]:
        """Prompt and completion tokenised as one text, as TRL does, so that the model reads text as it usually is.

        The completion starts where these tokens and those of the prompt alone part: everything before is exactly what
        the model is given when it generates.
        """
        prompts = self._backend.encode_batch([row["prompt"] for row in rows])
        wholes = self._backend.encode_batch([row["prompt"] + row["completion"] for row in rows])
        documents = []
        for row, prompt, whole in zip(rows, prompts, wholes, strict=True):
            ids = self._ended(whole.ids)
            self._refuse_two_bos(ids, row["origin"], "the prompt begins with it and the tokenizer adds one; remove it")
            prompt_ids = prompt.ids[:-1] if prompt.ids[-1:] == [self._eos_id] else prompt.ids
            num_same = num_shared(prompt_ids, ids)
            self.notes[STRADDLING] += num_same < len(prompt_ids)
            labels = all_labels(ids)
            if not self._everything:
                labels[:num_same] = [IGNORED_LABEL] * num_same
            documents.append(Document(ids, labels))
        return documents

    def _tokens(self, rows: Sequence[Row]) -> list[Document]:
        """Tokens as they are; labels too, unless every token was asked for."""
        documents = []
        for row in rows:
            labels = row["labels"] if row["labels"] is not None and not self._everything else row["input_ids"]
            documents.append(Document(row["input_ids"], [IGNORED_LABEL, *labels[1:]]))
        return documents

    def _ended(self, ids: list[int]) -> list[int]:
        return ids if ids[-1:] == [self._eos_id] else [*ids, self._eos_id]

    def _refuse_two_bos(self, ids: list[int], origin: str, reason: str) -> None:
        if self._bos_id is not None and ids[:2] == [self._bos_id, self._bos_id]:
            raise DataError(
                f"{origin}: the document begins with two BOS tokens ({self._bos_token}), which no model was pretrained "
                f"on: {reason}",
                problem_id="bos-doubled",
            )

    def _require_stop(self, ids: list[int], origin: str) -> None:
        if self._stop_ids.isdisjoint(ids):
            raise DataError(
                f"{origin}: no token that generation stops at is trained on: the chat template does not write one, or "
                "the tokenizer cuts it into several tokens. Name the special token that ends a turn in this template: "
                "model.eos_token=TOKEN, or another template: model.chat_template=FILE",
                problem_id="eos-not-trained",
            )


def all_labels(ids: list[int]) -> list[int]:
    """Labels that count every token but the first, which nothing predicts."""
    return [IGNORED_LABEL, *ids[1:]] if ids else []


def num_shared(first: Sequence[object], second: Sequence[object]) -> int:
    """How many items two sequences begin with in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((position for position, (one, other) in pairs if one != other), min(len(first), len(second)))
