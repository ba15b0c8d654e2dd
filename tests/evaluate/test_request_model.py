"""What the model reads, where it stops, in batches of which size, and which answers are kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tunebook.errors import DoesNotFitError
from tunebook.evaluate.harness import HarnessSettings, load_tasks, run_task
from tunebook.evaluate.request_model import RequestModel
from tunebook.evaluate.task_files import read_task_file

pytestmark = pytest.mark.usefixtures("quiet_harness")

WORDS = ("<pad>", "<s>", "</s>", "system:", "user:", "answer:", "a", "b", "c")
PAD, BOS = 0, 1
TEMPLATE = (
    "{{ '<s> ' }}{% for message in messages %}{{ message.role }}: {{ message.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}{{ 'answer: ' }}{% endif %}"
)
TASK = {
    "task": "words", "dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}",
    "doc_to_target": "{{right}}",
}  # fmt: skip
GENERATED = {
    "output_type": "generate_until", "metric_list": [{"metric": "exact_match"}],
    "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": 4},
}  # fmt: skip
KINDS = {
    "choices": {"output_type": "multiple_choice", "doc_to_choice": ["a", "b"], "metric_list": [{"metric": "acc"}]},
    "written": GENERATED,
    "held-out": GENERATED
    | {"doc_to_text": "{{prompt}}", "doc_to_target": "{{answer}}", "metadata": {"conversations": "held.jsonl"}},
}


@pytest.fixture
def adding_bos() -> PreTrainedTokenizerBase:
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(list(WORDS[:3]))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    make: Any = PreTrainedTokenizerFast  # untyped upstream
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer: PreTrainedTokenizerBase = make(tokenizer_object=backend, add_bos_token=True, **special)
    return tokenizer


def rows_read(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Every row of tokens that the model reads from now on, without what fills it up."""
    rows: list[list[int]] = []
    original = model.forward

    def forward(input_ids: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        rows.extend([token for token in row if token != PAD] for row in input_ids.tolist())
        return original(input_ids, *arguments, **options)

    monkeypatch.setattr(model, "forward", forward)
    return rows


@pytest.mark.parametrize("start", ["<s> ", ""], ids=["template-writes-bos", "trained-without-bos"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_begins_as_in_training_with_one_bos_or_none(
    kind: str,
    start: str,
    model: PreTrainedModel,
    adding_bos: PreTrainedTokenizerBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"question": question, "right": 0}) + "\n" for question in ("a b", "c")))
    turns = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
    (tmp_path / "held.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    arguments = {"data_files": {"test": str(data)}, "cache_dir": str(tmp_path / "cache")}
    file = tmp_path / "task.yaml"
    file.write_text(json.dumps(TASK | {"dataset_kwargs": arguments} | KINDS[kind]))
    adding_bos.chat_template = TEMPLATE.replace("<s> ", start)
    run_model = RequestModel(model, adding_bos, batch_size=2, compute_dtype=None, folder=tmp_path / "kept", identity={})
    settings = HarnessSettings(tokenizer=adding_bos, max_length=64, num_fewshot=None, limit=None, system_prompt="c c")
    (task,) = load_tasks([read_task_file(file)], tmp_path, settings)
    rows = rows_read(model, monkeypatch)
    run_task(run_model, task, settings)
    prompts = [row for row in rows if len(row) > 1]  # a generation then reads one token at a time
    trained = f"{start}system: c c </s> user: a b </s> answer:"
    begins = adding_bos(trained, add_special_tokens=False)["input_ids"]
    assert any(row[: len(begins)] == begins for row in prompts)
    assert all(row.count(BOS) == len(start.split()) for row in prompts)


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


def limit_memory(model: PreTrainedModel, num_rows: int, patch: pytest.MonkeyPatch) -> list[int]:
    """As on a GPU: more than so many rows at once do not fit; returns the numbers of rows that were tried."""
    forward, tried = model.forward, []

    def limited(*arguments: Any, **options: Any) -> Any:
        rows = (options["input_ids"] if "input_ids" in options else arguments[0]).shape[0]
        tried.append(rows)
        if rows > num_rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(*arguments, **options)

    patch.setattr(model, "forward", limited)
    return tried


def requests(kind: str, count: int, **generation: Any) -> list[Instance]:
    """Prompts of 1 to `count` words, none of which shares its context with another."""
    words = ["a" + " b c" * number for number in range(count)]
    settings = {"until": ["</s>"], "do_sample": False, "max_gen_toks": 4} | generation
    return [Instance(kind, {}, (word, settings if kind == "generate_until" else " a b"), 0) for word in words]


@pytest.mark.parametrize("kind", ["generate_until", "loglikelihood"])
@pytest.mark.parametrize("size", [None, 5])
def test_a_batch_goes_down_until_it_fits_and_the_answers_stay(
    size: int | None,
    kind: str,
    wrap: Callable[..., RequestModel],
    known_model: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = getattr(wrap(1, name=1), kind)(requests(kind, 7))
    tried = limit_memory(known_model, 2, monkeypatch)
    model = wrap(size, name=2)
    answers = getattr(model, kind)(requests(kind, 7))
    if kind == "loglikelihood":
        assert [is_greedy for _, is_greedy in answers] == [is_greedy for _, is_greedy in expected]
        assert [value for value, _ in answers] == pytest.approx([value for value, _ in expected])
    else:
        assert answers == expected
    assert tried[0] == (size or 7)  # no more rows than requests
    assert tried[-1] <= model.batch_size == 2


def test_a_request_that_does_not_fit_alone_says_what_to_do(
    wrap: Callable[..., RequestModel], known_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = limit_memory(known_model, 0, monkeypatch)
    with pytest.raises(DoesNotFitError) as raised:
        wrap(5).loglikelihood(requests("loglikelihood", 7))
    assert raised.value.problem_id == "request-does-not-fit"
    assert tried[-1] == 1


def test_sampled_answers_do_not_depend_on_the_number_of_attempts(
    wrap: Callable[..., RequestModel], known_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled = requests("generate_until", 4, do_sample=True, temperature=1.0, max_gen_toks=8)
    expected = wrap(1, name=1).generate_until(sampled)
    limit_memory(known_model, 1, monkeypatch)
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


def test_an_answer_ends_where_training_taught_it_to_also_where_the_models_settings_do_not_say_so(
    wrap: Callable[..., RequestModel], known_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert known_model.generation_config is not None
    known_model.generation_config.eos_token_id = None
    model = wrap(1)
    rows = rows_read(known_model, monkeypatch)
    # After </s> this model goes on with a, b, c, d for ever.
    request = Instance("generate_until", {}, ("a", {"until": [], "max_gen_toks": 20, "do_sample": False}), 0)
    assert model.generate_until([request]) == ["b c d"]
    assert len(rows) == 4  # the prompt and b, c, d, after which comes </s>
    assert model.prompted()["stop_tokens"] == ["</s>"]
