"""The benchmark of short runs: its words, its documents, and what it reads out of a log."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import start_gpu

LOG = """step 1
V1125 guards.py:5396] [0/1] [__recompiles] Recompiling function _forward in blocks.py:54
V1125 guards.py:5396] [0/1] [__recompiles]     triggered by the following guard failure(s):
V1125 guards.py:5396] [0/1] [__recompiles]     - 0/0: GLOBAL_STATE changed: grad_mode
step 2
V1125 guards.py:5396] [0/2] [__recompiles] Recompiling function _forward in blocks.py:54
V1125 guards.py:5396] [0/2] [__recompiles]     triggered by the following guard failure(s):
V1125 guards.py:5396] [0/2] [__recompiles]     - 0/1: 4096 <= args[0].size()[1]
V1125 guards.py:5396] [0/2] [__recompiles]     - 0/0: GLOBAL_STATE changed: grad_mode
"""


def test_recompilations_are_counted_with_their_reasons():
    found = start_gpu.read_recompilations(LOG)
    first, second = found["recompilations"]
    assert found["num_recompilations"] == 2
    assert first == "0/0: GLOBAL_STATE changed: grad_mode; "
    assert second.startswith("0/1: 4096 <= args[0].size()[1]; ")


def test_documents_have_half_to_twice_the_mean_number_of_words(tmp_path):
    file = start_gpu.write_documents(tmp_path / "some.jsonl", 50, 40)
    counts = [
        sum(len(message["content"].split()) for message in json.loads(line)["messages"])
        for line in file.read_text().splitlines()
    ]
    assert len(counts) == 50
    assert 20 <= min(counts) < 30 < 60 < max(counts) <= 80


def test_overrides_come_last_and_random_weights_only_without_a_model():
    asked = start_gpu.parse(["training.max_length=64", "--compile", "auto", "--steps", "8", "--validation"])
    words = start_gpu.words_of(asked, "auto", Path("model"), Path("some.jsonl"), Path("out"))
    assert words[-1] == "training.max_length=64"
    assert {"model.weights=random", "training.evaluate_every_steps=2"} <= {*words}
    assert not [word for word in words if word.startswith("model.compile_layers")]
    asked = start_gpu.parse(["--model", "mine"])
    words = start_gpu.words_of(asked, "false", Path("mine"), Path("some.jsonl"), Path("out"))
    assert "model.compile_layers=false" in words
    assert "model.weights=random" not in words


@pytest.mark.parametrize("words", [["--steps", "0"], ["cold"], ["--caches", "hot"]])
def test_wrong_arguments_are_refused(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        start_gpu.parse(words)
    assert "usage:" in capsys.readouterr().err
