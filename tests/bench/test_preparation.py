"""The parts of the preparation benchmark that can be worked out by hand: the data it makes, and its sums."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import preparation_data
from preparation import field_mib, hash_documents, summarize, tree
from preparation_data import Writer, cut_into_turns, draw_lengths, make_words


def test_words_are_distinct_and_always_the_same() -> None:
    words = make_words(500)
    assert len(set(words)) == len(words) == 500
    assert words == make_words(500)
    assert sum(map(str.isdigit, words)) > 5


def test_lengths_are_those_of_the_goal() -> None:
    lengths = draw_lengths(np.random.default_rng(0), 50_000)
    assert (lengths.min(), lengths.max()) == (16, 4096)
    assert 470 < lengths.mean() < 500  # of lognormal(5.8, 0.9), 495, a little is clipped
    assert 320 < np.median(lengths) < 340  # e to the 5.8 is 330


def test_turns_add_up_to_the_length() -> None:
    # 333 words are three pairs; six turns' frames leave 470 tokens, 313 words of 1.5: 104 a pair, three tenths asked
    assert cut_into_turns(500, 1.5) == [31, 73, 31, 73, 31, 74]
    for num_tokens in (16, 100, 500, 4096):
        turns = cut_into_turns(num_tokens, 1.25)
        assert len(turns) % 2 == 0
        assert min(turns) >= 1
        assert abs(sum(turns) * 1.25 + 5 * len(turns) - num_tokens) <= 5


def test_a_conversation_depends_on_its_number_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation_data, "NUM_WORDS", 400)
    monkeypatch.setattr(preparation_data, "make_words", lambda: make_words(400))
    monkeypatch.setattr(preparation_data, "_CHUNK", 20)
    few, many = list(Writer(1.4).conversations(5)), list(islice(Writer(1.4).conversations(30), 25))
    assert few == many[:5]
    assert [turn["role"] for turn in few[0][:2]] == ["user", "assistant"]
    assert len({str(one) for one in many}) == 25


def test_a_conversation_with_tools_has_the_same_words() -> None:
    messages = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d e f g h i"}]
    record = preparation_data.with_tools(messages)
    call, result, answer = record["messages"][1:]
    arguments = json.loads(call["tool_calls"][0]["function"]["arguments"])
    assert (arguments, result["content"], answer["content"]) == ({"query": "c d", "limit": 2}, "e f", "g h i")
    assert len(record["tools"]) == 3


def test_a_tree_of_processes_has_its_children() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert {os.getpid(), child.pid} <= set(tree(os.getpid()))
    finally:
        child.communicate(b"\n", timeout=60)


def test_a_field_of_memory_is_read_by_its_whole_name() -> None:
    text = "55d0-7ffd ---p 00000000 00:00 0 [rollup]\nRss: 9000 kB\nPss:    2048 kB\nPss_Anon:  512 kB\n"
    assert field_mib(text, "Pss") == 2.0
    assert field_mib(text, "Pss_Anon") == 0.5
    assert field_mib(text, "Swap") == 0.0


def test_the_first_label_alone_does_not_count_in_the_comparison() -> None:
    one = hash_documents([([1, 2], [-100, 2])])
    assert one == hash_documents([([1, 2], [1, 2])])
    assert one != hash_documents([([1, 2], [-100, -100])])


def test_ratios_are_of_pairs_that_ran_one_after_the_other() -> None:
    def line(method: str, seconds: float, ids: str = "a") -> dict[str, object]:
        return {"method": method, "samples": 10, "prepare_s": seconds, "cpu_s": 2 * seconds, "ids": ids, "tokens": 7}

    lines = [line("tunebook", 1.0), line("trl", 4.0), line("tunebook", 2.0), line("trl", 4.0)]
    (found,) = summarize([*lines, line("tunebook", 9.0)])
    assert (found["compared_with"], found["prepare_s_ratios"], found["prepare_s_ratio"]) == ("trl", [4.0, 2.0], 3.0)
    assert found["same_ids"] is True
    assert summarize([line("tunebook", 1.0), line("trl", 4.0, ids="b")])[0]["same_ids"] is False
    assert summarize(lines[:1]) == []
