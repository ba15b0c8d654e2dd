"""Where a command refuses to run because of other launchers, and what its ranks get."""

import pytest

from tunebook.errors import RequestError
from tunebook.train.environment import rank_environment
from tunebook.train.other_launchers import refuse_inside_launcher

from ..conftest import config_of

# What each launcher sets for a process, as found in its source.
BY_TORCHRUN = {
    "LOCAL_RANK": "0", "RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost",
    "MASTER_PORT": "40001", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
BY_ACCELERATE = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_DEEPSPEED": "true"}
BY_DEEPSPEED = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "CROSS_SIZE": "1", "MASTER_ADDR": "a"}
BY_OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"}
BY_SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "PMI_SIZE": "2", "PMI_RANK": "1"}
KEPT = {
    "HOME": "/h", "HF_HOME": "/hf", "OMP_NUM_THREADS": "3", "NCCL_DEBUG": "INFO", "TORCH_EXTENSIONS_DIR": "/x",
    "CUDA_VISIBLE_DEVICES": "1", "SLURM_JOB_ID": "7", "PYTORCH_ALLOC_CONF": "x:1", "OMPI_MCA_btl": "tcp",
}  # fmt: skip
TRAIN = ["train", "quickstart", "training.max_steps=2"]


def test_ranks_get_no_variables_of_other_launchers_wherever_they_start():
    environment = rank_environment(config_of("quickstart"), KEPT | BY_TORCHRUN | BY_ACCELERATE | BY_OPEN_MPI | BY_SRUN)
    assert environment.items() >= KEPT.items()
    assert not set(environment) & {*BY_TORCHRUN, *BY_ACCELERATE, *BY_OPEN_MPI, "PMI_SIZE", "PMI_RANK"}


@pytest.mark.parametrize(
    ("variables", "sign"),
    [
        (BY_TORCHRUN, "TORCHELASTIC_RUN_ID"),
        (BY_ACCELERATE, "ACCELERATE_MIXED_PRECISION"),
        (BY_DEEPSPEED, "WORLD_SIZE"),
        (BY_OPEN_MPI, "OMPI_COMM_WORLD_SIZE"),
        (BY_SRUN, "SLURM_STEP_NUM_TASKS"),
        ({"MASTER_ADDR": "a"}, "MASTER_ADDR"),  # left over
        ({"FSDP_OFFLOAD_PARAMS": "true"}, "FSDP_OFFLOAD_PARAMS"),
    ],
    ids=str,
)
def test_a_run_inside_another_launcher_or_with_its_variables_is_refused(variables, sign):
    with pytest.raises(RequestError, match=sign) as caught:
        refuse_inside_launcher(["--local_rank=1", *TRAIN], KEPT | variables)
    assert caught.value.problem_id == "inside-launcher"


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (TRAIN, KEPT),
        (TRAIN, {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}),  # salloc, or sbatch's own script
        (TRAIN, {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "1"}),  # srun --pty bash
        ([*TRAIN, "hardware.num_nodes=2", "launcher.node_rank=1"], BY_OPEN_MPI),  # nodes that know their number
        ([*TRAIN, "hardware.num_nodes=2", "launcher.node_rank=1"], BY_SRUN),
        ([], BY_TORCHRUN),
        (["--help"], BY_TORCHRUN),
        (["plan", "quickstart", "--json"], BY_TORCHRUN),  # only reads
    ],
    ids=str,
)
def test_one_copy_of_the_command_runs(arguments, environment):
    refuse_inside_launcher(arguments, environment)
