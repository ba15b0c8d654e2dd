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

_TOOLS = (
    "tools belong under 'tools' of a conversation, calls under 'tool_calls' of an assistant's turn, and without them "
    "the model would learn other answers"
)
_REASONING = (
    "reasoning belongs under 'reasoning_content' of an assistant's turn, and without it the model would learn to "
    "answer without thinking"
)
_MEDIA = "images, audio and video cannot be trained on, and without them the answer does not follow from the question"
_TEMPLATE = (
    "the chat template is model.chat_template for every document, its settings belong under 'chat_template_kwargs' of "
    "a conversation, and without them it would write another text"
)
_NAME = "chat templates have no key of this meaning: speakers and tools have a 'name', results a 'tool_call_id'"
_PREFERENCE = (
    "a label says whether the answer is a good one, and this training would learn the bad ones too: keep the good ones"
)
_PAIR = (
    "it belongs to a pair of answers to prefer one of, which this training cannot: write the one to learn as last turn"
)
_OTHER_SYSTEM = "a system prompt belongs under the key 'system'"
_WHOLE_DOCUMENT = "whole documents have no weight of their own here: put the flag on each turn, or leave documents out"
_TOKEN_LEVEL = "only documents that are tokens already (input_ids) have one"
_PER_TOKEN = (
    "it has a number for each token, such as a mask, a weight or the document that it is of, and nothing says which: "
    "rename a mask that is 1 where the loss counts to 'loss_mask'"
)
_PACKED = (
    "it says that several documents are packed into one, and each would read the others: write each as a document of "
    "its own, Tunebook packs them (packing.mode)"
)
_PART_OF_A_TURN = "the loss counts a turn whole or not at all: write train: true or train: false"

