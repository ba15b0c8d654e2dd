"""`launcher=ray` on a real Ray cluster of two nodes, and on one of its own: trained, stopped, killed in parts.

The cluster's processes are known by its folder; `ray stop` would end those of others too.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from .conftest import at_work, host_of, ranks_of, required, train_words

HEAD = "10.213.77.11:6379"
SECRET = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64}  # whatever this machine's user has
LONG_NOTICE = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "120"}  # 30 by itself: a busy machine may not save in that
RAY = ("hardware=cpu", "parallelism=ddp", "launcher=ray", "launcher.stop_timeout_s=20", "launcher.timeout_s=60")
ON_TWO = (*RAY, "hardware.num_nodes=2", "hardware.gpus_per_node=1", f"launcher.address={HEAD}")


class Cluster:
    """A head on node1 and a second node on node2, with one core each."""

    def __init__(self, python, hosts, start):
        self.folder = Path(tempfile.mkdtemp(prefix="tb-ray-", dir="/tmp"))  # short: sockets are in it
        self.hosts, self.start = hosts, start
        self.ray = [python, "-m", "ray.scripts.scripts"]
        self.head = self.second = None

    def mend(self):
        """Start what is not at work."""
        if self.head is None or self.head.process.poll() is not None:
            self.end()
            self.head = self._begin(
                "node1",
                *["--head", "--port=6379", "--node-ip-address=10.213.77.11", "--include-dashboard=false"],
                f"--temp-dir={self.folder}",
            )
        if self.second is None or self.second.process.poll() is not None:
            self.second = self._begin("node2", f"--address={HEAD}", "--node-ip-address=10.213.77.12")

    def _begin(self, host, *words):
        usual = ["--num-cpus=1", "--object-store-memory=100000000", "--disable-usage-stats", "--block"]
        running = self.start(self.hosts(host, [*self.ray, "start", *words, *usual]), **SECRET, **LONG_NOTICE)
        running.wait_for(lambda: "Ray runtime started" in running.output, 120)
        return running

    def shut_second_down(self):
        """As Kubernetes does with a pod that it deletes; Ray has the node drained first, for as long as it says."""
        (daemon,) = [process for process, words in at_work(HEAD).items() if f" start --address={HEAD}" in words]
        os.kill(daemon, signal.SIGTERM)

    def lose_second(self):
        """Switch the second node off."""
        self.second.kill()
        self.kill("--node_ip_address=10.213.77.12", "--node-ip-address=10.213.77.12")

    def kill(self, *names):
        """End those of its processes whose program or arguments hold one of some words."""
        for process, words in at_work(self.folder).items():
            if any(name in words for name in names):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    def end(self):
        """End all of it."""
        for running in (self.head, self.second):
            if running is not None:
                running.kill()
        for _ in range(3):  # what is just being started
            self.kill("")
            time.sleep(0.2)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def python(project_root):
    """An interpreter that has Ray beside everything else; Ray's workers are started by the one that asks for them."""
    return required([str(project_root / ".ci" / "ray"), "up"], 300, "Ray").strip()


@pytest.fixture(scope="module")
def train(python):
    """The command, by that interpreter."""
    return lambda *words, **steps: [python, "-m", "tunebook", *train_words(*words, **steps)[1:]]


@pytest.fixture(scope="module")
def shared_cluster(python, hosts, start):
    made = Cluster(python, hosts, start)
    yield made
    made.end()


@pytest.fixture
def cluster(shared_cluster):
    """Both nodes at work, whatever an earlier test did to them."""
    shared_cluster.mend()
    return shared_cluster


@pytest.fixture
def start_on(train, hosts, start, tmp_path):
    """Train on a cluster's head node; returns the command and its newest run folder."""

    def begin(*overrides, steps=400):
        outputs = tmp_path / "outputs"
        words = hosts("node1", train(outputs, *ON_TWO, *overrides, steps=steps))
        return start(words, **SECRET), outputs / "quickstart" / "latest"

    return begin


def wait_for_steps(running, read_run, folder, count):
    running.wait_for(lambda: folder.exists() and len(read_run(folder).losses) >= count, 240)


def test_two_nodes_take_the_steps_of_one_rank_and_those_after_a_killed_rank_too(
    cluster, start_on, read_run, one_rank, leaves_nothing
):
    running, folder = start_on("training.save_every_steps=2", steps=40)
    wait_for_steps(running, read_run, folder, len(one_rank))
    assert read_run(folder).losses[: len(one_rank)] == pytest.approx(one_rank, rel=1e-5)
    os.kill(ranks_of(folder.resolve())[1], signal.SIGKILL)
    ended = running.wait(300)
    assert ended.exit_code == 0, ended.output
    finished = read_run(folder)
    assert finished.status["state"] == "finished"
    assert len(finished.losses) == 40
    assert finished.losses[: len(one_rank)] == pytest.approx(one_rank, rel=1e-5)  # those trained again among them
    leaves_nothing()


