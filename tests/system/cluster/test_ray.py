"""`launcher=ray` on a real Ray cluster of two nodes, and on one of its own: trained, stopped, killed in parts.

The cluster's processes are known by its folder; `ray stop` would end those of others too.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from .conftest import at_work, ranks_of, train_words

HEAD = "10.213.77.11:6379"
SECRET = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64}  # whatever this machine's user has
RAY = ("hardware=cpu", "parallelism=ddp", "launcher=ray", "launcher.stop_timeout_s=20")
ON_TWO = (*RAY, "hardware.num_nodes=2", "hardware.gpus_per_node=1", f"launcher.address={HEAD}")


def train(outputs, *overrides, steps=400):
    """The command, by this interpreter: Ray's workers are started by the same."""
    return [sys.executable, "-m", "tunebook", *train_words(outputs, *overrides, steps=steps)[1:]]


class Cluster:
    """A head on node1 and a second node on node2, with one core each."""

    def __init__(self, hosts, start):
        self.folder = Path(tempfile.mkdtemp(prefix="tb-ray-", dir="/tmp"))  # short: sockets are in it
        self.hosts, self.start = hosts, start
        ray = [sys.executable, "-m", "ray.scripts.scripts"]
        usual = ["--num-cpus=1", "--object-store-memory=100000000", "--disable-usage-stats", "--block"]
        head = ["start", "--head", "--port=6379", "--node-ip-address=10.213.77.11", "--include-dashboard=false"]
        self.head = start(hosts("node1", [*ray, *head, *usual, f"--temp-dir={self.folder}"]), **SECRET)
        self.head.wait_for(lambda: "Ray runtime started" in self.head.output, 120)
        second = ["start", f"--address={HEAD}", "--node-ip-address=10.213.77.12"]
        self.second = start(hosts("node2", [*ray, *second, *usual]), **SECRET)
        self.second.wait_for(lambda: "Ray runtime started" in self.second.output, 120)

    def kill(self, *names):
        """End those of its processes whose program or arguments hold one of some words."""
        for process, words in at_work(self.folder).items():
            if any(name in words for name in names):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    def end(self):
        """End all of it."""
        self.head.kill()
        self.second.kill()
        for _ in range(3):  # what is just being started
            self.kill("")
            time.sleep(0.2)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def _ray():
    if importlib.util.find_spec("ray") is None:
        message = "no ray in this environment: pip install 'ray[train]==2.60.0'"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)


@pytest.fixture(scope="module")
def cluster(hosts, start):
    made = Cluster(hosts, start)
    yield made
    made.end()


@pytest.fixture
def own_cluster(hosts, start):
    """One that a test may break; used after those that share one."""
    made = Cluster(hosts, start)
    yield made
    made.end()


@pytest.fixture
def start_on(hosts, start, tmp_path):
    """Train on a cluster's head node; returns the command and its newest run folder."""

    def begin(*overrides, steps=400):
        outputs = tmp_path / "outputs"
        words = hosts("node1", train(outputs, *ON_TWO, *overrides, steps=steps))
        return start(words, **SECRET), outputs / "quickstart" / "latest"

    return begin


def wait_for_steps(running, read_run, folder, count):
    running.wait_for(lambda: folder.exists() and len(read_run(folder).losses) >= count, 180)


def test_two_nodes_take_the_steps_of_one_rank(cluster, start_on, read_run, one_rank, leaves_nothing):
    running, folder = start_on(steps=6)
    ended = running.wait(180)
    assert ended.exit_code == 0, ended.output
    assert read_run(folder).losses == pytest.approx(one_rank, rel=1e-5)
    leaves_nothing()


def test_a_rank_that_is_killed_is_started_again_and_goes_on_after_the_newest_checkpoint(
    cluster, start_on, read_run, leaves_nothing
):
    running, folder = start_on("training.save_every_steps=2", steps=40)
    running.wait_for(lambda: folder.exists() and len(read_run(folder).checkpoints) >= 1, 180)
    os.kill(ranks_of(folder.resolve())[1], signal.SIGKILL)
    ended = running.wait(240)
    assert ended.exit_code == 0, ended.output
    finished = read_run(folder)
    assert finished.status["state"] == "finished"
    assert len(finished.losses) == 40
    leaves_nothing()


