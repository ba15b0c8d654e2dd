"""`launcher=local` on two hosts: the same numbers as on one, and the end of every part of it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from .conftest import at_work, host_of, ranks_of, train_words

ON_TWO = ("hardware=cpu", "parallelism=ddp", "hardware.num_nodes=2", "launcher.timeout_s=60")


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

    def begin(*overrides, second=(), on_second=None, ranks=1, steps=400):
        outputs = tmp_path / "outputs"
        words = train_words(outputs, *ON_TWO, f"hardware.gpus_per_node={ranks}", *overrides, steps=steps)
        later = [*words, "launcher.node_rank=1", "launcher.master_address=node3", *second]
        return Pair(
            first=start(hosts("node3", words)),
            second=start(hosts("node4", later), **(on_second or {})),
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
    assert "launcher.node_rank=N launcher.master_address=node3" in first.output
    assert "node 1: starting its ranks" in second.output
    leaves_nothing()


def test_a_rank_that_is_killed_ends_the_run_on_both_and_is_named(start_pair, read_run, leaves_nothing):
    pair = start_pair("training.save_every_steps=2")
    pair.wait_for_steps(read_run, 4)
    (pair.folder / "logs" / "rank-1.log").write_text("the last thing it said\n")
    process = ranks_of(pair.folder.resolve())[1]
    host = host_of(process)  # torchrun decides
    os.kill(process, signal.SIGKILL)
    first, second = pair.wait()
    assert (first.exit_code, second.exit_code) == (1, 1), first.output + second.output
    reason = read_run(pair.folder).status["reason"]
    assert "rank 1 ended without recording a reason: it was killed by SIGKILL" in reason
    assert f"[rank 1 on {host}]" in reason
    assert "the last lines of logs/rank-1.log:\n    the last thing it said" in first.output
    leaves_nothing()


@pytest.mark.parametrize("lost", ["node3", "node4"])
def test_after_a_node_is_killed_the_other_ends_and_the_same_command_resumes(start_pair, read_run, leaves_nothing, lost):
    pair = start_pair("training.save_every_steps=2", steps=60)
    pair.wait_for_steps(read_run, 5)
    for process in at_work(pair.folder.resolve().parents[1]):
        if host_of(process) == lost:
            os.kill(process, signal.SIGKILL)
    ended = (pair.second if lost == "node3" else pair.first).wait(120)
    assert ended.exit_code == 1, ended.output
    leaves_nothing()
    killed = read_run(pair.folder)
    assert killed.checkpoints
    pair = start_pair("training.save_every_steps=2", steps=60)
    first, second = pair.wait(150)
    assert (first.exit_code, second.exit_code) == (0, 0), first.output + second.output
    assert f"resuming from {killed.folder}" in "".join(first.output.splitlines())
    assert len(read_run(pair.folder).losses) == 60


def test_a_rank_that_stands_still_ends_the_run_in_time(start_pair, read_run, leaves_nothing):
    pair = start_pair("launcher.timeout_s=20")
    pair.wait_for_steps(read_run, 3)
    os.kill(ranks_of(pair.folder.resolve())[1], signal.SIGSTOP)
    first, second = pair.wait(150)
    assert (first.exit_code, second.exit_code) == (1, 1), first.output + second.output
    assert read_run(pair.folder).status["state"] == "failed"
    leaves_nothing()


def test_a_cable_that_is_cut_ends_the_run_on_both_sides(start_pair, read_run, leaves_nothing):
    pair = start_pair("launcher.timeout_s=20")
    pair.wait_for_steps(read_run, 3)
    cable = ["ip", "-n", "tb-node4", "link", "set", "eth0"]
    subprocess.run([*cable, "down"], check=True)
    try:
        first, second = pair.wait(150)
    finally:
        subprocess.run([*cable, "up"], check=True)
    assert (first.exit_code, second.exit_code) == (1, 1), first.output + second.output
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


def test_a_node_that_does_not_come_up_ends_the_run_in_time(hosts, run, tmp_path, leaves_nothing):
    words = train_words(tmp_path, *ON_TWO, "hardware.gpus_per_node=1", "launcher.timeout_s=20")
    ended = run(hosts("node3", words), timeout_s=90)
    assert ended.exit_code == 1, ended.output
    assert "not every node joined within launcher.timeout_s=20" in ended.output
    leaves_nothing(2)


def test_a_node_without_the_first_one_ends_in_time(hosts, run, tmp_path, leaves_nothing):
    later = ("launcher.node_rank=1", "launcher.master_address=node3", "launcher.timeout_s=3")
    ended = run(hosts("node4", train_words(tmp_path, *ON_TWO, "hardware.gpus_per_node=1", *later)), timeout_s=60)
    assert ended.exit_code == 1, ended.output
    assert "node 0 has started no run of this configuration" in ended.output
    leaves_nothing(2)


def test_a_node_with_another_checkout_is_named(start_pair, project_root, tmp_path, leaves_nothing):
    other = tmp_path / "src"
    shutil.copytree(project_root / "src", other)
    (other / "tunebook" / "config" / "added.py").touch()
    first, second = start_pair(
        "launcher.timeout_s=20", on_second={"PYTHONPATH": str(other), "TUNEBOOK_HOME": str(project_root)}
    ).wait()
    assert (first.exit_code, second.exit_code) == (1, 2), first.output + second.output
    assert "node4 has different code than node 0" in " ".join(second.output.split())
    leaves_nothing(2)
