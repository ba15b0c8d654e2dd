"""Conversations and a tokenizer for measuring preparation: made on the spot, always the same, nothing fetched.

Words are made of syllables and drawn with Zipf's frequencies, with capitals, commas, full stops, numbers and accents,
so that a byte-level BPE works on them as on text: common words are one token, rare ones several. Lengths in tokens
follow lognormal(5.8, 0.9) clipped to 16..4096, once `tokens_per_word` of the trained tokenizer is known.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
from lines import write_lines

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "recipes" / "quickstart"))

from model_files import CHAT_TEMPLATE, EOS_TOKEN, PAD_TOKEN, build_tokenizer

SEED = 9
NUM_WORDS = 120_000
VOCABULARY = 40_960  # entries, special tokens included
LOG_MEAN, LOG_SIGMA, SHORTEST, LONGEST = 5.8, 0.9, 16, 4096
TOKENS_PER_PAIR = 10  # of a question and its answer: <|im_start|>, the role, a line break, <|im_end|>, a line break
WORDS_PER_PAIR = 160  # longer conversations have more turns
QUESTION = 0.3  # share of a pair's words


def make_words(number: int = NUM_WORDS) -> list[str]:
    """Distinct words of one to four syllables, shorter ones first, every fortieth a number."""
    random = np.random.default_rng(SEED)
    onsets, vowels, codas = (
        ["st", "th", "ch", "pr", *"bcdfghjklmnprstvw"],
        [*"aeiouyéö", "ea", "ou"],
        ["", *"nrstl", "nd"],
    )
    syllables = ["".join(parts) for parts in product(onsets, vowels, codas)]
    found: dict[str, None] = {}
    while len(found) < number:
        count = 1 + random.binomial(3, 0.05 + 0.6 * len(found) / number)
        word = "".join(syllables[place] for place in random.integers(len(syllables), size=count))
        found[word if len(found) % 40 != 39 else str(random.integers(100_000))] = None
    return list(found)


def conversations(number: int, tokens_per_word: float) -> Iterator[list[dict[str, str]]]:
    """The first so many conversations; each depends on the seed and its number only."""
    words = np.array(make_words(), dtype=object)
    shares = 1 / (np.arange(len(words)) + 2.7)  # Zipf and Mandelbrot
    cumulative = np.cumsum(shares / shares.sum())
    for which in range(number):
        random = np.random.default_rng([SEED, which])
        tokens = float(np.clip(random.lognormal(LOG_MEAN, LOG_SIGMA), SHORTEST, LONGEST))
        pairs = min(8, 1 + int(tokens / tokens_per_word) // WORDS_PER_PAIR)
        num_words = max(4 * pairs, round((tokens - pairs * TOKENS_PER_PAIR) / tokens_per_word))
        drawn = words[np.searchsorted(cumulative, random.random(num_words)).clip(max=NUM_WORDS - 1)]
        drawn += random.choice(["", ",", "."], num_words, p=[0.86, 0.07, 0.07]).astype(object)
        messages = []
        for pair in np.array_split(drawn, pairs):
            for role, part in zip(("user", "assistant"), np.split(pair, [int(len(pair) * QUESTION)]), strict=True):
                text = ". ".join(map(str.capitalize, " ".join(part).split(". ")))
                messages.append({"role": role, "content": text})
        yield messages


def write_conversations(file: Path, number: int, tokens_per_word: float) -> None:
    """Write the first so many conversations as JSON lines."""
    write_lines(file, ({"messages": messages} for messages in conversations(number, tokens_per_word)))


def write_model(folder: Path, sample: int = 12_000) -> float:
    """Train the tokenizer on a sample and write a model's folder with it: returns tokens per word.

    The model has almost no weights: preparing needs none, and TRL's trainer asks for a model.
    """
    from transformers import AutoConfig, PreTrainedTokenizerFast

    texts = [turn["content"] for messages in conversations(sample, 1.3) for turn in messages]
    tokenizer = build_tokenizer(texts, VOCABULARY)
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS_TOKEN, pad_token=PAD_TOKEN)
    whole.chat_template = CHAT_TEMPLATE
    whole.save_pretrained(folder)
    architecture = AutoConfig.for_model(
        "qwen2", hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=len(whole), max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    architecture.architectures = ["Qwen2ForCausalLM"]
    architecture.save_pretrained(folder)
    seen = texts[:2000]
    return sum(len(one.ids) for one in tokenizer.encode_batch(seen)) / sum(text.count(" ") + 1 for text in seen)
