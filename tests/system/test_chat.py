"""`tunebook chat` with the quickstart's model: one answer for scripts. tests/evaluate has the conversations."""

from __future__ import annotations

import json

import pytest


@pytest.fixture(scope="session")
def evaluated(quickstart) -> list[dict[str, str]]:
    """Two held-out questions of each kind of task, with the answers that the evaluation after training got."""
    begin, end = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    chosen: dict[str, list[dict[str, str]]] = {}
    for line in (quickstart.folder / "evaluation" / "after-answers.jsonl").read_text().splitlines():
        answer = json.loads(line)
        question = answer["prompt"].removeprefix(begin).removesuffix(end)
        if "<|im_start|>" not in question:  # one that is no conversation of several turns
            chosen.setdefault(answer["group"], []).append({"question": question, "answer": answer["answer"]})
    return [one for group in chosen.values() for one in group[:2]]


def test_one_answer_for_a_prompt_and_nothing_else(quickstart, evaluated, run):
    for one in evaluated[:2]:
        ended = run(["tunebook", "chat", str(quickstart.folder), one["question"]])
        assert (ended.exit_code, ended.output) == (0, one["answer"].strip() + "\n")  # both streams


def test_a_recipe_means_its_newest_run_and_a_pipe_one_question(quickstart, evaluated, run):
    chat = f"tunebook chat quickstart --outputs {quickstart.outputs} 2>/dev/null"
    ended = run(["bash", "-c", f"printf '%s\\n' '{evaluated[0]['question']}' | {chat}"])
    assert (ended.exit_code, ended.output) == (0, evaluated[0]["answer"].strip() + "\n")
