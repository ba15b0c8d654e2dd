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

from ..conftest import config_of

FOLDER = Path("/runs/1")


@pytest.fixture(autouse=True)
def plain_python(monkeypatch):
    monkeypatch.setattr(sys, "executable", "python")


def command_of(recipe, *overrides):
    return launch_command(config_of(recipe, *overrides), FOLDER)


def ranks_of(recipe, *overrides):
    return ranks_command(config_of(recipe, *overrides), FOLDER, "a:1")


def test_one_rank_needs_no_torchrun():
    assert command_of("quickstart") == ["python", "-m", "tunebook.train", "/runs/1"]


def test_eight_gpus_of_one_machine():
    assert command_of("qwen3b_zero2") == [
        *["python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"],
        *["-m", "tunebook.launch.rank", "/runs/1"],
    ]


def test_nodes_started_by_hand_meet_at_the_port_of_the_first():
    words = ["qwen3b_zero2", "hardware.num_nodes=2", "launcher.master_address=head", "launcher.timeout_s=60"]
    torchrun = ["python", "-m", "torch.distributed.run", "--nnodes", "2", "--rdzv-backend", "c10d"]
    ranks = ["--nproc-per-node", "8", "-m", "tunebook.launch.rank", "/runs/1"]
    assert command_of(*words) == [
        *[*torchrun, "--rdzv-endpoint", "head:29400", "--rdzv-id", "1"],
        *["--rdzv-conf", "join_timeout=60,read_timeout=60,is_host=1", *ranks],
    ]
    assert node_command(config_of(*words), FOLDER, "head:29400", is_first=False)[12] == (
        "join_timeout=60,read_timeout=60,is_host=0"
    )


def test_slurm_is_handed_a_script_and_starts_a_task_per_node_inside():
    assert command_of("llama2_70b_fsdp") == ["sbatch", "--parsable", "/runs/1/job.sh"]
    assert ranks_of("llama2_70b_fsdp") == [
        *["srun", "--nodes", "2", "--ntasks", "2", "--ntasks-per-node", "1", "--kill-on-bad-exit=1"],
        *["--error=/runs/1/logs/torchrun-%t.log"],
        *["python", "-m", "tunebook.launch.local", "/runs/1", "--endpoint", "a:1"],
    ]


def test_a_slurm_job_of_one_node_needs_no_srun():
    assert ranks_of("qwen3b_zero2", "launcher=slurm")[:4] == ["python", "-m", "torch.distributed.run", "--standalone"]


def test_rays_trainer_is_a_program():
    assert command_of("dolly3b_ray_zero3_offload") == ["python", "-m", "tunebook.launch.ray", "/runs/1"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["qwen3b_zero2"], False),
        (["qwen3b_zero2", "launcher=slurm"], False),
        (["qwen3b_zero2", "hardware.num_nodes=2"], False),
        (["qwen3b_zero2", "hardware.num_nodes=2", "launcher=slurm"], True),
        (["qwen3b_zero2", "launcher=slurm", "launcher.container_image=i"], True),
        (["qwen3b_zero2", "launcher=ray"], True),
    ],
)
def test_ranks_that_start_elsewhere(words, expected):
    assert uses_other_machines(config_of(*words)) is expected


def test_an_evaluation_in_a_container_takes_the_first_node_of_the_job(monkeypatch, tmp_path):
    config = config_of("qwen3b_zero2", "launcher=slurm", "hardware.num_nodes=2", "launcher.container_image=x")
    monkeypatch.chdir("/")
    for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME", "TUNEBOOK_CACHE"):  # whose folders would be mounted
        monkeypatch.setenv(name, str(tmp_path / "missing"))
    assert evaluation_command(config, FOLDER, "after") == [
        *["srun", "--nodes", "1", "--ntasks", "1", "--ntasks-per-node", "1", "--kill-on-bad-exit=1"],
        *["--container-image=x", "--container-mounts=/:/,/runs/1:/runs/1", "--container-workdir=/"],
        *["python", "-m", "tunebook.evaluate", "--run", "/runs/1", "--when", "after"],
    ]
