"""Every key of a document is accounted for: read by its format, refused because training would leave out its meaning,
left out on request (`dataset.ignore_keys`), or counted in a note.

The names are those of the formats of OpenAI, TRL, axolotl, LLaMA-Factory and ms-swift.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tunebook.data.problems import DocumentError

# Flags of a turn: whether the loss counts it. All but the last mean yes by 1 or true.
LOSS_FLAGS = ("train", "trainable", "training", "loss", "loss_mask", "loss_weight", "loss_scale", "weight", "masked")
INVERSE_FLAG = "masked"
_WEIGHTS = (*LOSS_FLAGS, "sample_weight", "document_weight")  # of a document: those of 1 change nothing


def _by_name(meanings: Mapping[str, Collection[str]]) -> dict[str, str]:
    return {name: meaning for meaning, names in meanings.items() for name in names}


# Refused keys that no format reads, in small letters, by where their meaning belongs.
_ANYWHERE = _by_name({
    "tools belong under 'tools' of a conversation, calls under 'tool_calls' of an assistant's turn": (
        "tools", "functions", "tool_calls", "tool_call", "function_call", "function_calls",
    ),
    "reasoning belongs under 'reasoning_content' of an assistant's turn": (
        "reasoning_content", "reasoning", "reasoning_text", "reasoning_details", "reasoning_trace", "thinking",
        "thinking_content", "thinking_blocks", "thought", "thoughts", "chain_of_thought", "cot", "complex_cot",
    ),
    "images, audio and video cannot be trained on, and the answer does not follow without them": (
        "image", "images", "image_url", "image_urls", "image_path", "image_paths", "pixel_values", "audio", "audios",
        "audio_url", "audio_path", "audio_paths", "video", "videos", "video_url", "video_path", "video_paths",
    ),
    "settings of the chat template belong under 'chat_template_kwargs' of a conversation": (
        "chat_template_kwargs", "chat_template", "template_kwargs", "documents",
    ),
})  # fmt: skip
_OF_DOCUMENTS = _ANYWHERE | _by_name({
    "this training learns every answer, and prefers none: keep the good ones alone": (
        "label", "kto_tag", "chosen", "rejected", "rejected_response", "rejected_messages",
    ),
    "a system prompt belongs under 'system' of a conversation, and earlier turns into it": (
        "system", "system_prompt", "system_message", "history",
    ),
    "whole documents have no weight: put the flag on each turn, or leave documents out": _WEIGHTS,
    "tokens (input_ids) alone have a mask, and it is called 'loss_mask'": (
        "completion_mask", "assistant_masks", "assistant_mask", "attention_mask", "response_mask", "token_weights",
        "position_ids", "token_type_ids",
    ),
    "Tunebook packs documents itself (packing.mode): write each as a document of its own": (
        "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "segment_ids", "document_ids",
    ),
})  # fmt: skip
_OF_TURNS = _ANYWHERE | _by_name({
    "speakers and tools have a 'name', results a 'tool_call_id'": ("name", "tool_call_id", "recipient", "channel"),
    "the loss counts a turn whole or not at all: write train: true or train: false": (
        "mask", "train_detail", "training_detail", *LOSS_FLAGS,
    ),
})  # fmt: skip


class KeyAccount:
    """The keys of the documents of one source, and what is done with each.

    `known`: keys that some format reads; `ignored`: `ignore_keys` of the source configured under `key`.
    """

    def __init__(self, known: Collection[str] = (), ignored: Sequence[str] = (), key: str = "dataset") -> None:
        self.known = frozenset(known)
        self._ignored = frozenset(ignored)
        self._key = key
        self._not_read: Counter[str] = Counter()  # documents by key
        self._not_read_of_turns: Counter[str] = Counter()
        self._left_out: Counter[str] = Counter()

    def wanted_columns(self, names: Sequence[str]) -> list[str]:
        """The columns of a table that have to be read: all of them if no format knows any."""
        reads_all = self.known.isdisjoint(names)
        return [
            name
            for name in names
            if name not in self._ignored and (reads_all or name in self.known or name.lower() in _OF_DOCUMENTS)
        ]

    def count_column(self, name: str, num_documents: int) -> None:
        """Note a column that is not read, and the number of documents with a value in it."""
        (self._left_out if name in self._ignored else self._not_read)[name] += num_documents

    def without_ignored(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """A document or turn without the ignored keys."""
        if self._ignored.isdisjoint(record):
            return record
        self._left_out.update(key for key in self._ignored & record.keys() if record[key] is not None)
        return {key: value for key, value in record.items() if key not in self._ignored}

    def check(self, record: Mapping[str, Any], read: Collection[str], turn: str | None = None) -> None:
        """Account for the keys of a document, or of a turn called `turn`, that are not read.

        Raises: DocumentError naming every key whose meaning would be left out.
        """
        meanings, counts = (_OF_DOCUMENTS, self._not_read) if turn is None else (_OF_TURNS, self._not_read_of_turns)
        refused: dict[str, str] = {}
        for key, value in record.items():
            if key in read or value is None:
                continue
            meaning = meanings.get(key.lower())
            if meaning is None or is_empty(value) or _is_full_weight(key.lower(), value):
                counts[key] += 1
            else:
                refused[key] = meaning
        if refused:
            place = f" of {turn}" if turn is not None else ""
            reasons = "; ".join(f"'{key}'{place} is not supported: {meaning}" for key, meaning in refused.items())
            raise DocumentError(
                f"{reasons}. Correct the data, or type {self._key}.ignore_keys=[{','.join(refused)}] to train without",
                problem_id="data-key-not-supported",
            )

    def notes(self, num_documents: int) -> list[str]:
        """Notes to display: keys that were not read, and those of `ignore_keys` with or without effect."""
        notes = []
        for counts, what in (
            (self._not_read, "keys not read"),
            (self._not_read_of_turns, "keys of turns not read"),
            (self._left_out, f"left out by {self._key}.ignore_keys"),
        ):
            if counts:
                # A table counts whole batches, and a limit may have used a part of one.
                most = None if counts is self._not_read_of_turns else num_documents
                listed = (f"{key} ({min(count, most or count):,})" for key, count in counts.most_common())
                notes.append(f"{what}: {', '.join(listed)}")
        absent = sorted(self._ignored - self._left_out.keys())
        if absent:
            notes.append(f"{self._key}.ignore_keys: no document has {', '.join(absent)}")
        return notes


def is_empty(value: object) -> bool:
    """Whether a value is empty: data sets write null, a blank text, an empty list or an empty JSON text."""
    if isinstance(value, str):
        return value.strip() in ("", "[]", "{}", "null")
    if isinstance(value, dict):  # Parquet writes every key of an object: an absent object has nulls only
        value = list(value.values())
    return all(map(is_empty, value)) if isinstance(value, list | tuple) else value is None


def _is_full_weight(name: str, value: object) -> bool:
    """Whether a value is a flag or weight that changes nothing; CSV writes them as text."""
    nothing = ("0", "0.0", "false") if name == INVERSE_FLAG else ("1", "1.0", "true")
    return name in _WEIGHTS and str(value).lower() in nothing