def test_one_that_may_not_be_started_again_ends_with_the_rank_that_died(cluster, start_on, read_run, leaves_nothing):
    running, folder = start_on("launcher.max_failures=0")
    wait_for_steps(running, read_run, folder, 3)
    process = ranks_of(folder.resolve())[1]
    host = host_of(process)  # Ray decides
    os.kill(process, signal.SIGKILL)
    ended = running.wait(120)
    assert ended.exit_code == 1, ended.output
    assert f"rank 1 on {host} was killed by signal 9" in read_run(folder).status["reason"]
    leaves_nothing()


def test_after_a_killed_launcher_no_worker_trains_on(cluster, start_on, read_run, leaves_nothing):
    running, folder = start_on()
    wait_for_steps(running, read_run, folder, 3)
    running.process.kill()
    leaves_nothing(60)


def test_ctrl_c_saves_and_ends_a_cluster_of_its_own(train, start, read_run, tmp_path, leaves_nothing):
    before = daemons()
    alone = ("parallelism=single", "hardware.gpus_per_node=1", "launcher.address=local")
    running = start(train(tmp_path, *RAY, *alone), **SECRET)
    folder = tmp_path / "quickstart" / "latest"
    wait_for_steps(running, read_run, folder, 3)
    running.interrupt()
    ended = running.wait(120)
    assert ended.exit_code == 6, ended.output
    stopped = read_run(folder)
    assert stopped.status["state"] == "stopped"
    assert stopped.checkpoints == [f"checkpoint-{len(stopped.losses)}"]
    leaves_nothing()
    assert daemons() <= before


def daemons():
    """Every raylet and head of this machine."""
    listed = subprocess.run(["ps", "-eo", "pid,comm"], check=True, capture_output=True, text=True).stdout
    return {line.split()[0] for line in listed.splitlines() if line.split()[1] in ("raylet", "gcs_server")}


def test_before_a_machine_is_taken_away_the_run_saves_and_the_same_command_goes_on(
    cluster, start_on, read_run, leaves_nothing
):
    in_time = "launcher.stop_timeout_s=120"
    running, folder = start_on(in_time)
    wait_for_steps(running, read_run, folder, 3)
    lost = {host_of(process): rank for rank, process in ranks_of(folder.resolve()).items()}["node2"]
    cluster.shut_second_down()
    ended = running.wait(120)
    assert ended.exit_code == 6, ended.output
    stopped = read_run(folder)
    losses = stopped.losses
    steps = len(losses)
    reason = stopped.status["reason"]
    assert reason.startswith(f"stopped by a preemption notice for rank {lost} after step {steps}, saved in"), reason
    assert stopped.checkpoints == [f"checkpoint-{steps}"]
    leaves_nothing()
    cluster.lose_second()
    cluster.mend()
    again, _ = start_on(in_time)
    wait_for_steps(again, read_run, folder, steps + 3)
    again.interrupt()
    ended = again.wait(120)
    assert ended.exit_code == 6, ended.output
    assert f"resuming from {folder.resolve()}/checkpoints/checkpoint-{steps}" in "".join(ended.output.splitlines())
    assert read_run(folder).losses[:steps] == losses
    leaves_nothing()


def test_a_lost_node_that_nobody_replaces_ends_the_run_in_time(cluster, start_on, read_run, leaves_nothing):
    running, folder = start_on("launcher.timeout_s=60", "training.save_every_steps=2")
    wait_for_steps(running, read_run, folder, 3)
    cluster.lose_second()
    ended = running.wait(300)
    assert ended.exit_code == 1, ended.output
    assert read_run(folder).status["state"] == "failed"
    leaves_nothing()


def test_a_lost_head_ends_the_run_in_time(cluster, start_on, read_run, leaves_nothing):
    running, folder = start_on()
    wait_for_steps(running, read_run, folder, 3)
    cluster.head.kill()
    cluster.kill("gcs_server", "--node_ip_address=10.213.77.11", "--node-ip-address=10.213.77.11")
    ended = running.wait(300)
    assert ended.exit_code == 1, ended.output
    assert read_run(folder).status["state"] == "failed"
    leaves_nothing(60)
