"""`launcher=local` on two hosts: the same numbers as on one, and the end of every part of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from .conftest import fault, ranks_of, train_words

ON_TWO = ("hardware=cpu", "parallelism=ddp", "hardware.num_nodes=2", "launcher.stop_timeout_s=20")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A run on two hosts: the two commands."""

    first: object
    second: object
    folder: Path  # its newest run

    def wait(self, timeout_s=120):
        end = time.monotonic() + timeout_s
        first = self.first.wait(timeout_s)
        return first, self.second.wait(max(1, end - time.monotonic()))

    def wait_for_steps(self, read_run, count):
        self.first.wait_for(lambda: self.folder.exists() and len(read_run(self.folder).losses) >= count, 180)


@pytest.fixture
def start_pair(hosts, start, tmp_path):
    """Type the same on both hosts."""

    def begin(*overrides, second=(), ranks=1, steps=400, **environment):
        outputs = tmp_path / "outputs"
        words = train_words(outputs, *ON_TWO, f"hardware.gpus_per_node={ranks}", *overrides, steps=steps)
        later = [*words, "launcher.node_rank=1", "launcher.master_address=node3", *second]
        return Pair(
            first=start(hosts("node3", words), **environment),
            second=start(hosts("node4", later), **environment),
            folder=outputs / "quickstart" / "latest",
        )

    return begin


def test_two_hosts_of_two_ranks_take_the_steps_of_one_rank(start_pair, read_run, one_rank, leaves_nothing):
    pair = start_pair(ranks=2, steps=len(one_rank))
    first, second = pair.wait(120)
    assert (first.exit_code, second.exit_code) == (0, 0), first.output + second.output
    run = read_run(pair.folder)
    assert run.losses == pytest.approx(one_rank, rel=1e-5)
    assert run.status["state"] == "finished"
    assert "launcher.node_rank=1 launcher.master_address=node3" in first.output
    assert "node 1: starts its ranks" in second.output
    leaves_nothing()


def test_a_rank_that_is_killed_ends_the_run_on_both_and_is_named(start_pair, read_run, leaves_nothing):
    pair = start_pair("training.save_every_steps=2")
    pair.wait_for_steps(read_run, 4)
    (pair.folder / "logs" / "rank-1.log").write_text("the last thing it said\n")
    os.kill(ranks_of(pair.folder.resolve())[1], signal.SIGKILL)
    first, second = pair.wait()
    assert (first.exit_code, second.exit_code) == (1, 1), first.output + second.output
    reason = read_run(pair.folder).status["reason"]
    assert "rank 1 ended without recording a reason: it was killed by SIGKILL" in reason
    assert "[rank 1 on node4]" in reason
    assert "rank 1 on node4" in first.output
    assert "the last lines of logs/rank-1.log:\n    the last thing it said" in first.output
    leaves_nothing()


def test_a_node_that_is_killed_is_named_and_the_run_goes_on_later(start_pair, read_run, leaves_nothing):
    pair = start_pair()
    pair.wait_for_steps(read_run, 3)
    (pair.folder / "logs" / "rank-1.log").write_text("the last thing it said\n")
    pair.second.process.kill()
    first = pair.first.wait(120)
    assert first.exit_code == 6, first.output
    assert "node 1 (node4) was lost with rank 1" in first.output
    assert "the last lines of logs/rank-1.log:\n    the last thing it said" in first.output
    stopped = read_run(pair.folder)
    assert stopped.status["state"] == "stopped"
    assert stopped.checkpoints
    leaves_nothing()


def test_after_a_killed_head_nothing_runs_on_and_the_same_command_goes_on(start_pair, read_run, leaves_nothing):
    pair = start_pair(steps=60)
    pair.wait_for_steps(read_run, 3)
    pair.first.process.kill()
    second = pair.second.wait(120)
    assert second.exit_code == 6, second.output
    assert "the launcher on node 0 was lost; stopped by SIGTERM after step" in second.output
    leaves_nothing()
    killed = read_run(pair.folder)
    assert killed.status["state"] == "running"
    assert killed.checkpoints  # the ranks saved before they left
    pair = start_pair(steps=60)
    first, second = pair.wait(150)
    assert (first.exit_code, second.exit_code) == (0, 0), first.output + second.output
    assert f"resuming from {killed.folder}" in first.output
    assert len(read_run(pair.folder).losses) == 60


