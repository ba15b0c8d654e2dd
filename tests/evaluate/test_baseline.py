from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tunebook.errors import RequestError
from tunebook.evaluate.baseline import score_baseline

TRAIN, HELDOUT = Path("train.jsonl"), Path("heldout.jsonl")


def write(folder: Path, text: str) -> Path:
    file = folder / "baseline.py"
    file.write_text(text)
    return file


def test_the_function_is_given_both_files_and_its_shares_are_kept(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_baseline.py").write_text("HALF = 0.5\n")
    file = write(
        tmp_path,
        "from neighbour_of_baseline import HALF\n"
        "NAME = 'guess'\n"
        "def score(train, heldout):\n"
        "    assert (train.name, heldout.name) == ('train.jsonl', 'heldout.jsonl')\n"
        "    return {'overall': HALF, 'b': 1, 'a': 0}\n",
    )
    path_before = list(sys.path)
    assert score_baseline(file, TRAIN, HELDOUT) == {
        "name": "guess",
        "value": 0.5,
        "groups": {"a": {"value": 0.0}, "b": {"value": 1.0}},
    }
    assert sys.path == path_before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("NAME = 'x'\n", r"does not define NAME and score"),
        ("def score(train, heldout): return {}\n", r"does not define NAME and score"),
        ("NAME = 'x'\ndef score(train, heldout): return {'a': 1}\n", r"a share under 'overall'; it returned a"),
    ],
)
def test_a_file_that_breaks_the_contract_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        score_baseline(write(tmp_path, text), TRAIN, HELDOUT)
