"""Keys of documents and turns that no format reads: refused if training would lose their meaning, left out on request
(`dataset.ignore_keys`), or counted in a note.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tunebook.data.problems import DocumentError

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


class KeyAccount:
    """The keys of the documents of one source, and what is done with each.

    `known`: keys that some format reads; `ignored`: `ignore_keys` of the source configured under `key`.
    """

    def __init__(self, known: Collection[str] = (), ignored: Sequence[str] = (), key: str = "dataset") -> None:
        self.known = frozenset(known)
        self._ignored = frozenset(ignored)
        self._key = key
        self._not_read: Counter[str] = Counter()  # documents or turns by key
        self._left_out: Counter[str] = Counter()

    def without_ignored(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """A document or turn without the ignored keys."""
        if self._ignored.isdisjoint(record):
            return record
        self._left_out.update(key for key in self._ignored & record.keys() if record[key] is not None)
        return {key: value for key, value in record.items() if key not in self._ignored}

    def check(self, record: Mapping[str, Any], read: Collection[str], place: str = "the document") -> None:
        """Account for the keys of a document or turn that are not `read`.

        Raises: DocumentError naming every key whose meaning would be left out.
        """
        not_read = [key for key, value in record.items() if key not in read and value is not None]
        refused = [key for key in not_read if key.lower() in _MEANINGFUL and not is_empty(record[key])]
        if refused:
            raise DocumentError(
                f"{' and '.join(map(repr, refused))} of {place} is not supported there, and training would leave it "
                f"out; correct the data, or type {self._key}.ignore_keys=[{','.join(refused)}] to train without",
                problem_id="data-key-not-supported",
            )
        self._not_read.update(not_read)

    def notes(self) -> list[str]:
        """Notes to display: keys that were not read, and those of `ignore_keys` with or without effect."""
        notes = []
        for counts, what in (
            (self._not_read, "keys not read"),
            (self._left_out, f"left out by {self._key}.ignore_keys"),
        ):
            if counts:
                notes.append(f"{what}: {', '.join(f'{key} ({count:,})' for key, count in counts.most_common())}")
        if absent := sorted(self._ignored - self._left_out.keys()):
            notes.append(f"{self._key}.ignore_keys: no document has {', '.join(absent)}")
        return notes


def is_empty(value: object) -> bool:
    """Whether a value is empty: data sets write null, a blank text, an empty list or an empty JSON text."""
    if value is None:
        return True
    if isinstance(value, str):
        return value.strip() in ("", "[]", "{}", "null")
    if isinstance(value, dict):  # Parquet writes every key of an object: an absent object has nulls only
        value = list(value.values())
    return isinstance(value, list | tuple) and all(map(is_empty, value))
