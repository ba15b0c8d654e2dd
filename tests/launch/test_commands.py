"""Launch commands, word by word."""

from pathlib import Path

import pytest

from tunebook.config.auto import resolve_auto
from tunebook.config.compose import compose
from tunebook.errors import RequestError
from tunebook.hardware.detect import Machine
from tunebook.launch.commands import launch_command

NO_GPU = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0)


def command_of(recipe, *overrides):
    config = resolve_auto(compose(recipe, list(overrides)).config, NO_GPU).config
    return launch_command(config, Path("/runs/1"), python="python")


def test_one_rank_needs_no_torchrun():
    assert command_of("quickstart") == ["python", "-m", "tunebook.train", "/runs/1"]


def test_eight_gpus_of_one_machine():
    assert command_of("qwen3b_zero2") == [
        *["python", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "8"],
        *["-m", "tunebook.train", "/runs/1"],
    ]


def test_slurm_starts_one_torchrun_per_node():
    command = command_of("llama2_70b_fsdp", "launcher.partition=gpu", "launcher.extra_args=[--exclusive]")
    assert command[:2] == ["sbatch", "--job-name=llama2_70b_fsdp"]
    assert {"--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--partition=gpu", "--exclusive"} <= set(command)
    script = command[-1]
    assert "srun" in script
    assert "--nnodes 2 --nproc_per_node 8" in script
    assert script.endswith("-m tunebook.train /runs/1'")


def test_ray_is_asked_for_one_nodes_gpus():
    assert command_of("dolly3b_ray_zero3_offload") == [
        *["ray", "job", "submit", "--entrypoint-num-cpus", "28", "--entrypoint-num-gpus", "1", "--"],
        *["python", "-m", "tunebook.train", "/runs/1"],
    ]
    with pytest.raises(RequestError, match="runs on one node"):
        command_of("dolly3b_ray_zero3_offload", "hardware.num_nodes=2")
