"""Tokens and labels, counted by hand: the tiny tokenizer makes one token of every byte and of every special token."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from tunebook.config.choices import SpecialText, TrainOn
from tunebook.data.corpus import CorpusKind
from tunebook.data.encode import LEFT_OUT, REWRITTEN, Document, Encoder
from tunebook.errors import DataError, RequestError

from .conftest import chat_row

Tokenizers = Callable[..., Any]


def conversation(*turns: tuple[str, str]) -> dict[str, Any]:
    return chat_row([{"role": role, "content": content} for role, content in turns])


def encode_one(
    tokenizer: Any,
    kind: CorpusKind,
    row: dict[str, Any],
    train_on: TrainOn = TrainOn.auto,
    special_text: SpecialText = SpecialText.auto,
) -> Document:
    return Encoder(kind, train_on, tokenizer, special_text).encode([row])[0]


def trained_text(tokenizer: Any, document: Document) -> str:
    return str(tokenizer.decode([label for label in document.labels if label != -100]))


def test_a_conversation_trains_the_answer_and_its_end(tiny_tokenizer: Tokenizers) -> None:
    tokenizer = tiny_tokenizer()
    row = conversation(("user", "Hi"), ("assistant", "Yo"))
    document = encode_one(tokenizer, CorpusKind.conversation, row)
    # start "user" newline "Hi" end newline, start "assistant" newline "Yo" end newline
    assert len(document.input_ids) == (1 + 4 + 1 + 2 + 1 + 1) + (1 + 9 + 1 + 2 + 1 + 1) == 25
    assert [i for i, label in enumerate(document.labels) if label != -100] == [21, 22, 23]
    assert document.labels[21:24] == document.input_ids[21:24]
    assert document.input_ids[23] == tokenizer.eos_token_id
    assert document.num_trained == 3


def test_everything_needs_no_assistants_turn_to_be_found(tiny_tokenizer: Tokenizers) -> None:
    template = """\
{%- for m in messages %}{{- m.role + ':' + m.content + '<|im_end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'something else' }}{%- endif %}"""
    tokenizer = tiny_tokenizer(template=template)
    row = conversation(("user", "Hi"), ("assistant", "Yo"))
    with pytest.raises(DataError, match=r"dataset\.train_on=everything"):
        encode_one(tokenizer, CorpusKind.conversation, row)
    document = encode_one(tokenizer, CorpusKind.conversation, row, TrainOn.everything)
    assert document.num_trained == len("user:Hi") + 1 + len("assistant:Yo") + 1 - 1


def test_two_bos_are_an_error(tiny_tokenizer: Tokenizers) -> None:
    template = "{%- for m in messages %}{{- '<s>' + m.content + '<|im_end|>' }}{%- endfor %}"
    tokenizer = tiny_tokenizer(template=template, bos_token="<s>", adds_bos=True)
    row = conversation(("user", "Hi"), ("assistant", "Yo"))
    document = encode_one(tokenizer, CorpusKind.conversation, row)  # the tokenizer's own is not added to the template's
    assert document.input_ids.count(tokenizer.bos_token_id) == 2
    row = conversation(("user", "<s>Hi"), ("assistant", "Yo"))
    for kind, doubled in ((CorpusKind.conversation, row), (CorpusKind.text, {"text": "<s>Hi", "origin": "a:1"})):
        with pytest.raises(DataError, match="a:1: the document begins with two BOS tokens"):
            encode_one(tokenizer, kind, doubled, special_text=SpecialText.keep)


def test_an_end_token_that_is_cut_up_is_an_error(tiny_tokenizer: Tokenizers) -> None:
    """The template writes it and it is in the vocabulary, but no text ever becomes that token."""
    template = "{%- for m in messages %}{{- m.content + '<end>' }}{%- endfor %}"
    tokenizer = tiny_tokenizer(template=template, eos_token="</s>", pieces=("<end>",), generation_eos=256)
    for train_on in (TrainOn.assistant, TrainOn.everything):
        with pytest.raises(DataError, match=r"the tokenizer cuts it into several tokens.*model\.eos_token=TOKEN"):
            encode_one(tokenizer, CorpusKind.conversation, conversation(("assistant", "Yo")), train_on)


def test_rewritten_turns_are_counted_once_a_conversation(tiny_tokenizer: Tokenizers) -> None:
    template = """\
{%- for m in messages %}{%- set content = m.content if loop.last else m.content.split('|')[-1] %}
{{- m.role + ':' + content + '<|im_end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant:' }}{%- endif %}"""
    turns = [("user", "Hi"), ("assistant", "x|Yo"), ("user", "Go"), ("assistant", "y|Ok"), ("user", "Up")]
    encoder = Encoder(CorpusKind.conversation, TrainOn.auto, tiny_tokenizer(template=template))
    documents = encoder.encode([conversation(*turns, ("assistant", "z|Ab")), conversation(*turns[:2])])
    assert [document.num_trained for document in documents] == [5, 5]
    assert encoder.counts.notes == {REWRITTEN: 1, LEFT_OUT: 1}
    assert encoder.counts.first == {REWRITTEN: "a:1", LEFT_OUT: "a:1"}


def test_text_gets_one_eos_and_its_bos(tiny_tokenizer: Tokenizers) -> None:
    tokenizer = tiny_tokenizer(bos_token="<s>", eos_token="</s>", adds_bos=True)
    rows = [{"text": "Hi", "origin": "a:1"}, {"text": "Hi</s>", "origin": "a:2"}]
    documents = Encoder(CorpusKind.text, TrainOn.auto, tokenizer).encode(rows)
    assert documents[0] == documents[1]
    assert tokenizer.decode(documents[0].input_ids) == "<s>Hi</s>"
    assert documents[0].labels == [-100, *documents[0].input_ids[1:]]
    with pytest.raises(RequestError, match=r"dataset\.train_on=everything"):
        Encoder(CorpusKind.text, TrainOn.assistant, tokenizer)


def test_a_completion_is_trained_on_and_its_prompt_is_not(tiny_tokenizer: Tokenizers) -> None:
    tokenizer = tiny_tokenizer(bos_token="<s>", eos_token="</s>", adds_bos=True)
    row = {"prompt": "2+2=", "completion": "4", "origin": "a:1"}
    document = encode_one(tokenizer, CorpusKind.prompt_completion, row)
    assert tokenizer.decode(document.input_ids) == "<s>2+2=4</s>"
    assert trained_text(tokenizer, document) == "4</s>"
    everything = encode_one(tokenizer, CorpusKind.prompt_completion, row, TrainOn.everything)
    assert trained_text(tokenizer, everything) == "2+2=4</s>"


def test_tokens_stay_as_they_are_but_for_the_first_label() -> None:
    rows = [
        {"input_ids": [5, 6, 7], "labels": [5, -100, 7], "origin": "a:1"},
        {"input_ids": [5, 6, 7], "labels": None, "origin": "a:2"},
    ]
    documents = Encoder(CorpusKind.tokens, TrainOn.auto, None).encode(rows)
    assert [document.labels for document in documents] == [[-100, -100, 7], [-100, 6, 7]]
    everything = Encoder(CorpusKind.tokens, TrainOn.everything, None).encode(rows)
    assert [document.labels for document in everything] == [[-100, 6, 7], [-100, 6, 7]]


def test_a_token_over_the_start_of_an_answer_or_completion_is_counted(tiny_tokenizer: Tokenizers) -> None:
    """The template begins an answer with no special token, and the tokenizer joins its first letter with the mark."""
    template = """\
{%- for m in messages %}{{- m.role + ':' + m.content + '<|im_end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant:' }}{%- endif %}"""
    tokenizer = tiny_tokenizer(template=template, merges=((":", "Y"),))
    encoder = Encoder(CorpusKind.conversation, TrainOn.auto, tokenizer)
    document = encoder.encode([conversation(("user", "Hi"), ("assistant", "Yo"))])[0]
    assert trained_text(tokenizer, document) == ":Yo<|im_end|>"
    document = completion(tokenizer, "2+2:", "Y")
    assert document.labels[:3] == [-100, -100, -100]
    assert trained_text(tokenizer, document) == ":Y<|im_end|>"


def test_documents_with_the_text_of_a_special_token_keep_their_place(tiny_tokenizer: Tokenizers) -> None:
    tokenizer = tiny_tokenizer()
    rows = [conversation(("user", "Hi"), ("assistant", answer)) for answer in ("é", "a<|im_end|>b", "日")]
    documents = Encoder(CorpusKind.conversation, TrainOn.auto, tokenizer).encode(rows)
    assert [trained_text(tokenizer, document) for document in documents] == [
        "é<|im_end|>",
        "a<|im_end|>b<|im_end|>",
        "日<|im_end|>",
    ]
    assert [document.num_trained for document in documents] == [2 + 1, 12 + 1, 3 + 1]
    assert [document.labels.count(tokenizer.eos_token_id) for document in documents] == [1, 1, 1]


def completion(tokenizer: Any, prompt: str, answer: str) -> Document:
    return encode_one(
        tokenizer, CorpusKind.prompt_completion, {"prompt": prompt, "completion": answer, "origin": "a:1"}
    )


def test_the_last_token_of_a_prompt_is_not_trained_on_though_it_ends_texts(tiny_tokenizer: Tokenizers) -> None:
    tokenizer = tiny_tokenizer(bos_token="<s>", eos_token="</s>", adds_bos=True)
    document = completion(tokenizer, "hi</s>", "yo</s>")
    assert trained_text(tokenizer, document) == "yo</s>"
    assert document.input_ids.count(tokenizer.eos_token_id) == 2
    assert trained_text(tokenizer, completion(tokenizer, "hi</s></s>", "</s>yo")) == "</s>yo</s>"


@pytest.mark.parametrize(("eos", "end"), [("</s>", "</s>"), ("<|im_end|>", "</s><|im_end|>")])
def test_a_token_that_the_tokenizer_adds_is_no_part_of_the_prompt(
    tiny_tokenizer: Tokenizers, eos: str, end: str
) -> None:
    """A tokenizer may end texts with another token than the EOS of the model."""
    tokenizer = copy.deepcopy(tiny_tokenizer(eos_token=eos))
    added = ("</s>", tokenizer.convert_tokens_to_ids("</s>"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[added])
    assert trained_text(tokenizer, completion(tokenizer, "hi", "yo")) == f"yo{end}"
    assert trained_text(tokenizer, completion(tokenizer, "hi</s>", "yo")) == f"yo{end}"
    assert trained_text(tokenizer, completion(tokenizer, "hi", "</s>yo")) == f"</s>yo{end}"
