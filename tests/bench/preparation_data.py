"""Conversations and a tokenizer for measuring preparation: made on the spot, always the same, nothing fetched.

Words are made of syllables and drawn with Zipf's frequencies, with capitals, commas, full stops, numbers and accents,
so that a byte-level BPE works on them as on text: common words are one token, rare ones several. Lengths in tokens
follow lognormal(5.8, 0.9) clipped to 16..4096, once `tokens_per_word` of the trained tokenizer is known.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes" / "quickstart"))

from model_files import CHAT_TEMPLATE, EOS_TOKEN, PAD_TOKEN, build_tokenizer

SEED = 9
NUM_WORDS = 120_000
VOCABULARY = 40_960  # entries, special tokens included
LOG_MEAN, LOG_SIGMA, SHORTEST, LONGEST = 5.8, 0.9, 16, 4096
TOKENS_PER_TURN = 5  # <|im_start|>, the role, a line break, <|im_end|>, a line break
_WORDS_PER_TURN = 160  # of user and assistant together: longer conversations have more turns
_CHUNK = 5_000  # conversations drawn at once; a conversation depends on the seed and its number only

_ONSETS = ["st", "th", "ch", "pr", *"bcdfghjklmnprstvw", *"bdlmnrstw"]  # some twice: they come up twice as often
_VOWELS = [*"aeiouaeiouaeiouyéö", "ea", "ou"]
_CODAS = ["", "", "", "", "n", "r", "s", "t", "l", "nd"]


def make_words(number: int = NUM_WORDS) -> list[str]:
    """Distinct words of one to four syllables, shorter ones first, every fortieth a number."""
    random = np.random.default_rng(SEED)
    found: dict[str, None] = {}
    while len(found) < number:
        share = len(found) / number
        syllables = 1 + int(random.binomial(3, 0.05 + 0.6 * share))
        if len(found) % 40 == 39:
            found[str(random.integers(0, 10_000))] = None
        pieces = (_pick(random, _ONSETS) + _pick(random, _VOWELS) + _pick(random, _CODAS) for _ in range(syllables))
        found["".join(pieces)] = None
    return list(found)[:number]


def _pick(random: np.random.Generator, choices: list[str]) -> str:
    return choices[int(random.integers(len(choices)))]


def draw_lengths(random: np.random.Generator, number: int) -> np.ndarray:
    """Lengths of conversations. Shape: (number,) in tokens."""
    drawn = random.lognormal(LOG_MEAN, LOG_SIGMA, number)
    return np.clip(np.rint(drawn), SHORTEST, LONGEST).astype(np.int64)


def cut_into_turns(num_tokens: int, tokens_per_word: float) -> list[int]:
    """Words of each turn, the user's and the assistant's in turn, for a conversation of about so many tokens."""
    pairs = min(8, 1 + int(num_tokens / tokens_per_word) // _WORDS_PER_TURN)
    words = max(2 * pairs, round((num_tokens - 2 * pairs * TOKENS_PER_TURN) / tokens_per_word))
    asked = max(1, words // pairs * 3 // 10)
    turns = [asked, words // pairs - asked] * pairs
    turns[-1] += words - sum(turns)
    return turns


class Writer:
    """Conversations, by their number."""

    def __init__(self, tokens_per_word: float) -> None:
        self.tokens_per_word = tokens_per_word
        words = make_words()
        kinds = (words, [f"{word}," for word in words], [f"{word}." for word in words])
        self._forms = np.array([*(form for kind in kinds for form in kind), *map(str.capitalize, words)], dtype=object)
        shares = 1 / (np.arange(len(words)) + 2.7)  # Zipf and Mandelbrot
        self._cumulative = np.cumsum(shares / shares.sum())

    def conversations(self, number: int) -> Iterator[list[dict[str, str]]]:
        """The first so many conversations."""
        for first in range(0, number, _CHUNK):
            random = np.random.default_rng([SEED, first])
            lengths = draw_lengths(random, _CHUNK)
            turns = [cut_into_turns(int(length), self.tokens_per_word) for length in lengths]
            forms = self._draw_forms(random, sum(map(sum, turns)))
            position = 0
            for turn_words in turns[: number - first]:
                messages = []
                for place, num_words in enumerate(turn_words):
                    text = " ".join(forms[position : position + num_words])
                    messages.append({"role": "assistant" if place % 2 else "user", "content": text})
                    position += num_words
                yield messages

    def _draw_forms(self, random: np.random.Generator, number: int) -> list[str]:
        """Words with commas, full stops and a capital after each full stop."""
        words = np.searchsorted(self._cumulative, random.random(number)).clip(max=NUM_WORDS - 1)
        chance = random.random(number)
        kind = np.where(chance < 0.07, 2, np.where(chance < 0.14, 1, 0))
        starts = np.concatenate([[True], kind[:-1] == 2]) & (kind == 0)
        forms: list[str] = self._forms[words + NUM_WORDS * np.where(starts, 3, kind)].tolist()
        return forms


def write_conversations(file: Path, number: int, tokens_per_word: float, *, has_tools: bool = False) -> None:
    """Write the first so many conversations as JSON lines."""
    with file.open("w", encoding="utf-8") as stream:
        for messages in Writer(tokens_per_word).conversations(number):
            record = with_tools(messages) if has_tools else {"messages": messages}
            stream.write(json.dumps(record, ensure_ascii=False) + "\n")


def with_tools(messages: list[dict[str, str]]) -> dict[str, Any]:
    """The same words with calls: a third of each answer is an argument, a third the result, the rest the answer."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        words = message["content"].split(" ")
        third = len(words) // 3
        if message["role"] == "user" or not third:
            turns.append({**message})
            continue
        call = {"name": "search", "arguments": json.dumps({"query": " ".join(words[:third]), "limit": third})}
        turns += [
            {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "content": " ".join(words[third : 2 * third])},
            {"role": "assistant", "content": " ".join(words[2 * third :])},
        ]
    return {"messages": turns, "tools": TOOLS}


def _tool(name: str, about: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind, "description": f"the {key} to use"} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


TOOLS = [
    _tool("search", "Search the documents of the library", query="string", limit="integer"),
    _tool("weather", "The weather of a city on a day", city="string", day="string"),
    _tool("convert", "Convert an amount between two units", amount="number", unit="string", to="string"),
]


def write_model(folder: Path, sample: int = 12_000) -> float:
    """Train the tokenizer on a sample and write a model's folder with it (no weights): returns tokens per word."""
    writer = Writer(tokens_per_word=1.3)
    texts = [turn["content"] for messages in writer.conversations(sample) for turn in messages]
    tokenizer = build_tokenizer(texts, VOCABULARY)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": EOS_TOKEN, "pad_token": PAD_TOKEN}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | names))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    _write_config(folder, tokenizer.get_vocab_size())
    seen = texts[:2000]
    return sum(len(one.ids) for one in tokenizer.encode_batch(seen)) / sum(text.count(" ") + 1 for text in seen)


def _write_config(folder: Path, vocab_size: int) -> None:
    """A model of almost no weights: preparing needs none, and TRL's trainer asks for a model."""
    from transformers import AutoConfig

    architecture = AutoConfig.for_model(
        "qwen2", hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=vocab_size, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    architecture.architectures = ["Qwen2ForCausalLM"]
    architecture.save_pretrained(folder)
