from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tunebook.evaluate.batch_size import BatchSize
from tunebook.evaluate.progress import AnswerProgress
from tunebook.evaluate.request_model import RequestModel

pytestmark = pytest.mark.usefixtures("quiet_harness")

WRITES_BOS = "{{ '<s>' }}{% for message in messages %}{{ message.content }} {% endfor %}"


def wrap(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> RequestModel:
    progress = AnswerProgress("evaluation test")
    return RequestModel(model, tokenizer, batch_size=BatchSize(4), compute_dtype=None, progress=progress)


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


def test_each_answer_knows_how_it_ended(known_model: PreTrainedModel, known_tokenizer: PreTrainedTokenizerBase) -> None:
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
    assert [answer.finish for answer in answers] == ["eos", "stop", "length", "eos"]
