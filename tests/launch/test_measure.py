"""`plan --measure` without ranks: what is refused, what becomes of each end of the two steps, and who uses it after."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tunebook.commands.plan import plan_command
from tunebook.commands.preflight import require_runnable
from tunebook.commands.train import plan_job
from tunebook.errors import DoesNotFitError, RequestError, TunebookError
from tunebook.hardware.disk import disk_full
from tunebook.launch import measure as module
from tunebook.record.metrics import METRICS_FILE
from tunebook.record.run_folder import Outcome

LINE = {"loss": 7.0, "memory_gib": [0.75], "tokens_per_second_per_gpu": 90.0}
RAN_OUT = "the memory of the host ran out before the first step was over; take fewer rows. There is no good checkpoint"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def steps_end(monkeypatch):
    """`steps_end(0)`: let the two steps end so; the folders they were trained in."""
    folders: list[Path] = []

    def end(exit_code: int, reason: str = "finished", num_lines: int = 2) -> list[Path]:
        def train(_config, folder, _plan):
            folders.append(folder)
            lines = [json.dumps(LINE | {"step": step}) + "\n" for step in range(1, num_lines + 1)]
            (folder / METRICS_FILE).write_text("".join(lines))
            said = reason if reason != "full" else f"{disk_full(folder).message}. There is no good checkpoint"
            return Outcome(rank=0, exit_code=exit_code, reason=said, step=None, last_checkpoint=None)

        monkeypatch.setattr(module, "_train", train)
        return folders

    return end


def planned(*words: str, recipe: str = "quickstart") -> str:
    console = Console(file=io.StringIO(), width=160)
    assert plan_command(recipe, [*words], [], console, is_measured=True) == 0
    return console.file.getvalue()


def as_json(capsys, *words: str, is_measured: bool = False):
    code = plan_command("quickstart", [*words], [], Console(), as_json=True, is_measured=is_measured)
    return code, json.loads(capsys.readouterr().out)


def test_the_two_steps_are_trained_once_and_their_folder_is_removed(steps_end, capsys):
    folders = steps_end(0)
    assert "fits: two steps with rows of 1,024 tokens, measured on " in planned()
    assert "0.75 GiB in all" in planned("training.seed=3")
    assert (len(folders), folders[0].exists()) == (1, False)
    planned("training.micro_batch_size=2")
    assert len(folders) == 2
    for words, source in (((), "measured"), (("training.max_length=64",), "estimated")):
        code, plan = as_json(capsys, *words)
        assert (code, plan["fits"], plan["memory_source"]) == (0, True, source)
    assert plan["measured"] is None


def test_memory_that_runs_out_is_an_answer_and_is_remembered(steps_end, capsys):
    folders = steps_end(3, RAN_OUT, 0)
    for _ in range(2):
        with pytest.raises(DoesNotFitError, match=r"as measured, .* host ran out"):
            planned()
    assert len(folders) == 1
    code, plan = as_json(capsys)
    assert (code, plan["fits"], plan["memory_source"]) == (3, False, "measured")
    assert plan["measured"]["ran_out"] == RAN_OUT.partition(". ")[0]
    with pytest.raises(DoesNotFitError, match="as measured, this plan does not fit"):
        require_runnable(plan_job("quickstart", ["evaluation=none"], []))


@pytest.mark.parametrize(
    ("exit_code", "reason", "num_lines"), [(1, "ValueError: a bug", 0), (3, "full", 0), (0, "finished", 1)]
)
def test_any_other_end_is_an_error_of_which_nothing_is_kept(steps_end, tmp_path, exit_code, reason, num_lines):
    steps_end(exit_code, reason, num_lines)
    with pytest.raises(TunebookError, match="the two steps of --measure failed, and nothing was measured: ") as caught:
        planned()
    assert caught.value.problem_id == "measure-failed"
    assert not list((tmp_path / "cache" / "measured_memory").rglob("*.json"))


@pytest.mark.parametrize(
    "words",
    [
        ("launcher=slurm",),
        ("launcher=ray",),
        ("hardware.num_nodes=2", "parallelism=ddp", "launcher.master_address=a"),
    ],
)
def test_ranks_that_start_elsewhere_are_refused(steps_end, capsys, words):
    folders = steps_end(0)
    with pytest.raises(RequestError, match=r"on a node: launcher=local hardware.num_nodes=1") as caught:
        planned(*words)
    assert caught.value.problem_id == "measure-elsewhere"
    code, plan = as_json(capsys, *words, is_measured=True)
    assert (code, plan["problems"][-1]["id"], folders) == (2, "measure-elsewhere", [])


def test_gpus_that_are_not_here_and_missing_weights_are_refused(steps_end):
    folders = steps_end(0)
    with pytest.raises(RequestError):
        planned("hardware=hopper", recipe="qwen05b_single")
    with pytest.raises(RequestError):
        planned("hardware=cpu", recipe="qwen05b_single")
    assert folders == []
