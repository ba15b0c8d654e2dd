from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tunebook.errors import DoesNotFitError
from tunebook.evaluate.request_model import RequestModel

pytestmark = pytest.mark.usefixtures("quiet_harness")

WRITES_BOS = "{{ '<s>' }}{% for message in messages %}{{ message.content }} {% endfor %}"


def wrap(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int | None = 4) -> RequestModel:
    return RequestModel(model, tokenizer, batch_size=batch_size, compute_dtype=None)


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


def test_the_harness_still_has_the_methods_that_are_overridden() -> None:
    overridden = [name for name in RequestModel.__dict__ if callable(getattr(HFLM, name, None)) and name != "__init__"]
    first_parameters = {name: list(inspect.signature(getattr(HFLM, name)).parameters)[1] for name in overridden}
    assert first_parameters == {
        "loglikelihood": "requests",
        "loglikelihood_rolling": "requests",
        "generate_until": "requests",
        "_model_generate": "context",
    }


def test_a_forward_pass_is_the_models_own(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    relative_difference: Callable[[torch.Tensor, torch.Tensor], float],
) -> None:
    tokens = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected = model(tokens).logits
    found = wrap(model, tokenizer)._model_call(tokens)
    assert relative_difference(found, expected) < 32 * torch.finfo(torch.float32).eps  # sums in another order


def test_an_answer_knows_whether_it_was_cut_off(
    known_model: PreTrainedModel, known_tokenizer: PreTrainedTokenizerBase
) -> None:
    """The likeliest words are a b c d </s>: one batch holds all three ends, and one request twice."""
    wrapped = wrap(known_model, known_tokenizer)
    options = {"until": ["c d"], "do_sample": False, "max_gen_toks": 6}
    asked = [("c", options), ("a", options), ("b", {**options, "max_gen_toks": 1}), ("c", options)]
    requests = [
        Instance(request_type="generate_until", doc={}, arguments=arguments, idx=0, metadata=("t", 0, 1))
        for arguments in asked
    ]
    answers = wrapped.generate_until(requests)
    assert [answer.strip() for answer in answers] == ["d", "b", "c", "d"]
    assert [answer.is_cut for answer in answers] == [False, False, True, False]
    assert pickle.loads(pickle.dumps(answers[2])).is_cut, "processes exchange them"


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
    asked = requests(kind, 9)
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
    assert small.tried[0] == 9  # no more rows than requests
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


def test_an_error_of_another_kind_is_not_taken_for_too_little_memory(
    known_model: PreTrainedModel, known_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr(known_model, "forward", fail)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        wrap(known_model, known_tokenizer, None).loglikelihood(requests("loglikelihood", 2))


def test_the_rows_on_a_cpu_are_bound_by_its_memory(
    known_model: PreTrainedModel, known_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 5 words of the context, 2 of the answer and one to be safe; 6 logits and 6 log-probabilities of 4 bytes for each
    bytes_per_row = 8 * 6 * 2 * 4
    memory = SimpleNamespace(host_memory_gib=4 * 5.5 * bytes_per_row / 2**30)
    monkeypatch.setattr("tunebook.evaluate.request_model.detect_machine", lambda **_: memory)
    model = wrap(known_model, known_tokenizer, None)
    assert model._largest("loglikelihood", requests("loglikelihood", 3)) == 5
    assert model._largest("generate_until", requests("generate_until", 3)) > 5