_ANYWHERE = {
    **dict.fromkeys(
        ("tools", "functions", "tool_calls", "tool_call", "function_call", "function_calls"), _TOOLS
    ),
    **dict.fromkeys(
        ("reasoning_content", "reasoning", "reasoning_text", "reasoning_details", "reasoning_trace", "thinking",
         "thinking_content", "thinking_blocks", "thought", "thoughts", "chain_of_thought", "cot", "complex_cot"),
        _REASONING,
    ),
    **dict.fromkeys(
        ("image", "images", "image_url", "image_urls", "image_path", "image_paths", "pixel_values", "audio", "audios",
         "audio_url", "audio_path", "audio_paths", "video", "videos", "video_url", "video_path", "video_paths"), _MEDIA,
    ),
    **dict.fromkeys(("chat_template_kwargs", "chat_template", "template_kwargs"), _TEMPLATE),
}  # fmt: skip
_OF_DOCUMENTS = _ANYWHERE | {
    "documents": _TEMPLATE,
    **dict.fromkeys(("label", "kto_tag"), _PREFERENCE),
    **dict.fromkeys(("chosen", "rejected", "rejected_response", "rejected_messages"), _PAIR),
    "system": "conversations have one under the key 'system', in small letters; texts have none: put it into the text",
    **dict.fromkeys(("system_prompt", "system_message"), _OTHER_SYSTEM),
    "history": "only documents of instruction and output have one: put earlier turns into the conversation",
    **dict.fromkeys(_WEIGHTS, _WHOLE_DOCUMENT),
    **dict.fromkeys(
        ("completion_mask", "assistant_masks", "assistant_mask", "attention_mask", "position_ids", "token_type_ids"),
        _TOKEN_LEVEL,
    ),
    **dict.fromkeys(("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k"), _PACKED),
}
_OF_TURNS = _ANYWHERE | {
    **dict.fromkeys(("name", "tool_call_id", "recipient", "channel"), _NAME),
    "mask": "it is not known whether 1 trains on the turn or masks it: write train: true or train: false",
    **dict.fromkeys(("train_detail", "training_detail"), _PART_OF_A_TURN),
    **dict.fromkeys(LOSS_FLAGS, "a flag is read in small letters alone: write train: true or train: false"),
}
_OF_TEXTS = frozenset({"label"})  # the class of a text in classification data, which a language model may ignore
_UNRELATED_TO_THE_LOSS = frozenset({"special_tokens_mask", "offset_mapping"})  # additional output of tokenizers


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
        # Of the current document: counted keys of its turns, and refused keys: key -> (what, meaning)
        self._in_this_document: set[str] = set()
        self._refused: dict[str, tuple[str, str]] = {}

    def wanted_columns(self, names: Sequence[str]) -> list[str]:
        """The columns of a table that have to be read.

        All of them if no format knows any, and in addition to tokens, where any list may be a mask.
        """
        if self.known.isdisjoint(names) or "input_ids" in names:
            return [name for name in names if name not in self._ignored]
        return [
            name
            for name in names
            if name not in self._ignored and (name in self.known or name.lower() in _OF_DOCUMENTS)
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

    def begin_document(self) -> None:
        """Forget the previous document."""
        self._in_this_document.clear()
        self._refused.clear()

    def check_document(self, record: Mapping[str, Any], read: Collection[str], *, is_text: bool = False) -> None:
        """Account for the keys of a document that its format does not read."""
        token_ids = record.get("input_ids")  # of documents of tokens
        num_tokens = len(token_ids) if isinstance(token_ids, list) else 0
        for key, value in record.items():
            if key in read or value is None:
                continue
            name = key.lower()
            meaning = None if is_text and name in _OF_TEXTS else meaning_of(key, value)
            if _has_a_number_for_each(num_tokens, value) and name not in _UNRELATED_TO_THE_LOSS:
                meaning = meaning or _PER_TOKEN
            if meaning is None:
                self._not_read[key] += 1
            else:
                self._refused[key] = f"'{key}'", meaning

    def check_turn(self, turn: Mapping[str, Any], read: Collection[str], place: str) -> None:
        """Account for the keys of a turn that are not read; `place` says which turn."""
        for key, value in turn.items():
            if key in read or value is None:
                continue
            meaning = _OF_TURNS.get(key.lower())
            if meaning is not None and not is_empty(value):
                self._refused.setdefault(key, (f"'{key}' of {place}", meaning))
            elif key not in self._in_this_document:
                self._in_this_document.add(key)
                self._not_read_of_turns[key] += 1

    def raise_if_refused(self) -> None:
        """Raises: DocumentError naming every key of the document whose meaning would be left out."""
        if not self._refused:
            return
        by_meaning: dict[str, list[str]] = {}
        for what, meaning in self._refused.values():
            by_meaning.setdefault(meaning, []).append(what)
        reasons = [
            f"{' and '.join(whats)} {'is' if len(whats) == 1 else 'are'} not supported: {meaning}"
            for meaning, whats in by_meaning.items()
        ]
        raise DocumentError(
            f"{'; '.join(reasons)}. Take {'it' if len(self._refused) == 1 else 'them'} out of the data, or type "
            f"{self._key}.ignore_keys=[{','.join(self._refused)}] to train without",
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
                listed = (f"{key} ({_documents(min(count, num_documents))})" for key, count in counts.most_common())
                notes.append(f"{what}: {', '.join(listed)}")
        absent = sorted(self._ignored - self._left_out.keys())
        if absent:
            notes.append(f"{self._key}.ignore_keys: no document has {', '.join(absent)}")
        return notes


def meaning_of(key: str, value: object) -> str | None:
    """Why an unread key of a document must not be ignored; None if nothing is lost without it."""
    name = key.lower()
    says_nothing = is_empty(value) or (name in _WEIGHTS and _is_full_weight(name, value))
    return None if says_nothing else _OF_DOCUMENTS.get(name)


def is_empty(value: object) -> bool:
    """Whether a value is empty: data sets write null, a blank text, an empty list or an empty JSON text."""
    if isinstance(value, str):
        return value.strip() in ("", "[]", "{}", "null")
    if isinstance(value, dict):  # Parquet writes every key of an object: an absent object has nulls only
        value = list(value.values())
    return all(map(is_empty, value)) if isinstance(value, list | tuple) else value is None


def _is_full_weight(name: str, value: object) -> bool:
    """Whether a flag or weight changes nothing; CSV writes them as text."""
    return str(value).lower() in (("0", "0.0", "false") if name == INVERSE_FLAG else ("1", "1.0", "true"))


def _has_a_number_for_each(num_tokens: int, value: Any) -> bool:
    is_long_enough = isinstance(value, list) and 0 < len(value) == num_tokens
    return is_long_enough and all(isinstance(one, int | float) for one in value)


def _documents(count: int) -> str:
    return f"{count:,} document{'s' if count != 1 else ''}"
