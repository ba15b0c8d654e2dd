"""Answers that show a damaged model, whatever they say: empty, looping, endless or cut off.

    empty    no text, besides thoughts in <think> or like tags
    looping  one run of words, repeated at least 4 times, makes up the last third, or the end compresses tenfold
    endless  the limit of new tokens ended it
    abrupt   the limit ended it within a sentence; or the model itself ended it within a code block or a thought that it
             had opened, or after a comma, a hyphen, an opening bracket or a word such as `the`

A stop sequence of the task cuts an answer on purpose, so such an answer is not abrupt. One answer may have several
faults. Compression is zlib's, of the last 4000 bytes. Measured: prose and code two- to threefold, a table of numbers
fivefold, a list whose lines differ only in their number ninefold.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from tunebook.data.conversation import REASONING_BEGINS, REASONING_ENDS
from tunebook.evaluate.finish import Finish
from tunebook.evaluate.results import Answer
from tunebook.record.answer_faults import FAULTS

_REPEATS = 4
_SHORTEST_LOOP = 16  # words that the repeats have together: `no no no no` may be an answer
_MAX_COMPRESSION = 10.0
_SHORTEST_COMPRESSED, _LONGEST_COMPRESSED = 1000, 4000  # bytes
_EXCERPT = 200  # last characters of an example
_THOUGHT = re.compile(f"(?:{REASONING_BEGINS.pattern}).*?(?:{REASONING_ENDS.pattern})", re.DOTALL)
_OPENED_AT_END = re.compile(rf"(?:{REASONING_BEGINS.pattern})\s*\Z")
_FENCE = re.compile(r"^[ \t]*(?:```|~~~)(?!.*(?:```|~~~))", re.MULTILINE)  # not a block within one line
_SENTENCE_END = re.compile(r"[.!?:;\u2026\u3002\uff01\uff1f\"'\u201d\u2019\u00bb`)\]}>|*$]\s*\Z")
_OPEN_END = re.compile(r"(?:[,(\[{\u201c\u00ab]|\w-|\w\s(?:the|an|and|or|of|with|because|than|whose))\s*\Z")


def find_faults(text: str, finish: str | None, prompt: str = "") -> set[str]:
    """Return the faults of one answer. `finish` is None if it is not known how the answer ended."""
    found = set()
    if not REASONING_ENDS.sub("", _THOUGHT.sub("", text)).strip():
        found.add("empty")
    if _is_looping(text, is_endless=finish == Finish.length):
        found.add("looping")
    if finish == Finish.length:
        found.add("endless")
    if text.strip() and _is_abrupt(text, finish, prompt):
        found.add("abrupt")
    return found


def _is_looping(text: str, *, is_endless: bool) -> bool:
    encoded = text.encode("utf-8", "replace")[-_LONGEST_COMPRESSED:]
    if len(encoded) >= _SHORTEST_COMPRESSED and len(encoded) > _MAX_COMPRESSION * len(zlib.compress(encoded)):
        return True
    words = text.split()[-_LONGEST_COMPRESSED:]
    # A text without blanks, as in Chinese or of one word, is compared by character.
    repeated = _repeated(words, _SHORTEST_LOOP) or _repeated("".join(words)[-_LONGEST_COMPRESSED:], 4 * _SHORTEST_LOOP)
    # Numbers alone may be a table or a list of zeros.
    return bool(repeated) and (is_endless or any(letter.isalpha() for part in repeated for letter in part))


def _repeated(parts: Sequence[str], least: int) -> Sequence[str]:
    """Return what repeats at least 4 times up to the end, over `least` parts and a third of the text; or nothing."""
    least = max(least, -(-len(parts) // 3))
    for period in range(1, len(parts) // _REPEATS + 1):
        length = period
        while length < len(parts) and parts[-1 - length] == parts[-1 - length + period]:
            length += 1
        if length >= max(_REPEATS * period, least):
            return parts[-period:]
    return ""


def _is_abrupt(text: str, finish: str | None, prompt: str) -> bool:
    if finish == Finish.stop:
        return False
    if _ends_within_block(text, prompt) or _ends_within_thought(text, prompt):
        return True
    if finish == Finish.length:
        return not _SENTENCE_END.search(text) and not text.endswith("\n")
    return len(text.split()) > 2 and _OPEN_END.search(text) is not None


def _ends_within_block(text: str, prompt: str) -> bool:
    """Whether the last code block was opened by the answer and not closed."""
    num_fences = len(_FENCE.findall(text))
    begins_inside = len(_FENCE.findall(prompt)) % 2 == 1
    return num_fences > 0 and (num_fences % 2 == 1) != begins_inside


def _ends_within_thought(text: str, prompt: str) -> bool:
    """Whether a thought was not closed, which the prompt may have opened."""
    num_opened = len(REASONING_BEGINS.findall(text)) + bool(_OPENED_AT_END.search(prompt))
    return num_opened > len(REASONING_ENDS.findall(text))


def count_faults(answers: Mapping[str, Sequence[Answer]]) -> dict[str, dict[str, Any]]:
    """Count the faults of each task that generates text: `{task: {num_answers, num_faulty, empty, ..., examples}}`."""
    return {
        name: _count(found)
        for name, found in answers.items()
        if any(isinstance(one, str) for answer in found for one in answer.responses)
    }


def _count(answers: Iterable[Answer]) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    examples: dict[str, dict[str, Any]] = {}
    num_answers = num_faulty = num_unknown = 0
    for answer in answers:
        texts = [one for one in answer.responses if isinstance(one, str)]
        for text, finish in zip_longest(texts, answer.finishes[: len(texts)]):
            faults = find_faults(text, finish, answer.prompt)
            num_answers += 1
            num_faulty += bool(faults)
            num_unknown += finish is None
            counts.update(faults)
            for fault in faults - examples.keys():
                examples[fault] = {"item": answer.item, "end": text[-_EXCERPT:]}
    return {
        "num_answers": num_answers,
        "num_faulty": num_faulty,
        "num_unknown_finish": num_unknown,
        **{fault: counts[fault] for fault in FAULTS},
        "examples": {fault: examples[fault] for fault in FAULTS if fault in examples},
    }
