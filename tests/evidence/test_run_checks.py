"""Runs that resumed from another, lost a loss when they were killed, or were edited afterwards."""

from __future__ import annotations

import json
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tunebook.commands.record_evidence import record_evidence
from tunebook.commands.recorded_evidence import verify
from tunebook.commands.reproduce import reproduce_command
from tunebook.commands.verify import diff_command
from tunebook.errors import RequestError
from tunebook.evidence.gather import read_finished
from tunebook.evidence.run_checks import steps_text
from tunebook.evidence.verifying import claim_of_run, compare_run
from tunebook.files import sha256_file
from tunebook.record.manifest import RunState, finish_manifest

from .conftest import MakeRun, curve

EARLIER = [{"state": "running", "exit_code": None, "reason": None, "started": "x", "ended": None, "seconds": None}]


def relog(run: Path, steps: list[int], first: int = 0) -> Path:
    """Log only these steps, each with the steps since the previous one; the first with those since `first`."""
    seconds = int(run.name[-3:-1])  # no two runs take the same time
    lines = [
        {"step": step, "num_steps": step - before, "loss": curve()[step - 1], "seconds": seconds}
        for before, step in zip([first, *steps], steps, strict=False)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def change_manifest(run: Path, **changes: Any) -> Path:
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(manifest | changes))
    return run


def words_of_ten(make_run: MakeRun) -> Path:
    return make_run("training.log_every_steps=10")


# --- from another run


def test_run_resumed_from_another_is_no_evidence(make_run: MakeRun, recipes_dir: Path) -> None:
    halves = [relog(make_run(), [5, 6, 7, 8], first=4) for _ in range(2)]
    with pytest.raises(
        RequestError, match=r"this run resumed from step 4, which is in no line.*train from the first step"
    ):
        record_evidence([read_finished(half) for half in halves], "try", [])
    assert not (recipes_dir / "quickstart").exists()


def test_other_folder_of_a_checkpoint_is_found_in_the_command(make_run: MakeRun, recipes_dir: Path) -> None:
    theirs = make_run()
    named = [make_run(f"training.resume={theirs}/checkpoints/checkpoint-4") for _ in range(2)]
    with pytest.raises(RequestError, match=rf"this run resumed from {theirs}/checkpoints/checkpoint-4, so its command"):
        record_evidence([read_finished(run) for run in named], "try", [])


def test_run_resumed_from_another_is_not_reproduced(make_run: MakeRun, tmp_path: Path) -> None:
    console = Console(file=StringIO())
    with pytest.raises(RequestError, match="this run resumed from step 4"):
        reproduce_command(str(relog(make_run(), [5, 6, 7, 8], first=4)), tmp_path, [], console, dry_run=True)
    command = ["tunebook", "train", "quickstart", "training.resume=/other/checkpoints/checkpoint-4"]
    alone = tmp_path / "sent.json"
    alone.write_bytes((change_manifest(make_run(), command=command) / "manifest.json").read_bytes())
    with pytest.raises(RequestError, match="this run resumed from /other/checkpoints/checkpoint-4"):
        reproduce_command(str(alone), tmp_path, [], console, dry_run=True)


# --- killed and taken up again