def test_one_that_may_not_be_started_again_ends_with_the_rank_that_died(cluster, start_on, read_run, leaves_nothing):
    running, folder = start_on("launcher.max_failures=0")
    wait_for_steps(running, read_run, folder, 3)
    os.kill(ranks_of(folder.resolve())[1], signal.SIGKILL)
    ended = running.wait(120)
    assert ended.exit_code == 1, ended.output
    assert "rank 1 ended without a word: it was killed by SIGKILL" in read_run(folder).status["reason"]
    assert "[rank 1 on node2]" in read_run(folder).status["reason"]
    leaves_nothing()


def test_ctrl_c_saves_and_ends_the_workers(cluster, start_on, read_run, leaves_nothing):
    running, folder = start_on()
    wait_for_steps(running, read_run, folder, 3)
    running.interrupt()
    ended = running.wait(120)
    assert ended.exit_code == 6, ended.output
    stopped = read_run(folder)
    assert stopped.status["state"] == "stopped"
    assert stopped.checkpoints == [f"checkpoint-{len(stopped.losses)}"]
    leaves_nothing()


def test_after_a_killed_launcher_no_worker_trains_on(cluster, start_on, read_run, leaves_nothing):
    running, folder = start_on()
    wait_for_steps(running, read_run, folder, 3)
    running.process.kill()
    leaves_nothing(60)


def test_a_cluster_that_is_too_small_is_said_before_anything_is_prepared(cluster, hosts, run, tmp_path):
    ended = run(hosts("node1", train(tmp_path, *ON_TWO, "hardware.gpus_per_node=4")), timeout_s=90, **SECRET)
    assert ended.exit_code == 2, ended.output
    assert "the Ray cluster has 2 CPUs, and 8 workers with 1 each need 8" in ended.output
    assert not (tmp_path / "quickstart").exists()


def test_an_address_that_nobody_answers_at_is_said_in_time(hosts, run, tmp_path):
    started = time.monotonic()
    ended = run(hosts("node1", train(tmp_path, *ON_TWO, "launcher.address=10.213.77.99:6379")), timeout_s=120, **SECRET)
    assert ended.exit_code == 2, ended.output
    assert "launcher.address=10.213.77.99:6379: no Ray cluster answers there" in ended.output
    assert time.monotonic() - started < 45
    assert not (tmp_path / "quickstart").exists()


def test_a_cluster_of_its_own_is_started_and_ended(run, read_run, tmp_path, leaves_nothing):
    before = daemons()
    words = train(tmp_path, *RAY, "hardware.gpus_per_node=2", "launcher.address=local", steps=3)
    ended = run(words, timeout_s=240, **SECRET)
    assert ended.exit_code == 0, ended.output
    assert len(read_run(tmp_path / "quickstart" / "latest").losses) == 3
    leaves_nothing()
    assert daemons() <= before


def daemons():
    """Every raylet and head of this machine."""
    listed = subprocess.run(["ps", "-eo", "pid,comm"], check=True, capture_output=True, text=True).stdout
    return {line.split()[0] for line in listed.splitlines() if line.split()[1] in ("raylet", "gcs_server")}


def test_a_lost_node_that_nobody_replaces_ends_the_run_in_time(own_cluster, start_on, read_run, leaves_nothing):
    running, folder = start_on("launcher.start_timeout_s=30", "training.save_every_steps=2")
    wait_for_steps(running, read_run, folder, 3)
    own_cluster.second.kill()
    own_cluster.kill("--node_ip_address=10.213.77.12", "--node-ip-address=10.213.77.12")
    ended = running.wait(200)
    assert ended.exit_code == 1, ended.output
    reason = read_run(folder).status["reason"]
    assert "has not called in within 30 s" in reason or "rank 1" in reason
    leaves_nothing()


def test_a_lost_head_ends_the_run_in_time(own_cluster, start_on, read_run, leaves_nothing):
    running, folder = start_on()
    wait_for_steps(running, read_run, folder, 3)
    own_cluster.head.kill()
    own_cluster.kill("gcs_server", "--node_ip_address=10.213.77.11", "--node-ip-address=10.213.77.11")
    ended = running.wait(200)
    assert ended.exit_code != 0, ended.output
    assert read_run(folder).status["state"] in ("failed", "stopped")
    leaves_nothing(60)