def test_a_cable_that_is_cut_ends_the_run_on_both_sides(start_pair, read_run, leaves_nothing):
    pair = start_pair("launcher.stop_timeout_s=5")
    pair.wait_for_steps(read_run, 3)
    cable = ["ip", "-n", "tb-node4", "link", "set", "eth0"]
    subprocess.run([*cable, "down"], check=True)
    try:
        first, second = pair.wait(150)
    finally:
        subprocess.run([*cable, "up"], check=True)
    assert (first.exit_code, second.exit_code) == (1, 1), first.output + second.output
    assert "node 1 (node4) was lost" in first.output
    leaves_nothing()


def test_ctrl_c_on_any_node_saves_on_all(start_pair, read_run, leaves_nothing):
    pair = start_pair()
    pair.wait_for_steps(read_run, 3)
    pair.second.interrupt()
    first, second = pair.wait()
    assert (first.exit_code, second.exit_code) == (6, 6), first.output + second.output
    assert "Traceback" not in first.output + second.output
    stopped = read_run(pair.folder)
    assert stopped.status["state"] == "stopped"
    assert stopped.checkpoints == [f"checkpoint-{len(stopped.losses)}"]
    leaves_nothing()


def test_a_node_that_does_not_come_up_is_named_in_time(hosts, run, tmp_path, leaves_nothing):
    words = train_words(tmp_path, *ON_TWO, "hardware.gpus_per_node=1", "launcher.start_timeout_s=20")
    ended = run(hosts("node3", words), timeout_s=60)
    assert ended.exit_code == 1, ended.output
    assert "node 1 of 2 nodes has not joined within 20 s (launcher.start_timeout_s)" in ended.output
    leaves_nothing(2)


@pytest.mark.parametrize(
    ("address", "why"), [("node3", "Connection refused"), ("10.213.77.99", "No route to host")], ids=["head", "host"]
)
def test_a_node_whose_head_is_not_there_says_so_in_time(hosts, run, tmp_path, leaves_nothing, address, why):
    later = ("launcher.node_rank=1", f"launcher.master_address={address}", "launcher.start_timeout_s=3")
    ended = run(hosts("node4", train_words(tmp_path, *ON_TWO, "hardware.gpus_per_node=1", *later)), timeout_s=60)
    assert ended.exit_code == 1, ended.output
    assert (
        f"no launcher answers at {address}:29400 within 3 s (launcher.start_timeout_s): {address}: {why}"
        in ended.output
    )
    leaves_nothing(2)


def test_a_port_in_use_is_said_before_anything_is_prepared(run, tmp_path):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        words = train_words(tmp_path, *ON_TWO, "hardware.gpus_per_node=1", f"launcher.master_port={port}")
        ended = run(words, timeout_s=60)
    assert ended.exit_code == 2, ended.output
    assert f"launcher.master_port={port}: Address already in use" in ended.output
    assert f"Try launcher.master_port={port + 1}" in ended.output
    assert not (tmp_path / "quickstart").exists()


def test_nodes_that_were_asked_for_different_runs_do_not_start(start_pair, leaves_nothing):
    first, second = start_pair(second=("training.seed=1",)).wait()
    assert (first.exit_code, second.exit_code) == (2, 2), first.output + second.output
    for ended in (first, second):
        assert "node 1 (node4) was started for another run" in ended.output
    leaves_nothing(2)


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("import time; time.sleep(600)", "rank 1 did not connect"),
        (
            "import time\nimport torch.distributed as d\nd.all_reduce = lambda *a: time.sleep(600)",
            "no data arrives",
        ),
    ],
    ids=["never-arrives", "first-collective-hangs"],
)
def test_a_hang_before_the_first_step_ends_in_time(start_pair, read_run, tmp_path, leaves_nothing, program, says):
    pair = start_pair("launcher.start_timeout_s=40", **fault(tmp_path, 1, program))
    first, second = pair.wait(150)
    assert (first.exit_code, second.exit_code) == (1, 1), first.output + second.output
    reason = read_run(pair.folder).status["reason"]
    assert "waited 40 s (launcher.start_timeout_s) for the first collective" in reason
    assert says in reason
    leaves_nothing()
