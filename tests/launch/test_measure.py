"""`plan --measure` without ranks: what is refused, and the result of each end of the two steps."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tunebook.data.batch import BatchPlan
from tunebook.errors import RequestError, TunebookError
from tunebook.hardware.detect import Machine
from tunebook.hardware.disk import disk_full
from tunebook.launch import measure as module
from tunebook.launch.measure import measure, require_measurable
from tunebook.record.metrics import METRICS_FILE
from tunebook.record.run_folder import Outcome

LINE = {"loss": 7.0, "memory_gib": [0.75], "tokens_per_second_per_gpu": 90.0}
RAN_OUT = "the memory of the host ran out before the first step was over; take fewer rows. There is no good checkpoint"
MACHINE = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0)
BATCH = BatchPlan(
    global_samples=1, global_tokens=None, world_size=1, micro_batch_size=1, accumulation=1, rows_per_step=1,
    row_length=64, is_packed=False, is_estimate=False, documents_per_step=1, tokens_per_step=None, num_documents=None,
    steps_per_epoch=None, total_steps=1,
)  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def measured(small, monkeypatch):
    """Measure a configuration whose two steps end so; returns the measurement and the folder of the steps."""

    def end(exit_code=0, reason="finished", num_lines=2):
        folders: list[Path] = []

        def train(_config, folder, _plan):
            folders.append(folder)
            lines = [json.dumps(LINE | {"step": step}) + "\n" for step in range(1, num_lines + 1)]
            (folder / METRICS_FILE).write_text("".join(lines))
            said = f"{disk_full(folder).message}. There is no good checkpoint" if reason == "full" else reason
            return Outcome(rank=0, exit_code=exit_code, reason=said, step=None, last_checkpoint=None)

        monkeypatch.setattr(module, "_train", train)
        config = small()
        config.training.max_length = 64
        return measure(config, BATCH, MACHINE, Console(file=io.StringIO()), {}), folders

    return end


def test_the_two_steps_are_trained_once_and_their_folder_is_removed(measured):
    measurement, (folder,) = measured()
    assert (measurement.memory_gib, measurement.row_length, measurement.ran_out) == ([0.75], 64, None)
    assert not folder.exists()
    assert measured() == (measurement, [])


def test_memory_that_runs_out_is_a_result_and_is_remembered(measured):
    measurement, _ = measured(3, RAN_OUT, 0)
    assert measurement.ran_out == RAN_OUT.partition(". ")[0]
    assert measured() == (measurement, [])


@pytest.mark.parametrize(
    ("exit_code", "reason", "num_lines"), [(1, "ValueError: a bug", 0), (3, "full", 0), (0, "finished", 1)]
)
def test_any_other_end_is_an_error_and_nothing_is_kept(measured, exit_code, reason, num_lines):
    with pytest.raises(TunebookError) as caught:
        measured(exit_code, reason, num_lines)
    assert caught.value.problem_id == "measure-failed"
    assert len(measured()[1]) == 1


@pytest.mark.parametrize(("launcher", "nodes"), [("slurm", 1), ("ray", 1), ("local", 2)])
def test_ranks_that_start_elsewhere_are_refused(small, launcher, nodes):
    with pytest.raises(RequestError) as caught:
        require_measurable(small(launcher, nodes=nodes))
    assert caught.value.problem_id == "measure-elsewhere"
    require_measurable(small())
