"""`launcher=local` with two ranks on one machine: whatever is killed, nothing trains on unseen."""

from __future__ import annotations

import os
import signal

import pytest

from .conftest import at_work, train_words

TWO_RANKS = ("hardware=cpu", "parallelism=ddp", "hardware.gpus_per_node=2", "launcher.stop_timeout_s=20")


@pytest.fixture
def at_step_3(start, read_run, tmp_path):
    """A run of two ranks that has taken three steps; the command and its folder."""
    outputs = tmp_path / "outputs"
    running = start(train_words(outputs, *TWO_RANKS))
    folder = outputs / "quickstart" / "latest"
    running.wait_for(lambda: folder.exists() and len(read_run(folder).losses) >= 3, 180)
    return running, folder.resolve()


def test_after_a_killed_launcher_the_ranks_save_and_end(at_step_3, read_run, leaves_nothing):
    running, folder = at_step_3
    running.process.kill()
    leaves_nothing(60)
    assert read_run(folder).checkpoints


def test_after_a_killed_torchrun_the_launcher_waits_for_the_ranks_to_save(at_step_3, read_run, leaves_nothing):
    running, folder = at_step_3
    (torchrun,) = [process for process, words in at_work(folder).items() if "torch.distributed.run" in words]
    os.kill(torchrun, signal.SIGKILL)
    ended = running.wait(120)
    leaves_nothing(0)
    assert ended.exit_code == 6, ended.output
    stopped = read_run(folder)
    assert stopped.status["state"] == "stopped"
    assert stopped.checkpoints == [f"checkpoint-{len(stopped.losses)}"]
