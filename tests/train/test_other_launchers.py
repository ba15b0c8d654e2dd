"""Variables of other launchers: which they are, what is removed, and where a command refuses to run."""

import pytest

from tunebook.errors import RequestError
from tunebook.train.environment import rank_environment
from tunebook.train.other_launchers import (
    is_of_another_launcher,
    refuse_inside_launcher,
    removal_notice,
    remove_other_launchers,
)

from ..conftest import config_of

# What each launcher sets for a process, as found in its source.
BY_TORCHRUN = {
    "LOCAL_RANK": "0", "RANK": "0", "GROUP_RANK": "0", "ROLE_RANK": "0", "ROLE_NAME": "default",
    "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1", "ROLE_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost", "MASTER_PORT": "40001", "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_ERROR_FILE": "/tmp/error.json",
}  # fmt: skip
BY_ACCELERATE = {
    "ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False", "ACCELERATE_USE_CPU": "True",
}  # fmt: skip
BY_ACCELERATE_FOR_DEEPSPEED = {
    "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_CONFIG_DS_FIELDS": "gradient_clipping",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", "ACCELERATE_MIXED_PRECISION":
    "fp16",
}  # fmt: skip
BY_DEEPSPEED = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "CROSS_RANK": "0",
                "CROSS_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}  # fmt: skip
BY_OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
               "PMIX_RANK": "1"}  # fmt: skip
BY_MPICH = {"PMI_SIZE": "1", "PMI_RANK": "0", "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}
BY_SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "PMI_SIZE": "2", "PMI_RANK": "1"}
KEPT = {
    "PATH": "/usr/bin", "HOME": "/h", "HF_HOME": "/hf", "OMP_NUM_THREADS": "3", "NCCL_DEBUG": "INFO",
    "TORCH_EXTENSIONS_DIR": "/x", "DS_SKIP_CUDA_CHECK": "1", "CUDA_VISIBLE_DEVICES": "1", "SLURM_JOB_ID": "7",
    "MASTER_PASSWORD": "x", "TUNEBOOK_CACHE": "/c", "PYTORCH_ALLOC_CONF": "x:1", "RAY_ADDRESS": "auto",
}  # fmt: skip
TRAIN = ["train", "quickstart", "training.max_steps=2"]


@pytest.mark.parametrize(
    "found", [BY_TORCHRUN, BY_ACCELERATE, BY_ACCELERATE_FOR_DEEPSPEED, BY_DEEPSPEED, BY_OPEN_MPI, BY_MPICH], ids=str
)
def test_everything_that_a_launcher_sets_is_removed_and_named_and_nothing_else(found):
    environment = KEPT | found
    removed = remove_other_launchers(environment)
    assert (removed, environment) == (sorted(found), KEPT)
    assert removal_notice(removed).startswith(f"removed from the environment: {', '.join(sorted(found))}. They ")


@pytest.mark.parametrize(
    "name",
    [
        *("FSDP_SHARDING_STRATEGY", "PET_NNODES", "DEEPSPEED_TIMEOUT", "PARALLELISM_CONFIG_TP_SIZE", "NODE_RANK"),
        *("MEGATRON_LM_TP_DEGREE", "XLA_USE_BF16", "PJRT_DEVICE", "NEURON_RT_NUM_CORES", "FORK_LAUNCHED", "MV2_X"),
    ],
)
def test_variables_that_libraries_take_from_the_environment(name):
    assert is_of_another_launcher(name)


def test_ranks_get_none_of_them_wherever_they_start():
    config = config_of("quickstart")
    environment = rank_environment(config, KEPT | BY_TORCHRUN | BY_ACCELERATE | BY_SRUN)
    assert not [name for name in environment if is_of_another_launcher(name)]
    assert environment.items() >= (KEPT | {"SLURM_PROCID": "1"}).items() - {("PATH", "/usr/bin")}


@pytest.mark.parametrize(
    ("found", "launcher", "sign"),
    [
        (BY_TORCHRUN, "torchrun", "TORCHELASTIC_RUN_ID"),
        (BY_TORCHRUN | BY_ACCELERATE, "accelerate launch", "ACCELERATE_DYNAMO_MODE"),
        (BY_ACCELERATE, "accelerate launch", "ACCELERATE_DYNAMO_MODE"),
        (BY_ACCELERATE_FOR_DEEPSPEED, "accelerate launch", "ACCELERATE_CONFIG_DS_FIELDS"),
        (BY_DEEPSPEED, "deepspeed", "CROSS_SIZE"),
        (BY_OPEN_MPI, "mpirun", "OMPI_COMM_WORLD_SIZE"),
        (BY_MPICH, "mpirun", "PMI_SIZE"),
        (BY_SRUN, "srun", "PMI_SIZE"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "8"}, "srun", "SLURM_STEP_NUM_TASKS"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_inside_another_launcher_it_says_what_to_type(found, launcher, sign):
    with pytest.raises(RequestError) as caught:
        refuse_inside_launcher(TRAIN, found)
    error = caught.value
    assert (error.exit_code, error.problem_id) == (2, "inside-launcher")
    assert error.message.startswith(f"this command runs inside {launcher} ({sign} is set), and Tunebook starts its own")
    assert "`tunebook train quickstart training.max_steps=2`" in error.message
    assert error.message.endswith(f"unset {sign}")


@pytest.mark.parametrize(("typed", "is_said"), [((), True), (("hardware.gpus_per_node=4",), False)])
def test_as_many_ranks_as_the_other_launcher_would_have_started(typed, is_said):
    with pytest.raises(RequestError) as caught:
        refuse_inside_launcher([*TRAIN, *typed], BY_TORCHRUN)
    assert ("`, with hardware.gpus_per_node=2 (and parallelism=ddp" in caught.value.message) is is_said


def test_the_option_that_deepspeed_adds_is_not_typed_again():
    with pytest.raises(RequestError, match=r"`tunebook train quickstart training\.max_steps=2`"):
        refuse_inside_launcher(["--local_rank=1", *TRAIN], BY_DEEPSPEED)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"},  # left over
        {"ACCELERATE_MIXED_PRECISION": "bf16"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # salloc, or sbatch's own script
        {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "1", "PMI_RANK": "0"},  # srun --pty bash
    ],
    ids=str,
)
def test_one_copy_of_the_command_runs(environment):
    refuse_inside_launcher(TRAIN, environment)


@pytest.mark.parametrize("found", [BY_OPEN_MPI, BY_SRUN], ids=["mpirun", "srun"])
def test_nodes_that_know_their_number_may_be_started_by_others(found):
    refuse_inside_launcher([*TRAIN, "hardware.num_nodes=2", "launcher.node_rank=1"], found)
    with pytest.raises(RequestError):
        refuse_inside_launcher([*TRAIN, "launcher.node_rank=1"], BY_TORCHRUN)


@pytest.mark.parametrize("words", [[], ["--help"], ["list"], ["explain", "all"], ["plan", "quickstart", "--json"]])
def test_what_only_reads_runs_anywhere(words):
    refuse_inside_launcher(words, BY_TORCHRUN)


def test_a_plan_that_trains_two_steps_does_not_only_read():
    with pytest.raises(RequestError, match="this command runs inside torchrun"):
        refuse_inside_launcher(["plan", "quickstart", "--measure"], BY_TORCHRUN)
