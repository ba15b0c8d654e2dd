"""What torchrun's report and the ranks' logs and records are read for."""

import io
import signal

import pytest
from rich.console import Console

from tunebook.errors import TunebookError
from tunebook.launch.logs import last_lines, make_logs, print_log, rank_log, torchrun_log
from tunebook.launch.outcome import Failure, first_failure, stuck_collective, training_outcome
from tunebook.launch.supervise import ProcessEnd
from tunebook.record.run_folder import write_outcome

# As torch 2.13 prints it, shortened.
REPORT = """E1121 11:40:02 torch/distributed/elastic/api.py:1000] failed (exitcode: {code}) local_rank: 1
============================================================
tunebook.launch.rank FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-21_11:40:01
  host      : node1
  rank      : 2 (local_rank: 2)
  exitcode  : 1 (pid: 4713)
  error_file: <N/A>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_11:40:01
  host      : node1
  rank      : {rank} (local_rank: 1)
  exitcode  : {code} (pid: 4712)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 4712
============================================================
"""


@pytest.fixture
def folder(tmp_path):
    make_logs(tmp_path)
    return tmp_path


def test_the_first_failure_is_torchruns_root_cause(folder):
    assert first_failure(folder) is None
    torchrun_log(folder, 0).write_text("W1121 something else\n" + REPORT.format(rank=5, code=-9))
    assert first_failure(folder) == Failure(host="node1", rank=5, exit_code=-9)


@pytest.mark.parametrize("codes", [(1, -9, -15), (-15, 1, -9)])
def test_of_several_nodes_the_one_with_a_killed_rank_is_believed(folder, codes):
    for node, code in enumerate(codes):
        torchrun_log(folder, node).write_text(REPORT.format(rank=node, code=code))
    assert first_failure(folder) == Failure(host="node1", rank=codes.index(-9), exit_code=-9)


def test_a_rank_that_was_ended_for_another_is_no_cause(folder):
    torchrun_log(folder, 0).write_text(REPORT.format(rank=0, code=1))
    torchrun_log(folder, 1).write_text(REPORT.format(rank=1, code=-signal.SIGTERM))
    assert first_failure(folder).rank == 0


def test_the_last_lines_of_a_log(folder):
    file, console = rank_log(folder, 3), Console(file=io.StringIO(), width=80)
    file.write_text("".join(f"line {number}\n\n" for number in range(10_000)))
    assert last_lines(file) == [f"line {number}" for number in range(9_992, 10_000)]
    print_log(file, folder, console)
    assert console.file.getvalue().startswith("the last lines of logs/rank-3.log:\n    line 9992\n")
    make_logs(folder)
    assert last_lines(file) == []


def test_without_a_record_of_collectives_there_is_no_summary(folder):
    assert stuck_collective(folder) == ""


@pytest.fixture
def outcome(small, folder):
    """The outcome of a run of two ranks, on one node or two, and what is printed."""

    def end(nodes=1):
        console = Console(file=io.StringIO(), width=200)
        config = small(nodes=nodes, gpus=2 // nodes)
        found = training_outcome(config, folder, ProcessEnd(exit_code=1, stopped_by=None), console)
        return found, console.file.getvalue()

    return end


def test_a_killed_rank_is_named_with_its_host_and_its_last_output(folder, outcome):
    write_outcome(folder, rank=0, exit_code=1, reason="Connection closed by peer", step=3)
    torchrun_log(folder, 1).write_text(REPORT.format(rank=1, code=-9))
    rank_log(folder, 1).write_text("the last thing it said\n")
    found, printed = outcome()
    assert found.reason.startswith("rank 1 ended without recording a reason: it was killed by SIGKILL")
    assert (found.exit_code, found.step) == (1, 3)
    assert "the last lines of logs/rank-1.log:\n    the last thing it said" in printed
    assert outcome(nodes=2)[0].reason.endswith(" [rank 1 on node1]")


def test_the_reason_of_a_rank_stays_if_the_others_were_ended_because_of_it(folder, outcome):
    write_outcome(folder, rank=0, exit_code=1, reason="ValueError: a bug", step=3)
    torchrun_log(folder, 0).write_text(REPORT.format(rank=0, code=1))
    assert outcome()[0].reason == "ValueError: a bug"
    write_outcome(folder, rank=1, exit_code=7, reason="the loss is not finite")
    assert outcome()[0].exit_code == 7


@pytest.mark.parametrize(("log", "problem"), [("RendezvousTimeoutError", "node-missing"), ("ImportError", "run-lost")])
def test_ranks_that_never_started(folder, outcome, log, problem):
    torchrun_log(folder, 0).write_text(log)
    with pytest.raises(TunebookError) as caught:
        outcome(nodes=2)
    assert (caught.value.problem_id, caught.value.exit_code) == (problem, 1)
