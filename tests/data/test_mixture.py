"""Mixtures: how many documents of each part, in which order, and which parts go together."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tunebook.config.choices import Source
from tunebook.config.schema import DatasetConfig, MixturePart
from tunebook.data.mixture import interleave, plan_counts
from tunebook.data.sources import corpus_identity, load_corpus
from tunebook.errors import DataError, RequestError

from .conftest import turns_of


@pytest.mark.parametrize(
    ("sizes", "weights", "counts"),
    [
        ((3, 100), (None, None), (3, 100)),
        ((100, 1000), (1.0, 4.0), (100, 400)),
        ((1000, 3000), (0.1, 0.3), (1000, 3000)),  # exact: 0.1 + 0.2 is not 0.3 in floating point
        ((10, 10), (0.7, 0.3), (10, 4)),
    ],
)
def test_weights_are_shares_until_the_first_part_is_used_up(
    sizes: tuple[int, int], weights: tuple[float | None, float | None], counts: tuple[int, int]
) -> None:
    planned = plan_counts(dict(zip("ab", sizes, strict=True)), dict(zip("ab", weights, strict=True)))
    assert tuple(planned.values()) == counts


@pytest.mark.parametrize("weights", [{"a": 1.0, "b": None}, {"a": 1000.0, "b": 1.0}])
def test_weights_that_cannot_be_met(weights: dict[str, float | None]) -> None:
    with pytest.raises(RequestError) as caught:
        plan_counts({"a": 10, "b": 10}, weights)
    assert caught.value.problem_id == "mixture-weights"


def test_any_stretch_of_a_mixture_has_about_the_right_shares() -> None:
    order = interleave([300, 100], [300, 100])
    assert sorted(order) == list(range(400))
    for start in range(0, 400, 40):
        assert sum(order[start : start + 40] >= 300) == 10


def test_a_part_that_is_not_taken_whole_is_sampled_over_its_length() -> None:
    taken = interleave([1000], [100])
    assert len(set(taken.tolist())) == 100
    assert list(taken) == sorted(taken)
    assert 35 <= sum(taken < 500) <= 65  # 50 expected, standard deviation 4.7
    assert list(taken) == list(interleave([1000], [100]))


def write(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_a_mixture_of_formats_of_one_kind(tmp_path: Path) -> None:
    alpaca = [{"instruction": f"task {number}", "output": "done"} for number in range(30)]
    chats = [
        {"messages": [{"role": "user", "content": f"chat {n}"}, {"role": "assistant", "content": "yes"}]}
        for n in range(100)
    ]
    parts = {
        "chat": MixturePart(path=write(tmp_path / "chat.jsonl", chats), weight=2),
        "task": MixturePart(path=write(tmp_path / "task.jsonl", alpaca), weight=1),
    }
    config = DatasetConfig(source=Source.mixture, parts=parts, system_prompt="s", validation_share=0.2)
    corpus = load_corpus(config, cache_dir=tmp_path / "cache")
    assert corpus.validation is not None
    prompts = [turns_of(row)[1]["content"] for part in (corpus.train, corpus.validation) for row in part]
    assert sum(prompt.startswith("chat") for prompt in prompts) == 60
    assert sum(prompt.startswith("task") for prompt in prompts) == 30
    assert len(set(prompts)) == 90
    assert [record.num_documents for record in corpus.records] == [100, 30]
    assert "mixture, in documents: chat 60 of 100, task 30 of 30" in corpus.notes

    fewer = load_corpus(replace(config, max_documents=30, validation_share=0.0), cache_dir=tmp_path / "cache")
    assert [sum(row.startswith(name) for row in fewer.train["origin"]) for name in ("chat", "task")] == [20, 10]

    before = corpus_identity(config)
    parts["task"].weight = 3
    assert corpus_identity(config) != before
    parts["books"] = MixturePart(path=write(tmp_path / "books.jsonl", [{"text": "plain"}]))
    with pytest.raises(DataError, match=r"chat is conversation, .*books is text") as caught:
        load_corpus(config, cache_dir=tmp_path / "cache")
    assert caught.value.problem_id == "mixture-kinds"
