"""A small model learns two programs by heart: nothing passes before training, both do after, in a real sandbox."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import yaml

from tunebook.evaluate.code.code_task import FOLDER

NUM_PROBLEMS = 2


@pytest.fixture(scope="module")
def bubblewrap():
    if shutil.which("bwrap") is None:
        reason = "no bubblewrap on this machine: apt install bubblewrap"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture
def task(tmp_path):
    """The shipped problems in a task file of a user's own, which is more patient with a busy machine."""
    code = {"program": "prompt_and_answer_to_fence", "time_limit_s": 60, "problems": str(FOLDER / "small_python.jsonl")}
    settings = {"include": str(FOLDER / "small_python_instruct.yaml"), "metadata": {"version": 1.0, "code": code}}
    settings["generation_kwargs"] = {"until": ["```"], "max_gen_toks": 128, "do_sample": False}
    file = tmp_path / "patient.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


@pytest.fixture
def conversations(tmp_path):
    """The first problems with their solutions, as the task asks for them."""
    asked = yaml.safe_load((FOLDER / "small_python_instruct.yaml").read_text())
    lines = []
    for line in (FOLDER / "small_python.jsonl").read_text().splitlines()[:NUM_PROBLEMS]:
        problem = json.loads(line)
        question, begun = (
            asked[key].replace("{{ prompt }}", problem["prompt"]) for key in ("doc_to_text", "gen_prefix")
        )
        turns = [{"role": "user", "content": question}]
        turns += [{"role": "assistant", "content": f"{begun}{problem['canonical_solution']}```"}]
        lines += [json.dumps({"messages": turns})] * 8
    file = tmp_path / "solutions.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


def test_what_was_learned_by_heart_passes(run, bubblewrap, task, conversations, tmp_path):
    settings = [
        *["dataset=file", f"dataset.path={conversations}", "training.max_length=512", "packing=padded"],
        *["packing.row_length=null", f"training.global_samples={NUM_PROBLEMS}", "training.max_steps=80"],
        *["schedule.warmup_steps=5", "evaluation=code", f"evaluation.tasks=[{task}]", "evaluation.before=true"],
        *[f"evaluation.limit={NUM_PROBLEMS}", f"outputs={tmp_path}"],
    ]
    # Whatever service runs on this machine is not this test's.
    trained = run(["tunebook", "train", "quickstart", *settings], timeout_s=900, TUNEBOOK_HANDOVER="/nonexistent")
    assert trained.exit_code == 0, trained.output
    assert "small_python_instruct (pass@1)" in trained.output
    folder = (tmp_path / "quickstart" / "latest").resolve()
    before, after = (json.loads((folder / "evaluation" / f"{when}.json").read_text()) for when in ("before", "after"))
    assert before["tasks"]["small_python_instruct"]["value"] == 0.0
    assert after["tasks"]["small_python_instruct"]["value"] == 1.0
    assert after["code"]["tasks"]["small_python_instruct"]["statuses"] == {"passed": NUM_PROBLEMS}
    execution = after["code"]["execution"]
    assert execution["backend"] == "bubblewrap"
    samples = [json.loads(line) for line in (folder / "evaluation" / after["code"]["samples"]).read_text().splitlines()]
    assert [sample["status"] for sample in samples] == ["passed"] * NUM_PROBLEMS
    assert samples[1]["program"].startswith("def running_total(")
    assert "in bubblewrap with" in (folder / "report.html").read_text()

    settings = yaml.safe_load(task.read_text()) | {"repeats": 2}
    settings["generation_kwargs"] |= {"do_sample": True, "temperature": 0.01}
    settings["metadata"]["code"]["pass_at_k"] = [1, 2]
    task.write_text(yaml.safe_dump(settings))
    command = ["tunebook", "eval", f"run={folder}", f"tasks={task}", f"--limit={NUM_PROBLEMS}"]
    evaluated = run(command, timeout_s=600, TUNEBOOK_HANDOVER="/nonexistent")
    assert evaluated.exit_code == 0, evaluated.output
    (file,) = (file for file in (folder / "evaluation").glob("eval-*.json"))
    found = json.loads(file.read_text())["code"]["tasks"]["small_python_instruct"]
    assert found["num_samples"] == 2
    assert {k: score["value"] for k, score in found["pass_at_k"].items()} == {"pass@1": 1.0, "pass@2": 1.0}
