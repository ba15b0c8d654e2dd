"""The look-up baseline: answer each held-out prompt with the answer of the most similar training prompt.

A model that only remembers its training data does about this well, so a score far above it is evidence of having learnt
the tasks. Run `python recipes/quickstart/baseline.py`; needs the standard library only.
"""

import argparse
import heapq
import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import chain
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent

# This many training prompts, those sharing the most words, are compared word by word in order.
NUM_CANDIDATES = 40

Conversation = dict[str, Any]
Words = tuple[str, ...]


def read_conversations(path: Path) -> list[Conversation]:
    """The lines of a ShareGPT JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def split_prompt(conversation: Conversation) -> tuple[Words, str]:
    """The words of everything before the last answer, system prompt and roles included, and that answer."""
    *prompt, answer = conversation["conversations"]
    words = [word for turn in prompt for word in (turn["from"] + ":", *re.findall(r"\w+|[^\w\s]", turn["value"]))]
    return tuple(words), answer["value"]


class NearestPrompt:
    """Finds the training prompt most similar to a given one, by shared words and by their order."""

    def __init__(self, train: Sequence[Conversation]) -> None:
        self.prompts: tuple[Words, ...]
        self.answers: tuple[str, ...]
        self.prompts, self.answers = zip(*map(split_prompt, train), strict=True)
        self.num_distinct = [len(set(prompt)) for prompt in self.prompts]
        self.prompts_with: dict[str, list[int]] = defaultdict(list)
        for index, prompt in enumerate(self.prompts):
            for word in set(prompt):
                self.prompts_with[word].append(index)

    def answer(self, prompt: Words) -> str:
        """The answer of the nearest training prompt; the earlier one where two are equally near."""
        words = set(prompt)
        overlap = Counter(chain.from_iterable(self.prompts_with[word] for word in words & self.prompts_with.keys()))
        similarity = {index: 2 * shared / (len(words) + self.num_distinct[index]) for index, shared in overlap.items()}
        candidates = heapq.nlargest(NUM_CANDIDATES, similarity, key=lambda index: (similarity[index], -index))
        matcher = SequenceMatcher(autojunk=False)
        matcher.set_seq2(prompt)

        def nearness(index: int) -> tuple[float, int]:
            matcher.set_seq1(self.prompts[index])
            return similarity[index] + matcher.ratio(), -index

        return self.answers[max(candidates, key=nearness)]


def score_lookup(train: Sequence[Conversation], heldout: Sequence[Conversation]) -> dict[str, float]:
    """Exact match of the look-up: the mean under `overall`, then one entry for each task."""
    lookup = NearestPrompt(train)
    hits: dict[str, list[bool]] = defaultdict(list)
    for conversation in heldout:
        prompt, answer = split_prompt(conversation)
        hits[conversation["task"]].append(lookup.answer(prompt) == answer)
    overall = sum(map(sum, hits.values())) / len(heldout)
    return {"overall": overall} | {task: sum(correct) / len(correct) for task, correct in hits.items()}


def main() -> None:
    """Score the look-up on the files beside this module."""
    argparse.ArgumentParser(description=main.__doc__).parse_args()
    data = FOLDER / "data"
    scores = score_lookup(read_conversations(data / "train.jsonl"), read_conversations(data / "heldout.jsonl"))
    for task, score in scores.items():
        print(f"{task:10} {score:6.1%}")


if __name__ == "__main__":
    main()
