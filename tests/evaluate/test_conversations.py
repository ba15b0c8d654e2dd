from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from tunebook.errors import DataError
from tunebook.evaluate.harness import render_conversations
from tunebook.model.tokenizer_files import read_chat_template


def write(folder: Path, *records: object) -> Path:
    file = folder / "held.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def sharegpt(*turns: tuple[str, str], **more: str) -> dict[str, object]:
    return {"conversations": [{"from": who, "value": text} for who, text in turns], **more}


def test_only_the_last_turn_is_the_answer(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    turns = ("human", "Reverse: a b"), ("gpt", "b a"), ("human", "And: c d"), ("gpt", "d c")
    items = render_conversations(write(tmp_path, sharegpt(*turns, task="again")), None, tokenizer)
    prompt = (
        "<|im_start|>user\nReverse: a b<|im_end|>\n<|im_start|>assistant\nb a<|im_end|>\n"
        "<|im_start|>user\nAnd: c d<|im_end|>\n<|im_start|>assistant\n"
    )
    assert items == [{"prompt": prompt, "answer": "d c", "task": "again"}]


def test_the_runs_system_prompt_goes_before_conversations_without_one(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    own = sharegpt(("system", "Shout."), ("human", "hi"), ("gpt", "HI"))
    none = sharegpt(("human", "hi"), ("gpt", "hi"))
    first, second = render_conversations(write(tmp_path, own, none), "Be brief.", tokenizer)
    assert first["prompt"].startswith("<|im_start|>system\nShout.<|im_end|>\n<|im_start|>user\nhi")
    assert second["prompt"].startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi")
    assert (first["task"], second["answer"]) == ("all", "hi")


def test_every_bad_line_is_reported(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    good = sharegpt(("human", "hi"), ("gpt", "hello"))
    unanswered = sharegpt(("human", "hi"), ("gpt", "hello"), ("human", "and?"))
    with pytest.raises(DataError) as raised:
        render_conversations(write(tmp_path, good, unanswered, {"text": "no conversation"}), None, tokenizer)
    assert "line 2: " in raised.value.message and "line 3: " in raised.value.message


def test_a_call_of_a_tool_is_expected_as_json(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer = deepcopy(tokenizer)
    tokenizer.chat_template = read_chat_template("trl:qwen2_5_training")
    call = '{"name": "weather", "arguments": {"city": "Rome"}}'
    tools = '[{"name": "weather", "description": "of a city", "parameters": {}}]'
    record = sharegpt(("human", "Rain in Rome?"), ("function_call", call), tools=tools)
    (item,) = render_conversations(write(tmp_path, record), None, tokenizer)
    assert json.loads(item["answer"]) == [json.loads(call)]
    assert item["prompt"].endswith("Rain in Rome?<|im_end|>\n<|im_start|>assistant\n")
    assert "of a city" in item["prompt"]
