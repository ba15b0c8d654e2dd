"""Launch commands, word by word."""

import sys
from pathlib import Path

import pytest

from tunebook.launch.commands import (
    evaluation_command,
    launch_command,
    node_command,
    ranks_command,
    uses_other_machines,
)

FOLDER = Path("/runs/1")
RANKS = ["--nproc-per-node", "8", "-m", "tunebook.launch.rank", "/runs/1"]
TORCHRUN = ["python", "-m", "torch.distributed.run"]


@pytest.fixture(autouse=True)
def plain_python(monkeypatch):
    monkeypatch.setattr(sys, "executable", "python")


def test_one_node(small):
    assert launch_command(small(), FOLDER) == ["python", "-m", "tunebook.train", "/runs/1"]
    assert launch_command(small(gpus=8), FOLDER) == [*TORCHRUN, "--standalone", *RANKS]
    assert ranks_command(small("slurm", gpus=8), FOLDER, "a:1") == [*TORCHRUN, "--standalone", *RANKS]
    assert launch_command(small("ray", gpus=8), FOLDER) == ["python", "-m", "tunebook.launch.ray", "/runs/1"]


def test_nodes_started_by_hand_meet_at_the_port_of_the_first(small):
    config = small(nodes=2, gpus=8, master_address="head", timeout_s=60)
    assert launch_command(config, FOLDER) == [
        *[*TORCHRUN, "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "head:29400", "--rdzv-id", "1"],
        *["--rdzv-conf", "join_timeout=60,read_timeout=60,is_host=1", *RANKS],
    ]
    later = node_command(config, FOLDER, "head:29400", is_first=False)
    assert "join_timeout=60,read_timeout=60,is_host=0" in later


def test_slurm_gets_a_script_that_starts_a_task_per_node(small):
    config = small("slurm", nodes=2, gpus=8)
    assert launch_command(config, FOLDER) == ["sbatch", "--parsable", "/runs/1/job.sh"]
    assert ranks_command(config, FOLDER, "a:1") == [
        *["srun", "--nodes", "2", "--ntasks", "2", "--ntasks-per-node", "1", "--kill-on-bad-exit=1"],
        *["--error=/runs/1/logs/torchrun-%t.log"],
        *["python", "-m", "tunebook.launch.local", "/runs/1", "--endpoint", "a:1"],
    ]


@pytest.mark.parametrize(
    ("launcher", "settings", "expected"),
    [
        ("local", {"nodes": 2}, False),
        ("slurm", {}, False),
        ("slurm", {"nodes": 2}, True),
        ("slurm", {"container_image": "i"}, True),
        ("ray", {}, True),
    ],
)
def test_ranks_that_start_elsewhere(small, launcher, settings, expected):
    assert uses_other_machines(small(launcher, **settings)) is expected


def test_an_evaluation_in_a_container_takes_the_first_node_of_the_job(small, monkeypatch, tmp_path):
    monkeypatch.chdir("/")
    for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME", "TUNEBOOK_CACHE"):  # whose folders would be mounted
        monkeypatch.setenv(name, str(tmp_path / "missing"))
    assert evaluation_command(small("slurm", nodes=2, gpus=8, container_image="x"), FOLDER, "after") == [
        *["srun", "--nodes", "1", "--ntasks", "1", "--ntasks-per-node", "1", "--kill-on-bad-exit=1"],
        *["--container-image=x", "--container-mounts=/:/,/runs/1:/runs/1", "--container-workdir=/"],
        *["python", "-m", "tunebook.evaluate", "--run", "/runs/1", "--when", "after"],
    ]
