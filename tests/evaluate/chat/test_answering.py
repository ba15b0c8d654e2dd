from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tunebook.config.choices import TrainOn
from tunebook.data.corpus import CorpusKind
from tunebook.data.encode import Encoder
from tunebook.errors import DataError, DoesNotFitError
from tunebook.evaluate.chat.answering import ChatModel, Ending, Generated, Sampling

Models = Callable[..., ChatModel]
QUESTION = [{"role": "user", "content": "Reverse the order: rain key chair"}]


def generate(
    model: ChatModel, pieces: list[str], *, temperature: float = 0.0, tokens: int = 16, **more: Any
) -> Generated:
    sampling = Sampling(max_new_tokens=tokens, temperature=temperature, seed=0)
    return model.generate(model.encode(QUESTION), sampling, pieces.append, **more)


def test_it_streams_word_by_word_and_stops_at_the_trained_eos(chat_model: Models) -> None:
    pieces: list[str] = []
    answer = generate(chat_model("apple bird cat"), pieces)
    assert answer == Generated(text="apple bird cat", num_tokens=3, ending=Ending.stop)
    assert pieces == ["apple", " bird", " cat"]


def test_every_eos_of_the_generation_config_ends_an_answer(
    scripted: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerBase, chat_model: Models
) -> None:
    end_of_text: Any = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert end_of_text != tokenizer.eos_token_id
    model = scripted("apple", end=[end_of_text, 300, 301])
    assert generate(ChatModel(model, tokenizer, stop_ids=[tokenizer.eos_token_id]), []).num_tokens > 1
    both = ChatModel(model, tokenizer, stop_ids=[tokenizer.eos_token_id, end_of_text])
    assert generate(both, []) == Generated(text="apple", num_tokens=1, ending=Ending.stop)


def test_it_ends_after_as_many_tokens_as_asked_for(chat_model: Models) -> None:
    answer = generate(chat_model("apple bird cat"), [], tokens=2)
    assert answer == Generated(text="apple bird", num_tokens=2, ending=Ending.length)


def test_letters_of_several_tokens_come_whole(chat_model: Models) -> None:
    pieces: list[str] = []
    answer = generate(chat_model("é🦊w"), pieces, tokens=16)
    assert pieces == ["é", "🦊", "w"]
    assert answer.num_tokens == 2 + 4 + 1


def test_half_a_letter_at_the_end_is_not_lost(chat_model: Models) -> None:
    pieces: list[str] = []
    answer = generate(chat_model("w🦊"), pieces, tokens=3)  # two of the fox's four bytes
    assert "".join(pieces) == answer.text == "w\ufffd"


def test_pieces_of_a_long_answer_join_to_what_the_tokenizer_makes_of_all_tokens(
    chat_model: Models, tokenizer: PreTrainedTokenizerBase
) -> None:
    tokens = [token for token in range(3, 300) if "\n" not in tokenizer.decode([token])][::-1]
    answer = generate(chat_model(tokens, context=1024), [], tokens=len(tokens))
    assert answer.num_tokens == len(tokens)
    assert answer.text == tokenizer.decode(tokens)


def test_an_interruption_ends_it_at_the_next_token(chat_model: Models) -> None:
    pieces: list[str] = []
    answer = generate(chat_model("apple bird cat dog"), pieces, is_interrupted=lambda: len(pieces) >= 2)
    assert answer == Generated(text="apple bird cat", num_tokens=3, ending=Ending.interrupted)


def test_a_prompt_is_encoded_as_in_training(chat_model: Models, tokenizer: PreTrainedTokenizerBase) -> None:
    turns = [*QUESTION, {"role": "assistant", "content": "chair key rain"}]
    row: dict[str, Any] = {
        "messages": [{**turn, "train": turn["role"] == "assistant"} for turn in turns],
        "origin": "x",
    }
    (document,) = Encoder(CorpusKind.conversation, TrainOn.assistant, tokenizer).encode([row])
    prompt = chat_model("apple").encode(QUESTION)
    assert document.input_ids[: len(prompt)] == prompt
    assert all(label == -100 for label in document.labels[: len(prompt)])
    assert document.labels[len(prompt)] != -100


def test_bos_is_not_doubled(scripted: Callable[..., PreTrainedModel]) -> None:
    backend = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>", "</s>", "<pad>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    make: Any = PreTrainedTokenizerFast
    adds_bos = make(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    adds_bos.chat_template = "{{ bos_token }}{% for message in messages %}{{ message.content }} {% endfor %}"
    assert adds_bos("a b")["input_ids"] == [1, 3, 4]
    model = ChatModel(scripted("apple"), adds_bos, stop_ids=[2])
    assert model.encode([{"role": "user", "content": "a b"}]) == [1, 3, 4]


def test_greedy_takes_no_notice_of_the_models_own_sampling(
    scripted: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerBase
) -> None:
    model = scripted("apple bird cat")
    assert model.generation_config is not None
    for key, value in {"do_sample": True, "temperature": 90.0, "top_p": 0.9, "top_k": 700}.items():
        setattr(model.generation_config, key, value)
    assert generate(ChatModel(model, tokenizer, stop_ids=[2]), []).text == "apple bird cat"


def test_drawing_is_repeated_by_the_seed(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    random = ChatModel(model, tokenizer, stop_ids=[2])

    def draw(seed: int) -> str:
        random.seed(seed)
        return generate(random, [], temperature=1.0, tokens=12).text

    assert draw(1) == draw(1) != draw(2)


def test_drawing_is_from_every_token_unless_the_model_says_otherwise(
    scripted: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerBase
) -> None:
    model = scripted("apple")
    chat = ChatModel(model, tokenizer, stop_ids=[2])
    drawn = chat._settings(Sampling(max_new_tokens=5, temperature=0.7, seed=0))
    assert (drawn.do_sample, drawn.temperature, drawn.top_k, drawn.top_p) == (True, 0.7, 0, 1.0)
    assert model.generation_config is not None
    model.generation_config.top_k, model.generation_config.top_p = 20, 0.8
    drawn = chat._settings(Sampling(max_new_tokens=5, temperature=0.7, seed=0))
    assert (drawn.top_k, drawn.top_p) == (20, 0.8)


def test_the_context_is_the_models_or_else_the_tokenizers(
    scripted: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = scripted("apple", context=77)
    assert ChatModel(model, tokenizer, stop_ids=[2]).context_tokens == 77
    monkeypatch.setattr(model, "config", PretrainedConfig())  # of an architecture that has no such limit
    assert ChatModel(model, tokenizer, stop_ids=[2]).context_tokens == tokenizer.model_max_length == 1024
    monkeypatch.setattr(tokenizer, "model_max_length", int(1e30))
    assert ChatModel(model, tokenizer, stop_ids=[2]).context_tokens == 2048


def test_a_template_that_refuses_is_an_error_in_words(chat_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    model = chat_model("apple")
    monkeypatch.setattr(model._renderer, "_template", "{{ raise_exception('no system turns here') }}")
    with pytest.raises(DataError, match=r"refuses this conversation.*no system turns here"):
        model.encode(QUESTION)


def test_running_out_of_gpu_memory_is_an_error_in_words(chat_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate")

    model = chat_model("apple")
    monkeypatch.setattr(model._model, "generate", fail)
    with pytest.raises(DoesNotFitError, match=r"ran out of memory on a conversation of \d+ tokens.*--max-new-tokens"):
        generate(model, [])
