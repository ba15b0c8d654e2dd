"""The digits' inputs: the shipped model folder, the images, and the questions on them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tunebook.config.book import book_root

RECIPE = book_root() / "recipes" / "digits"


@pytest.fixture(scope="module")
def digits(load_module: Callable[[Path], ModuleType]) -> ModuleType:
    """The script that draws."""
    return load_module(RECIPE / "make_inputs.py")


def test_the_shipped_model_folder_is_what_the_script_writes(digits: ModuleType, tmp_path: Path) -> None:
    digits.write_model(tmp_path)
    shipped = {file.name: file.read_bytes() for file in (RECIPE / "model").iterdir()}
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == shipped


def test_the_questions_on_an_image(digits: ModuleType) -> None:
    assert digits.questions(47, ["red", "blue"]) == [
        ("Which number is this?", "47"),
        ("Which digit is larger?", "7"),
        ("Which colors are there?", "red blue"),
    ]


def test_each_digit_has_its_half_and_its_color(digits: ModuleType) -> None:
    image = digits.draw(8, ["red", "blue"], random.Random(0))
    halves = [image.crop((left, 0, left + digits.SIDE // 2, digits.SIDE)) for left in (0, digits.SIDE // 2)]
    for half, color in zip(halves, ("red", "blue"), strict=True):
        drawn = {pixel for _, pixel in half.getcolors() if max(pixel) > 100}  # the rest is black and edges
        assert {max(range(3), key=pixel.__getitem__) for pixel in drawn} == {("red", "green", "blue").index(color)}


def test_no_image_to_train_on_shows_a_held_out_number(digits: ModuleType, tmp_path: Path) -> None:
    digits.write_data(tmp_path, num_train=300, num_heldout=100)
    numbers = {}
    for name in ("train", "heldout"):
        documents = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert all((tmp_path / document["images"][0]).is_file() for document in documents)
        turns = [turn for document in documents for turn in document["messages"]]
        asked = [answer["content"] for question, answer in zip(turns[::2], turns[1::2], strict=True)
                 if "number" in question["content"]]  # fmt: skip
        numbers[name] = {int(number) for number in asked}
    assert numbers["heldout"] and numbers["train"] and not numbers["heldout"] & numbers["train"]
    held_out = [number for number in range(100) if digits.is_heldout(number)]
    assert len(held_out) == 20 and numbers["heldout"] <= {*held_out}
    assert {number // 10 for number in held_out} == {number % 10 for number in held_out} == {*range(10)}
