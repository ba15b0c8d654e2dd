"""Generated documents: deterministic, of the lengths asked for, and learnable."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from tunebook.config.choices import Source
from tunebook.config.schema import DatasetConfig, SyntheticConfig
from tunebook.data.corpus import Corpus
from tunebook.data.sources import load_corpus
from tunebook.errors import RequestError

VOCAB_SIZE = 151_936
EOS = 151_645


def load(folder: Path, vocab_size: int = VOCAB_SIZE, **settings: float) -> Corpus:
    synthetic = SyntheticConfig(**{"num_documents": 300, **settings})  # type: ignore[arg-type]
    config = DatasetConfig(source=Source.synthetic, synthetic=synthetic)
    return load_corpus(config, cache_dir=folder, vocab_size=vocab_size, eos_token_id=min(EOS, vocab_size - 1))


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[int]]]:
    return load(tmp_path_factory.mktemp("synthetic")).train.to_list()


def test_lognormal_lengths_masked_prompts_and_answers_that_end_with_eos(
    documents: list[dict[str, list[int]]],
) -> None:
    assert len(documents) == 300
    for document in documents:
        input_ids, labels = document["input_ids"], document["labels"]
        assert input_ids[-1] == EOS
        assert EOS not in input_ids[:-1]
        num_prompt = labels.count(-100)
        assert labels == [-100] * num_prompt + input_ids[num_prompt:]
        assert 1 <= num_prompt <= len(input_ids) // 2 + 1
    lengths = np.array([len(document["input_ids"]) for document in documents])
    assert lengths.min() >= 16
    assert lengths.max() <= 4096
    logs = np.log(lengths)
    assert logs.mean() == pytest.approx(5.8, abs=4 * 0.9 / math.sqrt(300))
    assert logs.std() == pytest.approx(0.9, abs=0.15)


def test_a_small_vocabulary_and_the_shortest_documents(tmp_path: Path) -> None:
    corpus = load(tmp_path, vocab_size=8, num_documents=20, min_tokens=4, max_tokens=4, log_mean_tokens=1.0)
    for row in corpus.train:
        *tokens, last = row["input_ids"]
        assert len(tokens) == 3 and max(tokens) < 7 == last
        assert (row["labels"][0], row["labels"][-1]) == (-100, 7)


def test_the_next_token_is_predictable(documents: list[dict[str, list[int]]]) -> None:
    pairs: dict[int, Counter[int]] = defaultdict(Counter)
    for document in documents:
        ids, labels = document["input_ids"], document["labels"]
        for before, label in zip(ids, labels[1:], strict=False):
            if label not in (-100, EOS):
                pairs[before][label] += 1
    total = sum(counter.total() for counter in pairs.values())
    bigram_entropy = -sum(
        count / total * math.log(count / counter.total()) for counter in pairs.values() for count in counter.values()
    )
    unigram = sum(pairs.values(), Counter())
    unigram_entropy = -sum(count / total * math.log(count / total) for count in unigram.values())
    # -(0.70 ln 0.70 + 0.15 ln 0.15 + 0.10 ln 0.10 + 0.05 ln 0.05) = 0.914 nats, against ln 151936 = 11.93.
    assert bigram_entropy == pytest.approx(0.914, abs=0.03)
    assert 2.5 < unigram_entropy <= math.log(64)
    assert all(len(counter) == 4 for counter in pairs.values())


def test_pairs_have_the_documents_and_random_answers_of_equal_length(
    documents: list[dict[str, list[int]]], tmp_path: Path
) -> None:
    pairs = load(tmp_path, pairs=True)
    assert pairs.kind.reads == "pairs"
    for pair, document in zip(pairs.train.to_list(), documents, strict=True):
        assert pair["input_ids"] != pair["rejected_ids"]
        assert len(pair["input_ids"]) == len(document["input_ids"]) == len(pair["rejected_ids"])
        num_prompt = pair["labels"].count(-100)
        assert pair["rejected_ids"][:num_prompt] == pair["input_ids"][:num_prompt]
        assert pair["rejected_labels"] == [-100] * num_prompt + pair["rejected_ids"][num_prompt:]
        assert pair["rejected_ids"][-1] == EOS


def test_the_seed_decides_and_fewer_documents_are_the_first_of_more(tmp_path: Path) -> None:
    short = {"log_mean_tokens": 3.0, "max_tokens": 64}
    same = load(tmp_path / "a", num_documents=1200, **short).train.with_format("arrow")
    assert load(tmp_path / "c", num_documents=1100, **short).train.with_format("arrow")[:].equals(same[:1100])
    assert not load(tmp_path / "d", num_documents=50, seed=1, **short).train.with_format("arrow")[:].equals(same[:50])
    assert same[1100]["origin"][0].as_py() == "synthetic:1101"


@pytest.mark.parametrize("settings", [{"min_tokens": 2}, {"min_tokens": 64, "max_tokens": 32}, {"vocab_size": 4}])
def test_settings_that_cannot_be_met_are_refused(tmp_path: Path, settings: dict[str, int]) -> None:
    with pytest.raises(RequestError) as caught:
        load(tmp_path, **settings)
    assert caught.value.problem_id == "synthetic-settings"
