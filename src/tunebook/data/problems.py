"""What makes a document unusable: its keys are checked, and problems are reported together or documents left out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tunebook.errors import DataError

MAX_REPORTED = 10  # documents shown of one file; the rest is counted
_LONGEST_REASON = 160  # characters
_VALUES = re.compile(r"(?<!\w)'[^']*'|\d+")  # of one document, in a message

# Flags of a turn, as OpenAI, axolotl, LLaMA-Factory and ms-swift name them: whether the loss counts it.
LOSS_FLAGS = ("train", "trainable", "training", "loss", "loss_mask", "loss_weight", "loss_scale", "weight")

# Keys that change what is learned, in small letters.
_MEANINGFUL = frozenset({
    "tools", "functions", "tool_calls", "tool_call", "function_call",
    "reasoning_content", "reasoning", "reasoning_details", "thinking", "thought", "chain_of_thought", "cot",
    "image", "images", "audio", "audios", "video", "videos", "pixel_values",
    "chat_template_kwargs", "chat_template", "documents",
    "system", "system_prompt", "history",
    "label", "kto_tag", "chosen", "rejected", "rejected_response",
    "completion_mask", "assistant_masks", "response_mask", "token_weights", "masked", "mask",
    "train_detail", "cu_seqlens", "segment_ids", "recipient",
})  # fmt: skip
_MEDIA = re.compile("image|audio|video")  # in a key


@dataclass(kw_only=True)
class Skipped:
    """Documents that were left out (dataset.bad_documents=skip), by reason."""

    reasons: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)  # of each reason: the first document, with its message

    def add(self, message: str, place: str) -> None:
        """Count one document. Messages that differ only in numbers and quoted values are one reason."""
        reason = _VALUES.sub("...", message.splitlines()[0])[:_LONGEST_REASON]
        self.reasons[reason] += 1
        self.first.setdefault(reason, f"{place}: {message}")

    def update(self, other: Skipped) -> None:
        """Add the documents of another count."""
        self.reasons.update(other.reasons)
        self.first = other.first | self.first

    def check_share(self, num_documents: int, max_share: float, what: str) -> None:
        """Raises: DataError if more than `max_share` of `num_documents` were left out."""
        if self.reasons.total() <= max_share * num_documents:
            return
        lines = [f"  {count:,}: {self.first[reason]}" for reason, count in self.reasons.most_common(MAX_REPORTED)]
        headline = (
            f"{what}: {self.reasons.total():,} of {num_documents:,} documents cannot be used, more than "
            f"dataset.max_bad_share={max_share:g} allows. The reasons, each with its first document:"
        )
        raise DataError("\n".join([headline, *lines]), problem_id="data-too-many-bad")


class DocumentError(Exception):
    """One document cannot be used; the reader adds its place. Never leaves `tunebook.data`."""

    def __init__(self, message: str, *, problem_id: str = "data-bad-document") -> None:
        super().__init__(message)
        self.message = message
        self.problem_id = problem_id


def type_name(value: object) -> str:
    """The JSON type of a value, in words; tables also have types that JSON has not."""
    if value is None:
        return "null"
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    name = names.get(type(value))
    return f"a JSON {name}" if name is not None else f"of type {type(value).__name__}"


def is_empty(value: object) -> bool:
    """Whether a value is empty: data sets write null, a blank text, an empty list or an empty JSON text."""
    if value is None:
        return True
    if isinstance(value, str):
        return value.strip() in ("", "[]", "{}", "null")
    if isinstance(value, dict):  # Parquet writes every key of an object: an absent object has nulls only
        value = list(value.values())
    return isinstance(value, list | tuple) and all(map(is_empty, value))


class KeyAccount:
    """Checks the keys of the documents of one source, and counts those that no format reads.

    `known`: keys that only documents have; `ignored`: `ignore_keys` of the source configured under `key`.
    """

    def __init__(self, known: Collection[str] = (), ignored: Sequence[str] = (), key: str = "dataset") -> None:
        self.known = frozenset(known)
        self._ignored = tuple(dict.fromkeys(ignored))
        self._key = key
        self._not_read: Counter[str] = Counter()  # documents or turns by key

    def without_ignored(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """A document or turn without the ignored keys."""
        _refuse_marks(record, [key for key in record if key in self._ignored])
        return {key: value for key, value in record.items() if key not in self._ignored}

    def check(self, record: Mapping[str, Any], read: Collection[str], place: str = "the document") -> None:
        """Count the keys of a document or turn that are not `read`.

        Raises: DocumentError naming every key whose meaning would be left out.
        """
        not_read = [key for key, value in record.items() if key not in read and value is not None]
        refused = [key for key in not_read if key.lower() in _MEANINGFUL and not is_empty(record[key])]
        if refused:
            are, them = ("is", "it") if len(refused) == 1 else ("are", "them")
            is_image = place != "the document" and any(key.lower() in ("image", "images") for key in refused)
            where = "images stand under 'images' of the document, or in parts of the content; " if is_image else ""
            ignored = ",".join([*self._ignored, *refused])
            raise DocumentError(
                f"{' and '.join(map(repr, refused))} of {place} {are} not supported there, and training would leave "
                f"{them} out; {where}correct the data, or type {self._key}.ignore_keys=[{ignored}] to train without",
                problem_id="data-key-not-supported",
            )
        _refuse_marks(record, not_read)
        self._not_read.update(not_read)

    def notes(self) -> list[str]:
        """The note about keys that were not read, if there are any."""
        counts = ", ".join(f"{key} ({count:,})" for key, count in self._not_read.most_common())
        return [f"keys not read: {counts}"] if counts else []


def _refuse_marks(record: Mapping[str, Any], left_out: Collection[str]) -> None:
    """Raises: DocumentError if a text marks the place of an image, a sound or a video that is left out."""
    for key in left_out:
        media = _MEDIA.search(key.lower())
        if media is None or is_empty(record[key]):
            continue
        if mark := re.search(rf"<\|?{media.group()}[\w|]*>", str(record), re.IGNORECASE):
            is_image = mark.group() == "<image>" and key not in ("image", "images")
            way = "name images under 'images'" if is_image else "remove such documents, or the mark from their texts"
            raise DocumentError(
                f"its text holds {mark.group()}, the place of what {key!r} names, which would not be trained on; {way}",
                problem_id="data-media",
            )


class DocumentProblems:
    """The unusable documents of one file or split: the first few in full, the others counted."""

    def __init__(self, location: str, unit: str = "line") -> None:
        self.location = location  # the file's absolute path, or the split
        self.unit = unit  # what documents are numbered by: line, row or item
        self.num_problems = 0
        self.num_documents = 0
        self.skipped: Skipped | None = None  # counts unusable documents, which then are no error
        self._shown: list[tuple[str, DocumentError]] = []

    def add(self, number: int, error: DocumentError) -> None:
        """Note that document `number` cannot be used."""
        self.num_problems += 1
        place = f"{self.unit} {number}"
        if self.skipped is not None:
            self.skipped.add(error.message, f"{self.location}, {place}")
        elif len(self._shown) < MAX_REPORTED:
            self._shown.append((place, error))

    @contextmanager
    def noted(self, number: int) -> Iterator[None]:
        """Note a DocumentError of document `number`. Raises: DataError for an unknown format, which all have."""
        try:
            yield
        except DocumentError as error:
            self.add(number, error)
            if error.problem_id == "data-unknown-format":
                self.raise_if_any()

    def raise_if_any(self) -> None:
        """Raises: DataError with every noted problem, if there are any."""
        if not self._shown:
            return
        problem_id = self._shown[0][1].problem_id
        if self.num_problems == 1:
            place, error = self._shown[0]
            raise DataError(f"{self.location}, {place}: {error.message}", problem_id=problem_id)
        total = self.num_documents + self.num_problems
        lines = [f"{self.location}: {self.num_problems:,} of {total:,} documents cannot be used"]
        lines += [f"  {place}: {error.message}" for place, error in self._shown]
        if self.num_problems > len(self._shown):
            lines.append(f"  and {self.num_problems - len(self._shown):,} more")
        if self.num_documents:
            lines.append("  To train on the others, type dataset.bad_documents=skip dataset.max_bad_share=1")
        raise DataError("\n".join(lines), problem_id=problem_id)
