from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tunebook.errors import DoesNotFitError
from tunebook.evaluate.request_model import RequestModel

pytestmark = pytest.mark.usefixtures("quiet_harness")

WRITES_BOS = "{{ '<s>' }}{% for message in messages %}{{ message.content }} {% endfor %}"


def wrap(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int | None = 4) -> RequestModel:
    return RequestModel(
        model, tokenizer, batch_size=batch_size, compute_dtype=None, folder=Path("kept"), identity={}, is_fresh=True
    )


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where answers are kept."""
    monkeypatch.chdir(tmp_path)


def tokenizer_that_adds_bos(chat_template: str | None) -> PreTrainedTokenizerFast:
    """`<s>` is added by the tokenizer itself, as LLaMA's does."""
    backend = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>", "</s>", "<pad>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", add_bos_token=True
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def test_generation_stops_at_the_tokenizers_eos_and_at_the_models_own(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert model.generation_config is not None
    assert model.generation_config.eos_token_id == 0
    wrap(model, tokenizer)
    assert model.generation_config.eos_token_id == [0, tokenizer.eos_token_id]


@pytest.mark.parametrize(
    ("template", "text", "expected"),
    [
        (WRITES_BOS, "<s>a b", [1, 3, 4]),  # written by the template: not doubled
        ("{{ messages[0].content }}", "a b", [3, 4]),  # trained without: not added
        (None, "a b", [1, 3, 4]),  # no template: the tokenizer's own habit
    ],
)
def test_bos_is_where_training_had_it(
    model: PreTrainedModel, template: str | None, text: str, expected: list[int]
) -> None:
    wrapped = wrap(model, tokenizer_that_adds_bos(template))
    input_ids, _ = wrapped.tok_batch_encode([text])
    assert input_ids.tolist() == [expected]
    assert wrapped.tok_encode(text) == expected


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


def requests(kind: str, count: int) -> list[Instance]:
    """Prompts of 1 to `count` words, none of which shares its context with another."""
    words = ["a" + " b c" * number for number in range(count)]
    second = {"until": ["</s>"], "do_sample": False, "max_gen_toks": 4}
    return [Instance(kind, {}, (word, second if kind == "generate_until" else " a b"), 0) for word in words]


@pytest.mark.parametrize("kind", ["generate_until", "loglikelihood"])
def test_auto_goes_down_until_it_fits_and_the_answers_stay(
    kind: str,
    known_model: PreTrainedModel,
    known_tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = requests(kind, 7)
    expected = getattr(wrap(known_model, known_tokenizer, 1), kind)(asked)
    small = SmallMemory(known_model.forward, num_rows=2)
    monkeypatch.setattr(known_model, "forward", small)
    model = wrap(known_model, known_tokenizer, None)
    answers = getattr(model, kind)(asked)
    if kind == "loglikelihood":
        assert [is_greedy for _, is_greedy in answers] == [is_greedy for _, is_greedy in expected]
        assert [value for value, _ in answers] == pytest.approx([value for value, _ in expected])
    else:
        assert answers == expected
    assert small.tried[0] == 7  # no more rows than requests
    assert small.tried[-1] <= model.batch_size == 2


@pytest.mark.parametrize("asked", [6, 1, None])
def test_requests_that_do_not_fit_are_an_error(
    asked: int | None,
    known_model: PreTrainedModel,
    known_tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_model, "forward", SmallMemory(known_model.forward, num_rows=2 if asked == 6 else 0))
    with pytest.raises(DoesNotFitError) as raised:
        wrap(known_model, known_tokenizer, asked).generate_until(requests("generate_until", 9))
    assert raised.value.problem_id == "batch-does-not-fit"


def test_sampled_answers_do_not_depend_on_how_often_it_was_tried(
    known_model: PreTrainedModel, known_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled = {"until": ["</s>"], "do_sample": True, "temperature": 1.0, "max_gen_toks": 8}
    asked = [Instance("generate_until", {}, (f"a{' b' * number}", sampled), 0) for number in range(4)]
    expected = wrap(known_model, known_tokenizer, 1).generate_until(asked)
    monkeypatch.setattr(known_model, "forward", SmallMemory(known_model.forward, num_rows=1))
    assert wrap(known_model, known_tokenizer, None).generate_until(asked) == expected
