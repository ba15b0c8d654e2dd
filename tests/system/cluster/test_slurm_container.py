"""`launcher=slurm` with the ranks in containers of plain Docker: a real engine, an image without any Python.

The interpreter is this one, mounted; a container shares the network of the machine, not that of the host it runs for.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import at_work, required, train_words

IMAGE = "tunebook-base:bookworm"


@pytest.fixture(scope="module")
def engine(project_root):
    """A Docker Engine; what its client needs in the environment. One that was there before stays."""
    script = str(project_root / ".ci" / "engine")
    with_client = f'eval "$({script} env)"'
    is_there = subprocess.run(["bash", "-c", f"{with_client}; docker info"], capture_output=True).returncode == 0
    required([script, "up"], 300, "Docker Engine")
    required([script, "base"], 300, "image")
    shell = f'{with_client}; echo "$PATH"; echo "$DOCKER_CONFIG"'
    path, config = subprocess.run(["bash", "-c", shell], check=True, capture_output=True, text=True).stdout.split()
    yield {"PATH": path, "DOCKER_CONFIG": config}
    if not is_there:
        subprocess.run([script, "down"], check=True, timeout=60)


@pytest.fixture
def in_containers(project_root, start, slurm, in_slurm, engine, tmp_path):
    """Start the quickstart on a node, in a container.

    Two containers here would have the network of the machine instead of those of their nodes.
    """

    def begin(*overrides, steps):
        interpreter = Path(sys.executable).resolve().parents[1]
        mounts = [str(project_root), str(interpreter), str(Path(sys.prefix).resolve())]
        words = train_words(
            *[tmp_path / "outputs", "hardware=cpu", "parallelism=ddp", "hardware.num_nodes=1"],
            *["hardware.gpus_per_node=2", "launcher=slurm", "launcher.wait=true", "launcher.stop_timeout_s=20"],
            *[f"launcher.container_image={IMAGE}", "launcher.container_runtime=docker"],
            *[f"launcher.container_mounts=[{','.join(mounts)}]", f"launcher.container_python={sys.executable}"],
            *overrides,
            steps=steps,
        )
        path = f"{project_root / '.venv' / 'bin'}:{engine['PATH']}"
        return start(words, **slurm, **{**engine, "PATH": path}), tmp_path / "outputs" / "quickstart" / "latest"

    return begin


def containers(engine):
    """The containers of the image that run."""
    words = ["docker", "ps", "--quiet", "--filter", f"ancestor={IMAGE}"]
    return subprocess.run(words, env=os.environ | engine, check=True, capture_output=True, text=True).stdout.split()


def test_ranks_in_containers_train_and_leave_none_behind(in_containers, engine, read_run, leaves_nothing):
    running, folder = in_containers(
        *["evaluation=quickstart", "evaluation.before=false", "evaluation.limit=2"], steps=6
    )
    ended = running.wait(240)
    assert ended.exit_code == 0, ended.output
    assert "docker run --rm" in ended.output
    assert len(read_run(folder).losses) == 6
    assert (folder / "evaluation" / "after.json").exists()
    assert containers(engine) == []
    leaves_nothing()


def test_a_stop_while_containers_start_leaves_none_behind(in_containers, engine, leaves_nothing):
    """Docker's clients are killed then, and what they began to start goes on and calls a launcher that is gone."""
    running, _ = in_containers(steps=400)
    running.wait_for(lambda: "launch: srun" in running.output, 120)
    running.interrupt()
    ended = running.wait(60)
    assert ended.exit_code == 6, ended.output
    leaves_nothing()
    assert containers(engine) == []


def kill_the_head(folder):
    """Slurm kills Docker's clients then, but no container."""
    (head,) = [
        process for process, words in at_work(folder.resolve()).items() if "-m tunebook.commands.slurm_job " in words
    ]
    os.kill(head, signal.SIGKILL)


def test_containers_whose_job_is_killed_do_not_train_on(in_containers, engine, read_run, leaves_nothing):
    running, folder = in_containers(steps=400)
    running.wait_for(lambda: folder.exists() and len(read_run(folder).losses) >= 3, 180)
    assert len(containers(engine)) == 1
    kill_the_head(folder)
    ended = running.wait(120)
    assert ended.exit_code == 1, ended.output
    leaves_nothing(60)
    assert containers(engine) == []
    assert len(read_run(folder.resolve()).losses) < 400


def test_a_container_whose_job_is_killed_does_not_evaluate_on(in_containers, engine, leaves_nothing):
    running, folder = in_containers("evaluation=quickstart", "evaluation.before=true", steps=6)
    running.wait_for(lambda: containers(engine), 120)
    time.sleep(5)  # until its Python handles SIGTERM
    kill_the_head(folder)
    ended = running.wait(120)
    assert ended.exit_code == 1, ended.output
    leaves_nothing(60)
    assert containers(engine) == []
    assert not (folder / "evaluation" / "before.json").exists()
