from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tunebook.config.frozen import load_config
from tunebook.errors import DoesNotFitError, RequestError
from tunebook.evaluate import worker
from tunebook.evaluate.batch_size import BatchSize, read_batch_size
from tunebook.evaluate.command import settings_as_json
from tunebook.evaluate.progress import AnswerProgress
from tunebook.evaluate.request_model import RequestModel

TaskFile = Callable[[str], Path]
KnownRun = Callable[..., Path]


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


def wrap(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: int | None, largest: int = 8
) -> RequestModel:
    return RequestModel(
        model,
        tokenizer,
        batch_size=BatchSize(asked, largest),
        compute_dtype=None,
        progress=AnswerProgress("evaluation test", clock=lambda: 0.0),  # no line because it takes long
    )


@pytest.mark.parametrize("kind", ["generate_until", "loglikelihood"])
def test_auto_goes_down_until_it_fits_and_says_so_once_and_the_answers_stay(
    kind: str,
    known_model: PreTrainedModel,
    known_tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = requests(kind, 9)
    expected = getattr(wrap(known_model, known_tokenizer, 1), kind)(asked)
    small = SmallMemory(known_model.forward, num_rows=2)
    monkeypatch.setattr(known_model, "forward", small)
    model = wrap(known_model, known_tokenizer, None)
    for _ in range(2):
        answers = getattr(model, kind)(asked)
        if kind == "loglikelihood":
            assert [is_greedy for _, is_greedy in answers] == [is_greedy for _, is_greedy in expected]
            assert [value for value, _ in answers] == pytest.approx([value for value, _ in expected])
        else:
            assert answers == expected
    assert small.tried[:3] == [8, 4, 2]
    assert max(small.tried[3:]) == 2
    assert model.sizes.smallest == 2
    assert capsys.readouterr().err == "evaluation test: batch size auto: 8 ran out of memory, 2 fits\n"


def test_a_size_that_was_asked_for_and_does_not_fit_names_a_smaller_one(
    known_model: PreTrainedModel, known_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_model, "forward", SmallMemory(known_model.forward, num_rows=2))
    with pytest.raises(DoesNotFitError, match=r"a batch of 6 requests does not fit.*type --batch-size 2, or") as raised:
        wrap(known_model, known_tokenizer, 6).generate_until(requests("generate_until", 9))
    assert raised.value.problem_id == "batch-does-not-fit"
    monkeypatch.setattr(known_model, "forward", SmallMemory(known_model.forward, num_rows=0))
    for asked in (1, None):
        with pytest.raises(DoesNotFitError, match="a single request of 21 characters does not fit"):
            wrap(known_model, known_tokenizer, asked).generate_until(requests("generate_until", 2))


def test_sampled_answers_do_not_depend_on_how_often_it_was_tried(
    known_model: PreTrainedModel, known_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled = {"until": ["</s>"], "do_sample": True, "temperature": 1.0, "max_gen_toks": 8}
    asked = [Instance("generate_until", {}, (f"a{' b' * number}", sampled), 0) for number in range(4)]
    torch.manual_seed(0)
    expected = wrap(known_model, known_tokenizer, 1).generate_until(asked)
    original = RequestModel._try
    failures = [True, True]

    def failing_late(self: RequestModel, kind: str, requests: Any) -> Any:
        answers = original(self, kind, requests)
        return None if failures and failures.pop() else answers

    monkeypatch.setattr(RequestModel, "_try", failing_late)
    torch.manual_seed(0)
    model = wrap(known_model, known_tokenizer, None, largest=8)
    assert model.generate_until(asked) == expected
    assert model._progress.num_done == 4  # and what was answered in vain is not counted


def test_an_error_of_another_kind_is_not_taken_for_too_little_memory(
    known_model: PreTrainedModel, known_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr(known_model, "forward", fail)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        wrap(known_model, known_tokenizer, None).loglikelihood(requests("loglikelihood", 2))


def test_no_more_rows_are_tried_than_there_are_requests(
    known_model: PreTrainedModel, known_tokenizer: PreTrainedTokenizerBase
) -> None:
    for count, size in ((1, 1), (2, 2), (3, 4), (5, 8)):
        model = wrap(known_model, known_tokenizer, None, largest=64)
        model.generate_until(requests("generate_until", count))
        assert model.sizes.smallest == size
    assert wrap(known_model, known_tokenizer, None)._answer("loglikelihood", []) == []


def test_short_requests_are_not_slowed_down_by_long_ones_before_them() -> None:
    sizes = BatchSize(None, largest=64)
    sizes.lower("generate_until", 64, 1000)
    assert sizes.size_for("generate_until", 1000) == 32
    sizes.lower("generate_until", 32, 1000)
    assert [sizes.size_for("generate_until", length) for length in (2000, 1000, 500, 10)] == [8, 16, 32, 64]
    assert sizes.size_for("loglikelihood", 1000) == 64  # which needs other memory
    assert sizes.size_for("loglikelihood", 1000, limit=13) == 8


def test_it_is_told_again_only_where_another_size_was_found() -> None:
    sizes = BatchSize(None, largest=8)
    assert sizes.fitted("loglikelihood", 8) is None
    sizes.lower("loglikelihood", 8, 10)
    sizes.lower("loglikelihood", 4, 10)
    assert sizes.fitted("loglikelihood", 2) == "batch size auto: 8 ran out of memory, 2 fits"
    sizes.lower("loglikelihood", 4, 5)
    assert sizes.fitted("loglikelihood", 2) is None
    assert sizes.smallest == 2
    sizes.begin_task()
    assert sizes.smallest is None


@pytest.mark.parametrize(("text", "size"), [("auto", None), ("1", 1), ("64", 64)])
def test_a_size_is_a_count_or_auto(text: str, size: int | None) -> None:
    assert read_batch_size(text) == size


@pytest.mark.parametrize("text", ["0", "-3", "2.5", "many"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match=rf"--batch-size {text} is not a number of requests.* or auto") as raised:
        read_batch_size(text)
    assert raised.value.problem_id == "batch-size"


def test_the_rows_on_a_cpu_are_bound_by_its_memory(
    known_model: PreTrainedModel, known_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    (longest,) = requests("loglikelihood", 3)[-1:]
    # 5 words of the context, 2 of the answer and one to be safe; 6 logits and 6 log-probabilities of 4 bytes for each
    bytes_per_row = 8 * 6 * 2 * 4
    memory = SimpleNamespace(host_memory_gib=4 * 5.5 * bytes_per_row / 2**30)
    monkeypatch.setattr("tunebook.evaluate.request_model.detect_machine", lambda **_: memory)
    assert wrap(known_model, known_tokenizer, None)._limit_on_cpu("loglikelihood", longest) == 5
    assert wrap(known_model, known_tokenizer, None)._limit_on_cpu("generate_until", longest) is None


@pytest.mark.usefixtures("quiet_harness")
def test_what_was_found_is_recorded(
    task_file: TaskFile, known_run: KnownRun, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = known_run([task_file("continuation")], batch_size=None)
    small = SmallMemory(RequestModel._model_generate, num_rows=2)

    def generate(self: RequestModel, context: torch.Tensor, **options: Any) -> Any:
        return small(self, input_ids=context, context=context, **options)

    small.forward = lambda self, *, input_ids, **options: original(self, **options)
    original = RequestModel._model_generate
    monkeypatch.setattr(RequestModel, "_model_generate", generate)
    assert worker.main(["--run", str(run), "--when", "before"]) == 0
    assert "evaluation before: batch size auto: 4 ran out of memory, 2 fits" in capfd.readouterr().err
    record = json.loads((run / "evaluation" / "before.json").read_text())
    assert (record["batch_size"], record["batch_sizes"]) == ("auto", {"continuation": 2})
    assert record["tasks"]["continuation"]["value"] == 0.75
    settings = settings_as_json(replace(load_config(run / "run.yaml").evaluation, batch_size=3))
    assert worker.main(["--run", str(run), "--when", "again", "--fresh", "--evaluation", settings]) == 3
    assert "a batch of 3 requests does not fit" in capfd.readouterr().err
