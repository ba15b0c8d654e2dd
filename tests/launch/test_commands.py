"""Launch commands, word by word."""

import sys
from pathlib import Path

import pytest

from tunebook.launch.commands import (
    evaluation_command,
    has_rendezvous,
    launch_command,
    rank_command,
    ranks_command,
    torchrun_command,
)

from ..conftest import config_of

FOLDER = Path("/runs/1")


@pytest.fixture(autouse=True)
def plain_python(monkeypatch):
    monkeypatch.setattr(sys, "executable", "python")


def command_of(recipe, *overrides):
    return launch_command(config_of(recipe, *overrides), FOLDER)


def ranks_of(recipe, *overrides):
    return ranks_command(config_of(recipe, *overrides), FOLDER, "a,b:1")


def test_one_rank_needs_no_torchrun():
    assert command_of("quickstart") == ["python", "-m", "tunebook.train", "/runs/1"]


def test_eight_gpus_of_one_machine():
    assert command_of("qwen3b_zero2") == [
        *["python", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "8"],
        *["-m", "tunebook.launch.rank", "/runs/1"],
    ]


def test_a_node_of_several_calls_the_launcher_and_then_starts_torchrun():
    words = ["qwen3b_zero2", "hardware.num_nodes=2", "launcher.start_timeout_s=60"]
    assert ranks_of(*words) == ["python", "-m", "tunebook.launch.node", "/runs/1", "--endpoint", "a,b:1", "--node", "0"]
    assert torchrun_command(config_of(*words), FOLDER, 1, "10.0.0.1", 4711) == [
        *["python", "-m", "torch.distributed.run", "--nnodes", "2", "--node_rank", "1", "--nproc_per_node", "8"],
        *["--master_addr", "10.0.0.1", "--master_port", "4711", "--rdzv_conf", "timeout=60"],
        *["-m", "tunebook.launch.rank", "/runs/1"],
    ]


def test_slurm_is_handed_a_script_and_starts_a_task_per_node_inside():
    assert command_of("llama2_70b_fsdp") == ["sbatch", "--parsable", "/runs/1/job.sh"]
    assert ranks_of("llama2_70b_fsdp") == [
        *["srun", "--nodes", "2", "--ntasks", "2", "--ntasks-per-node", "1", "--kill-on-bad-exit=0"],
        *["python", "-m", "tunebook.launch.node", "/runs/1", "--endpoint", "a,b:1"],
    ]


def test_a_slurm_job_of_one_node_needs_no_srun():
    assert ranks_of("qwen3b_zero2", "launcher=slurm")[:4] == ["python", "-m", "torch.distributed.run", "--standalone"]


def test_rays_trainer_is_a_program_that_its_workers_call_back():
    words = ["python", "-m", "tunebook.launch.ray", "/runs/1", "--endpoint"]
    assert command_of("dolly3b_ray_zero3_offload") == [*words, "<address>:<port>"]
    assert ranks_of("dolly3b_ray_zero3_offload") == [*words, "a,b:1"]
    assert rank_command(FOLDER)[-1] == "--dies-with-parent"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["qwen3b_zero2"], False),
        (["qwen3b_zero2", "launcher=slurm"], False),
        (["qwen3b_zero2", "hardware.num_nodes=2"], True),
        (["qwen3b_zero2", "launcher=slurm", "launcher.container_image=i"], True),
        (["qwen3b_zero2", "launcher=ray"], True),
    ],
)
def test_who_calls_the_launcher(words, expected):
    assert has_rendezvous(config_of(*words)) is expected


def test_an_evaluation_in_a_container_takes_the_first_node_of_the_job(monkeypatch, tmp_path):
    config = config_of("qwen3b_zero2", "launcher=slurm", "hardware.num_nodes=2", "launcher.container_image=x")
    monkeypatch.chdir("/")
    for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME", "TUNEBOOK_CACHE"):  # whose folders would be mounted
        monkeypatch.setenv(name, str(tmp_path / "missing"))
    assert evaluation_command(config, FOLDER, "a:1", "after") == [
        *["srun", "--nodes", "1", "--ntasks", "1", "--ntasks-per-node", "1", "--kill-on-bad-exit=0"],
        *["--container-image=x", "--container-mounts=/:/,/runs/1:/runs/1", "--container-workdir=/"],
        *["python", "-m", "tunebook.launch.node", "/runs/1", "--endpoint", "a:1", "--evaluate", "after"],
    ]
