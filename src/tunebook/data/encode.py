"""Turn documents into token ids and labels: what the model reads, and what the loss counts. Uses no files.

A label is the token's own id if it is trained on, or else -100 (the model shifts labels by one). The first label is
always -100: nothing predicts a document's first token, and in a packed row the end of another document would.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from tunebook.config.choices import Reasoning, SpecialText, TrainOn
from tunebook.data.conversation import Conversation
from tunebook.data.corpus import IGNORED_LABEL, CorpusKind, Row, num_shared
from tunebook.data.images import reference_to, write_images
from tunebook.data.prepared import PartCounts
from tunebook.data.special_tokens import Span, SpecialTokens
from tunebook.data.template import ConversationRenderer, Rendered
from tunebook.errors import DataError, RequestError
from tunebook.model.tokenizer import stop_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tunebook.model.processor import ImageProcessor

REWRITTEN = "earlier assistant turns not trained on, because the chat template changes them once more turns follow"
LEFT_OUT = "the chat template leaves out reasoning or other parts of earlier answers"
SPECIAL_AS_TEXT = "a special token's text in a turn, tokenized as text (dataset.special_tokens_in_content=as_text)"
SPECIAL_KEPT = "a special token's text, taken for the token (dataset.special_tokens_in_content=keep)"


class ImageTokens(NamedTuple):
    """An image of a document, `SHA256 PATH`, and the tokens that it takes: the first, and one after the last."""

    reference: str
    start: int
    end: int


@dataclass(frozen=True)
class Document:
    """One tokenized document, or a pair: the chosen side, then the rejected one, each with the prompt.

    Shapes: both (num_tokens,).
    """

    input_ids: list[int]
    labels: list[int]
    num_chosen: int = 0  # tokens of the chosen side; 0: no pair
    images: Sequence[ImageTokens] = ()

    @property
    def sides(self) -> list[Document]:
        """The sides of a pair; a document has one."""
        if not self.num_chosen:
            return [self]
        first, second = slice(self.num_chosen), slice(self.num_chosen, None)
        return [Document(self.input_ids[side], self.labels[side]) for side in (first, second)]

    @property
    def longest_side(self) -> int:
        """Tokens of the longest sequence that the model reads."""
        return max(self.num_chosen, len(self.input_ids) - self.num_chosen)

    @property
    def num_trained(self) -> int:
        """Tokens that the loss counts."""
        return len(self.labels) - self.labels.count(IGNORED_LABEL)


Encode = Callable[[Sequence[Row]], list[Document]]


def tokens_of_span(offsets: Sequence[Span], span: Span) -> Span:
    """The tokens that share at least one character with a span: the first, and one after the last.

    Shape: `offsets` (num_tokens,), the characters of each token, neither starts nor ends ever decreasing.
    """
    first = bisect_right(offsets, span[0], key=lambda token: token[1])
    return first, bisect_left(offsets, span[1], key=lambda token: token[0])


class Encoder:
    """Tokenizes and masks documents of one kind.

    `counts` has the remarks on documents, and counts those with tools, calls and reasoning, since it was last replaced.
    Raises: RequestError if `train_on` asks for turns that this kind of document does not have, or conversations have no
    chat template.
    """

    def __init__(
        self,
        kind: CorpusKind,
        train_on: TrainOn,
        tokenizer: PreTrainedTokenizerBase | None,
        special_text: SpecialText = SpecialText.auto,
        reasoning: Reasoning = Reasoning.keep,
        images: ImageProcessor | None = None,
    ) -> None:
        if train_on is TrainOn.assistant and kind is CorpusKind.text:
            raise RequestError(
                "dataset.train_on=assistant: these documents are plain text without an assistant; type "
                "dataset.train_on=everything",
                problem_id="train-on-without-roles",
            )
        self.counts = PartCounts()
        self._everything = train_on is TrainOn.everything
        self._reasoning = reasoning
        self._images = images
        methods: dict[CorpusKind, Encode] = {
            CorpusKind.conversation: self._conversations,
            CorpusKind.text: self._texts,
            CorpusKind.prompt_completion: self._completions,
            CorpusKind.tokens: self._tokens,
            CorpusKind.token_pair: self._token_pairs,
            CorpusKind.conversation_pair: self._conversation_pairs,
            CorpusKind.text_pair: self._text_pairs,
        }
        self._encode = methods[kind]
        if kind.has_tokens:
            return
        assert tokenizer is not None, "only documents of tokens need no tokenizer"
        self._backend: Any = tokenizer.backend_tokenizer
        self._eos_id: int = tokenizer.eos_token_id
        self._bos_id: int | None = tokenizer.bos_token_id
        self._stop_ids = stop_token_ids(tokenizer)
        is_conversation = kind.has_turns
        if special_text is SpecialText.auto:
            special_text = SpecialText.as_text if is_conversation else SpecialText.keep
        self._special_text = special_text
        if is_conversation:
            self._renderer = ConversationRenderer(tokenizer)
            self._special = self._renderer.special
            return
        self._special = SpecialTokens(tokenizer)
        is_added = self._backend.encode("a").special_tokens_mask[::-1]
        self._num_added_at_end = is_added.index(0) if 0 in is_added else 0
        if special_text is SpecialText.as_text:
            self._backend = self._special.plain_backend

    def encode(self, rows: Sequence[Row]) -> list[Document]:
        """The rows as documents, in order. Raises: DataError naming the row's `origin`."""
        return self._encode(rows)

    def _conversations(self, rows: Sequence[Row]) -> list[Document]:
        rendered = [self._render(row) for row in rows]
        texts = [conversation.text for conversation in rendered if conversation.special is None]
        # The template writes the special tokens; a tokenizer adding its own would double them.
        encodings = iter(self._backend.encode_batch(texts, add_special_tokens=False))
        documents = []
        for row, conversation in zip(rows, rendered, strict=True):
            if conversation.special is None:
                encoding, spans, images = next(encodings), conversation.spans, conversation.images
            else:
                num, both = len(conversation.spans), [*conversation.spans, *conversation.images]
                encoding, both = self._special.encode_apart(conversation.text, both)
                spans, images = both[:num], both[num:]
            ids, origin = encoding.ids, row["origin"]
            self._refuse_two_bos(ids, origin)
            if self._everything:
                self._require_stop(ids, origin)
                labels = all_labels(ids)
            else:
                labels = self._labels_of_spans(ids, encoding.offsets, spans, origin)
            self.counts.added.update(conversation.added)
            self.counts.note(REWRITTEN, origin, conversation.num_rewritten > 0)
            self.counts.note(LEFT_OUT, origin, conversation.leaves_out)
            placed = []
            for reference, span in zip(conversation.references, images, strict=True):
                start, end = tokens_of_span(encoding.offsets, span)
                labels[start:end] = [IGNORED_LABEL] * (end - start)
                placed.append(ImageTokens(reference, start, end))
            documents.append(Document(ids, labels, images=placed))
        return documents

    def _render(self, row: Row) -> Rendered:
        conversation, origin = Conversation.of(row).with_reasoning(self._reasoning), row["origin"]
        for number, turn in enumerate(conversation.messages, 1):
            if turn["role"] == "assistant" and not turn["content"] and "tool_calls" not in turn:
                raise DataError(
                    f"{origin}: turn {number} (assistant) is reasoning alone, of which dataset.reasoning="
                    f"{self._reasoning.name} leaves nothing; remove the document, or type dataset.reasoning=keep",
                    problem_id="data-bad-document",
                )
        self.counts.contents.update(conversation.contents())
        rendered = self._renderer.render(conversation, origin, has_spans=not self._everything)
        self._check_special(rendered.special, origin)
        if images := conversation.images():
            text, spans, placed = write_images(rendered.text, rendered.spans, images, self._images, origin)
            references = [*map(reference_to, images)]
            rendered = replace(rendered, text=text, spans=spans, images=placed, references=references)
        if rendered.special is not None and self._special_text is SpecialText.keep:
            num, both = len(rendered.spans), [*rendered.spans, *rendered.images]
            text, both = self._special.show(rendered.text, both)
            return replace(rendered, text=text, spans=both[:num], images=both[num:], special=None)
        return rendered

    def _check_special(self, token: str | None, origin: str) -> None:
        """Note a document that holds the text of a special token. Raises: DataError if these are refused."""
        if token is None:
            return
        if self._special_text is SpecialText.refuse:
            raise DataError(
                f"{origin}: it holds the text of the special token {token!r}, which dataset.special_tokens_in_content="
                "refuse forbids; take it out, or train on it as text (dataset.special_tokens_in_content=as_text) or as "
                "the token (dataset.special_tokens_in_content=keep)",
                problem_id="special-token-in-content",
            )
        note = SPECIAL_KEPT if self._special_text is SpecialText.keep else SPECIAL_AS_TEXT
        self.counts.note(note, f"{origin}, {token}")

    def _labels_of_spans(
        self, ids: list[int], offsets: Sequence[Span], spans: Sequence[Span], origin: str
    ) -> list[int]:
        labels = [IGNORED_LABEL] * len(ids)
        for span in spans:
            first, after_last = tokens_of_span(offsets, span)
            trained = ids[first:after_last]
            self._require_stop(trained, origin)
            labels[first:after_last] = trained
        if labels:
            labels[0] = IGNORED_LABEL
        return labels

    def _texts(self, rows: Sequence[Row]) -> list[Document]:
        documents = []
        for row, encoding in zip(rows, self._backend.encode_batch([row["text"] for row in rows]), strict=True):
            self._check_special(self._special.first_in(row["text"]), row["origin"])
            ids = self._ended(encoding.ids)
            self._refuse_two_bos(ids, row["origin"])
            documents.append(Document(ids, all_labels(ids)))
        return documents

    def _completions(self, rows: Sequence[Row]) -> list[Document]:
        """Prompt and completion tokenized as one text, as TRL does, so that the model reads usual text.

        The completion starts at the first token that differs from those of the prompt alone: everything before is
        exactly the model's input for generation.
        """
        prompts = self._backend.encode_batch([row["prompt"] for row in rows])
        wholes = self._backend.encode_batch([row["prompt"] + row["completion"] for row in rows])
        documents = []
        for row, prompt, whole in zip(rows, prompts, wholes, strict=True):
            self._check_special(self._special.first_in(row["prompt"] + row["completion"]), row["origin"])
            ids = self._ended(whole.ids)
            self._refuse_two_bos(ids, row["origin"])
            labels = all_labels(ids)
            if not self._everything:
                # Tokens that the tokenizer adds are not part of the prompt; an EOS at its own end is.
                num_same = num_shared(prompt.ids[: len(prompt.ids) - self._num_added_at_end], ids)
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

    def _conversation_pairs(self, rows: Sequence[Row]) -> list[Document]:
        """Each side as the conversation that it is."""
        return self._pairs(self._conversations, rows, [row | {"messages": row["rejected"]} for row in rows])

    def _text_pairs(self, rows: Sequence[Row]) -> list[Document]:
        """Each side as prompt and completion."""
        chosen, rejected = ([row | {"completion": row[side]} for row in rows] for side in ("chosen", "rejected"))
        return self._pairs(self._completions, chosen, rejected)

    def _token_pairs(self, rows: Sequence[Row]) -> list[Document]:
        rejected = [{"input_ids": row["rejected_ids"], "labels": row["rejected_labels"]} for row in rows]
        return self._pairs(self._tokens, rows, rejected)

    def _pairs(self, encode: Encode, chosen: Sequence[Row], rejected: Sequence[Row]) -> list[Document]:
        """Remarks are counted of the chosen sides: those of a prompt are of both."""
        first, counts = encode(chosen), self.counts
        self.counts = PartCounts()
        second = encode(rejected)
        self.counts = counts
        return list(map(pair_of, first, second))

    def _ended(self, ids: list[int]) -> list[int]:
        return ids if ids[-1:] == [self._eos_id] else [*ids, self._eos_id]

    def _refuse_two_bos(self, ids: list[int], origin: str) -> None:
        if self._bos_id is not None and ids[:2] == [self._bos_id, self._bos_id]:
            raise DataError(
                f"{origin}: the document begins with two BOS tokens, which no model was pretrained on; remove one from "
                "its text, or from a copy of the chat template that model.chat_template=FILE names",
                problem_id="bos-doubled",
            )

    def _require_stop(self, ids: list[int], origin: str) -> None:
        if self._stop_ids.isdisjoint(ids):
            raise DataError(
                f"{origin}: no token that ends generation is trained on: the chat template does not write one, or the "
                "tokenizer cuts it into several tokens. Name the special token that ends a turn in this template: "
                "model.eos_token=TOKEN, or another template: model.chat_template=chatml, or FILE",
                problem_id="eos-not-trained",
            )


def pair_of(chosen: Document, rejected: Document) -> Document:
    """Two sides as a pair."""
    ids, labels = chosen.input_ids + rejected.input_ids, chosen.labels + rejected.labels
    return Document(ids, labels, num_chosen=len(chosen.input_ids))


def all_labels(ids: list[int]) -> list[int]:
    """Labels that count every token but the first, which nothing predicts."""
    return [IGNORED_LABEL, *ids[1:]] if ids else []
