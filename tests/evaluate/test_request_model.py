from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tunebook.evaluate.request_model import RequestModel

pytestmark = pytest.mark.usefixtures("quiet_harness")


@pytest.fixture
def wrap(
    known_model: PreTrainedModel, known_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> Callable[..., RequestModel]:
    """`wrap(4, seed=1)`: the known model, in batches of 4, with an identity."""

    def make(batch_size: int | None, **identity: Any) -> RequestModel:
        return RequestModel(
            known_model, known_tokenizer, batch_size=batch_size, compute_dtype=None, folder=tmp_path / "kept",
            identity=identity,
        )  # fmt: skip

    return make


class SmallMemory:
    """Stands in for a model's forward pass on a GPU: more than so many rows at once do not fit."""

    def __init__(self, forward: Callable[..., Any], num_rows: int) -> None:
        self.forward, self.num_rows = forward, num_rows
        self.tried: list[int] = []

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        rows = (options["input_ids"] if "input_ids" in options else arguments[0]).shape[0]
        self.tried.append(rows)
        if rows > self.num_rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.forward(*arguments, **options)


def requests(kind: str, count: int, **generation: Any) -> list[Instance]:
    """Prompts of 1 to `count` words, none of which shares its context with another."""
    words = ["a" + " b c" * number for number in range(count)]
    settings = {"until": ["</s>"], "do_sample": False, "max_gen_toks": 4} | generation
    return [Instance(kind, {}, (word, settings if kind == "generate_until" else " a b"), 0) for word in words]


@pytest.mark.parametrize("kind", ["generate_until", "loglikelihood"])
def test_auto_goes_down_until_it_fits_and_the_answers_stay(
    kind: str, wrap: Callable[..., RequestModel], known_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = getattr(wrap(1, name=1), kind)(requests(kind, 7))
    small = SmallMemory(known_model.forward, num_rows=2)
    monkeypatch.setattr(known_model, "forward", small)
    model = wrap(None, name=2)
    answers = getattr(model, kind)(requests(kind, 7))
    if kind == "loglikelihood":
        assert [is_greedy for _, is_greedy in answers] == [is_greedy for _, is_greedy in expected]
        assert [value for value, _ in answers] == pytest.approx([value for value, _ in expected])
    else:
        assert answers == expected
    assert small.tried[0] == 7  # no more rows than requests
    assert small.tried[-1] <= model.batch_size == 2


def test_sampled_answers_do_not_depend_on_the_number_of_attempts(
    wrap: Callable[..., RequestModel], known_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled = requests("generate_until", 4, do_sample=True, temperature=1.0, max_gen_toks=8)
    expected = wrap(1, name=1).generate_until(sampled)
    monkeypatch.setattr(known_model, "forward", SmallMemory(known_model.forward, num_rows=1))
    assert wrap(None, name=2).generate_until(sampled) == expected


def test_kept_answers_are_those_of_the_same_model_and_requests(wrap: Callable[..., RequestModel]) -> None:
    answers = wrap(1, seed=1).generate_until(requests("generate_until", 3))
    for model, others, is_reused in (
        (wrap(4, seed=1), requests("generate_until", 3), True),  # the size of a batch changes no answer
        (wrap(1, seed=2), requests("generate_until", 3), False),
        (wrap(1, seed=1), requests("generate_until", 2), False),
        (wrap(1, seed=1), requests("generate_until", 3, max_gen_toks=5), False),
    ):
        assert model.generate_until(others)[:2] == answers[:2]
        assert bool(model.reused) is is_reused