def test_a_run_that_was_killed_is_compared_at_the_steps_that_it_has(make_run: MakeRun) -> None:
    whole = relog(words_of_ten(make_run), [10, 20, 30, 40, 50, 60])
    killed = relog(words_of_ten(make_run), [10, 20, 40, 50, 60])
    lines = [json.loads(line) for line in (killed / "metrics.jsonl").read_text().splitlines()]
    lines[2]["num_steps"] = 10
    lines.insert(2, {"step": 30, "num_steps": 5, "loss": 9.0})  # from the checkpoint of step 25: no whole window
    (killed / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    change_manifest(killed, earlier_attempts=EARLIER)
    for claim, found in ((whole, killed), (killed, whole)):
        row = compare_run(claim_of_run(read_finished(claim), []), read_finished(found)).rows[0]
        assert (row.verdict.value, row.difference) == ("within tolerance", 0.0)
        assert row.why.endswith("; 1 of 6 left out (30): killed and resumed around it")


def test_missing_step_without_a_kill_is_different(make_run: MakeRun) -> None:
    claim = claim_of_run(read_finished(make_run()), [])
    found = compare_run(claim, read_finished(relog(make_run(), [1, 2, 3, *range(5, 61)])))
    row = found.rows[0]
    assert (found.exit_code, row.difference) == (5, None)
    assert row.why == "recorded at steps 1-60, this run logged 1-3 and 5-60"


def test_one_kill_loses_one_logged_step_and_no_more(make_run: MakeRun) -> None:
    claim = claim_of_run(read_finished(make_run()), [])
    run = change_manifest(relog(make_run(), [*range(3, 61)], first=2), earlier_attempts=EARLIER)
    assert compare_run(claim, read_finished(run)).rows[0].why == "recorded at steps 1-60, this run logged 3-60"


def test_run_with_a_lost_loss_is_not_recorded(make_run: MakeRun, recipes_dir: Path) -> None:
    runs = [change_manifest(relog(make_run(), [1, 2, 4, 5]), earlier_attempts=EARLIER) for _ in range(2)]
    with pytest.raises(RequestError, match=r"has no loss of step 3, which was lost when it was killed"):
        record_evidence([read_finished(run) for run in runs], "try", [])


def test_half_a_run_against_evidence_names_the_steps_of_both(make_run: MakeRun, recipes_dir: Path) -> None:
    record_evidence([read_finished(make_run()), read_finished(make_run())], "try", [])
    row = verify(read_finished(relog(make_run(), [5, 6, 7, 8], first=4)), []).rows[0]
    assert (row.verdict.value, row.why) == ("DIFFERENT", "recorded at steps 1-60, this run logged 5-8")


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([3], "3"),
        ([1, 2, 3], "1-3"),
        ([10, 20, 40, 50], "10-20 and 40-50, every 10"),
        ([10, 20, 30], "10-30, every 10"),
        ([1, 3, 4, 6, 8, 10], "1, 3-4, 6 and 2 more"),
    ],
)
def test_steps_in_few_words(steps: list[int], told: str) -> None:
    assert steps_text(steps) == told


# --- edited afterwards


def ended(run: Path) -> Path:
    """The run with the hashes of its results, as at its end."""
    finish_manifest(run, RunState.finished, 0, step=60)
    return run


def test_edited_results_are_refused(make_run: MakeRun) -> None:
    run = ended(make_run())
    noted = json.loads((run / "manifest.json").read_text())["files_sha256"]
    assert noted == {name: sha256_file(run / name) for name in ("metrics.jsonl", "evaluation/after.json")}
    (run / "evaluation" / "eval-2026-11-21T10-00-00Z.json").write_text('{"tasks": {}}')  # by `tunebook eval`, later
    read_finished(run)
    for name in noted:
        file = run / name
        kept = file.read_bytes()
        file.write_bytes(kept.replace(b"6.1", b"5.1").replace(b"0.9", b"1.0"))
        with pytest.raises(RequestError, match=rf"{name} was changed after the run, by the hash") as error:
            read_finished(run)
        assert error.value.problem_id == "run-changed"
        file.write_bytes(kept)
    read_finished(run)
    file.unlink()
    with pytest.raises(RequestError, match=r"evaluation/after\.json was changed after the run"):
        read_finished(run)


def test_difference_of_an_edited_run_has_a_warning(make_run: MakeRun) -> None:
    runs = [ended(make_run()) for _ in range(2)]
    (runs[1] / "metrics.jsonl").write_text((runs[0] / "metrics.jsonl").read_text().replace("6.1", "5.1"))
    out = StringIO()
    diff_command((str(runs[0]), str(runs[1])), Path("outputs"), Console(file=out, width=200))
    told = f"{runs[1].parent.name}/{runs[1].name}: metrics.jsonl was changed after the run"
    assert told in out.getvalue()
    assert out.getvalue().count("was changed after the run") == 1
    assert "files_sha256" not in out.getvalue()  # every run's own


def test_copy_with_edited_losses_is_still_a_copy(make_run: MakeRun, recipes_dir: Path, tmp_path: Path) -> None:
    one = make_run()
    copy = shutil.copytree(one, tmp_path / "copy")
    (copy / "metrics.jsonl").write_text((one / "metrics.jsonl").read_text().replace("6.1", "6.100001"))
    with pytest.raises(RequestError, match=r"copy is a copy of .*: both were started on the same machine at 2026-11"):
        record_evidence([read_finished(one), read_finished(copy)], "try", [])
