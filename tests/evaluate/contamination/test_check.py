"""The whole check, as the worker process does it, on files and tasks on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tunebook.config.choices import Contamination, Format
from tunebook.config.schema import RunConfig
from tunebook.errors import DataError
from tunebook.evaluate import worker
from tunebook.evaluate.contamination import check as check_module
from tunebook.evaluate.contamination.check import check_evaluated
from tunebook.evaluate.contamination.result import from_ranges
from tunebook.evaluate.harness import LoadedTask
from tunebook.evaluate.task_files import Task
from tunebook.record.contamination import is_checked, refuse_contaminated

pytestmark = pytest.mark.usefixtures("quiet_harness")
MakeRun = Callable[..., tuple[Path, RunConfig]]
KINDS = ("exact", "overlapping", "shared_passage", "clean")


def check(run: Path) -> dict[str, Any]:
    assert worker.main(["--run", str(run), "--when", "contamination"]) == 0
    found: dict[str, Any] = json.loads((run / "contamination.json").read_text())
    return found


def counts(group: dict[str, Any]) -> list[int]:
    return [group[f"num_{kind}"] for kind in KINDS]


def test_a_file_that_also_holds_the_dev_questions(
    passages: Any, checked_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    file = passages.write("combined.jsonl", [*passages.train, *passages.dev])
    run, config = checked_run(file, [passages.task])
    found = check(run)
    assert counts(found["groups"]["passages"]) == [60, 0, 0, 0]
    assert from_ranges(found["groups"]["passages"]["items"]["exact"]) == set(range(60))
    first = found["groups"]["passages"]["examples"][0]
    assert (first["item"], first["document"], first["kind"]) == (0, "combined.jsonl:201", "exact")
    assert first["text"].startswith(passages.dev[0]["question"])
    assert "warning: contamination: passages: 60 of 60 items (100.0%)" in capsys.readouterr().err
    assert is_checked(run, config)
    assert list(run.glob(".*")) == []
    (kept,) = (passages.folder / "cache" / "contamination").iterdir()
    assert kept.suffix == ".json", "temporary files are removed"


@pytest.mark.parametrize("is_possible", [True, False], ids=["checked", "failed"])
def test_the_evaluation_before_a_training_checks_once_and_goes_on(
    passages: Any,
    checked_run: MakeRun,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_possible: bool,
) -> None:
    file = passages.write("combined.jsonl", [*passages.train, *passages.dev])
    run, config = checked_run(file, [passages.task], before=True)
    evaluated: list[str] = []
    monkeypatch.setattr(worker, "_with_placement", lambda evaluation, _: evaluation)
    monkeypatch.setattr(worker, "evaluate", lambda evaluation, _: evaluated.append(evaluation.when))
    if not is_possible:
        monkeypatch.setattr(check_module, "_search_documents", lambda *_: {}["a fault of ours"])
    assert worker.main(["--run", str(run), "--when", "before"]) == 0
    assert worker.main(["--run", str(run), "--when", "after-all"]) == 0
    printed = capsys.readouterr().err
    assert is_checked(run, config) is is_possible
    assert printed.count("60 of 60 items") == is_possible
    assert ("KeyError: 'a fault of ours'" in printed) is not is_possible
    assert printed.count("warning: the training documents were not compared with the evaluation") == (not is_possible)
    assert worker.main(["--run", str(run), "--when", "before"]) == 0
    assert capsys.readouterr().err.count("60 of 60 items") == 0, "an earlier attempt has checked"
    assert evaluated == ["before", "after-all", "before"]


def test_the_same_search_is_not_repeated(passages: Any, checked_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    file = passages.write("combined.jsonl", [*passages.train, *passages.dev])
    run, _ = checked_run(file, [passages.task])
    first = check(run)
    read = []
    whole = check_module._search_documents
    monkeypatch.setattr(check_module, "_search_documents", lambda *each: read.append(1) or whole(*each))
    (run / "contamination.json").unlink()
    again = check(run)
    assert not read
    assert again["groups"] == first["groups"] and again["num_documents"] == first["num_documents"] > 0
    passages.write("combined.jsonl", [*passages.train, *passages.dev[:30]])
    run, _ = checked_run(file, [passages.task])
    assert counts(check(run)["groups"]["passages"])[0] == 30 and read


def test_a_file_of_train_questions_shares_only_passages(
    passages: Any, checked_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = checked_run(passages.write("train.jsonl", passages.train), [passages.task])
    found = check(run)
    assert counts(found["groups"]["passages"]) == [0, 0, 12, 48]
    assert found["num_documents"] == 200
    said = capsys.readouterr().err
    assert (
        "contamination: passages: 0 of 60 items have their whole question in the training documents, 12 (20.0%)" in said
    )
    assert "warning" not in said


def test_only_the_items_that_are_evaluated_are_looked_for(passages: Any, checked_run: MakeRun) -> None:
    run, config = checked_run(passages.write("train.jsonl", passages.dev[5:]), [passages.task], limit=10)
    assert counts(check(run)["groups"]["passages"]) == [5, 0, 0, 5]
    config.evaluation.limit = 20
    assert not is_checked(run, config)


def test_a_validation_part_that_was_cut_off_by_share_has_near_copies_in_the_rest(
    passages: Any, checked_run: MakeRun, tmp_path: Path
) -> None:
    """Equal documents stay in one part; those with another answer, or other white space, do not."""
    file = passages.write("twice.jsonl", passages.train)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        row["messages"][0]["content"] = row["messages"][0]["content"].replace(" ", "  ").lower()
    with file.open("a") as end:
        end.writelines(json.dumps(row) + "\n" for row in rows)
    run, _ = checked_run(file, validation_share=0.1)
    found = check(run)
    assert list(found["groups"]) == ["validation part"]
    group = found["groups"]["validation part"]
    assert group["num_items"] > 20
    assert group["num_exact"] > 0.7 * group["num_items"], "the copy of a held-out document is mostly trained on"
    assert group["num_exact"] + group["num_clean"] == group["num_items"]


def test_documents_of_tokens_are_decoded(checked_run: MakeRun, tokenizer: Any, tmp_path: Path) -> None:
    texts = [
        "Reverse the order: rain key chair lamp boat horse frog bread apple door cat leaf",
        "Say the contrary: full hot",
    ]
    file = tmp_path / "tokens.jsonl"
    ids = [tokenizer(text)["input_ids"] for text in texts]
    file.write_text("".join(json.dumps({"input_ids": one, "labels": one}) + "\n" for one in ids))
    held = tmp_path / "held.jsonl"
    held.write_text(file.read_text().splitlines()[0] + "\n")
    run, _ = checked_run(file, validation_path=str(held), format=Format.pretokenized)
    assert counts(check(run)["groups"]["validation part"]) == [1, 0, 0, 0]


def test_documents_that_are_gone_or_others_are_reported(
    passages: Any, checked_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    file = passages.write("train.jsonl", passages.train)
    run, config = checked_run(file, [passages.task], contamination=Contamination.refuse)
    records = [{"location": str(file), "sha256": "0" * 64, "revision": None}]
    (run / "manifest.json").write_text(json.dumps({"format": 1, "dataset": {"records": records, "fingerprint": "f"}}))
    assert check(run)["not_checked"].startswith(f"{file}: not as it was when the run was trained")
    file.unlink()
    found = check(run)
    assert "train.jsonl" in found["not_checked"]
    assert found["groups"] == {}
    assert "warning: contamination: not checked: " in capsys.readouterr().err
    assert not is_checked(run, config)
    with pytest.raises(DataError, match="could not be compared") as error:
        refuse_contaminated(run, config)
    assert error.value.problem_id == "contamination-not-checked"


def test_a_later_evaluation_of_the_same_items_reads_no_documents(
    passages: Any, checked_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tunebook.evaluate.contamination import check as module

    run, config = checked_run(passages.write("train.jsonl", passages.dev[:9]), [passages.task])
    before = check(run)
    loaded = load(passages.task)
    monkeypatch.setattr(module, "_search", lambda *_, **__: pytest.fail("documents were read"))
    found = check_evaluated(run, config, loaded, None)
    assert found is not None
    assert found["groups"] == before["groups"]
    config.evaluation.contamination = Contamination.disabled
    assert check_evaluated(run, config, loaded, None) is None


def test_an_evaluation_of_another_task_is_checked_then(passages: Any, checked_run: MakeRun) -> None:
    run, config = checked_run(passages.write("train.jsonl", passages.dev[:9]))
    found = check_evaluated(run, config, load(passages.task), None)
    assert found is not None
    assert counts(found["groups"]["passages"]) == [9, 0, 0, 51]
    assert json.loads((run / "contamination.json").read_text())["groups"] == found["groups"]
    Path(str(config.dataset.path)).unlink()
    again = check_evaluated(run, config, load(passages.task), None)
    assert again is not None
    assert again["groups"] == found["groups"]
    fewer = check_evaluated(run, config, load(passages.task), 10)
    assert fewer is not None
    assert "train.jsonl" in fewer["not_checked"]


def load(task: Path) -> dict[str, LoadedTask]:
    from lm_eval.tasks import TaskManager

    found = TaskManager(include_defaults=False).load([str(task)])["tasks"]
    return {
        name: LoadedTask(name=name, task=one, source=Task(name=name), source_sha256=None) for name, one in found.items()
    }


def test_a_model_without_a_run_has_no_documents(cpu_config: RunConfig, tmp_path: Path) -> None:
    assert check_evaluated(tmp_path, cpu_config, {}, None) is None
