"""Detects and removes the environment variables of other launchers.

torch, accelerate, transformers and DeepSpeed read their number of processes, precision and strategy from variables that
launchers set. Tunebook is a launcher itself and sets what its ranks need (`train.environment`, torchrun). Variables of
another launcher would silently change what is trained, so every process that Tunebook starts gets none of them.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence

from tunebook.config.override_text import shell_command
from tunebook.errors import RequestError

# Sources: the variables that accelerate 1.15, transformers 5.23, DeepSpeed 0.19 and torch 2.13 read. By launcher:
_NAMES = frozenset(
    {
        # torchrun, PyTorchJob of Kubeflow, `deepspeed`
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "NODE_RANK", "NNODES", "NPROC", "NPROC_PER_NODE"),
        *("CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCH_WORKER_SERVER_SOCKET"),
        # accelerate's notebook launcher; XLA and SageMaker
        *("FORK_LAUNCHED", "USE_TORCH_XLA", "SM_HP_MP_PARAMETERS", "SM_FRAMEWORK_PARAMS"),
    }
)
_PREFIXES = (
    *("TORCHELASTIC_", "TORCH_ELASTIC_", "PET_"),  # torchrun: for its ranks, and its options
    *("ACCELERATE_", "FSDP_", "DEEPSPEED_", "MEGATRON_LM_", "PARALLELISM_CONFIG_"),  # accelerate launch
    *("OMPI_", "PMI_", "PMIX_", "MV2_", "MPI_LOCAL", "PALS_"),  # MPI, and srun on behalf of MPI
    *("XLA_", "XRT_", "PJRT_", "TPU_", "NEURON_", "PT_HPU_", "SMDATAPARALLEL_"),  # other accelerators' launchers
)
# Commands that only read records or plan, so that several copies are harmless.
_READ_ONLY = frozenset({"explain", "list", "plan", "report", "diff"})
_MEASURE = "--measure"  # an option of `plan` that trains two steps
_COUNTS = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")
_NODE_RANK = "launcher.node_rank="


def is_of_another_launcher(name: str) -> bool:
    """Whether another launcher configures its processes by this variable."""
    return name in _NAMES or name.startswith(_PREFIXES)


def without_other_launchers(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables of other launchers."""
    return {name: text for name, text in environment.items() if not is_of_another_launcher(name)}


def remove_other_launchers(environment: MutableMapping[str, str]) -> list[str]:
    """Remove the variables of other launchers from an environment; returns their names in sorted order."""
    names = sorted(filter(is_of_another_launcher, environment))
    for name in names:
        del environment[name]
    return names


def removal_notice(names: Sequence[str]) -> str:
    """One line about the variables that were removed."""
    return (
        f"removed from the environment: {', '.join(names)}. They configure another launcher's processes; Tunebook "
        "starts its own and takes their number, precision and strategy from its configuration alone"
    )


def is_read_only(words: Sequence[str]) -> bool:
    """Whether a command starts no computation: it needs no notice and may run anywhere."""
    command = next((word for word in words if not word.startswith("-")), None)
    return command is None or (command in _READ_ONLY and _MEASURE not in words)


def refuse_inside_launcher(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Refuse a command that another launcher runs, usually several times at once. Raises: RequestError.

    `words` are the arguments after `tunebook`. A copy with its own launcher.node_rank is allowed: it is one node of a
    multi-node run, which mpirun and srun may start.
    """
    found = _launcher_around(environment)
    if found is None or is_read_only(words):
        return
    launcher, sign, may_start_nodes = found
    if may_start_nodes and any(word.startswith(_NODE_RANK) for word in words):
        return
    own = [word for word in words if not word.startswith(("--local_rank", "--local-rank"))]
    raise RequestError(
        f"this command runs inside {launcher} ({sign} is set), and Tunebook starts its own ranks: each copy of the "
        "command would be a run of its own, or wait for ranks that never come. Type it without that launcher: "
        f"`{shell_command(['tunebook', *own])}`{_for_as_many(own, environment)}. If no launcher is at work, the "
        f"variable is left over from one: unset {sign}",
        problem_id="inside-launcher",
    )


def _launcher_around(environment: Mapping[str, str]) -> tuple[str, str, bool] | None:
    """The launcher that runs this command, the variable that shows it, and whether it may start the nodes of a run."""
    by_accelerate = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_MODE")
    if all(name in environment for name in by_accelerate) or "ACCELERATE_CONFIG_DS_FIELDS" in environment:
        sign = by_accelerate[-1] if by_accelerate[-1] in environment else "ACCELERATE_CONFIG_DS_FIELDS"
        return "accelerate launch", sign, False
    if "TORCHELASTIC_RUN_ID" in environment:
        return "torchrun", "TORCHELASTIC_RUN_ID", False
    if "CROSS_SIZE" in environment and "RANK" in environment:
        return "deepspeed", "CROSS_SIZE", False
    is_in_slurm = "SLURM_JOB_ID" in environment
    for sign in ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE"):
        # Slurm's srun sets PMI_SIZE for every step, even for the single task of an interactive shell.
        if sign in environment and not (is_in_slurm and environment[sign] == "1"):
            return "srun" if is_in_slurm and sign == "PMI_SIZE" else "mpirun", sign, True
    if environment.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return "srun", "SLURM_STEP_NUM_TASKS", True
    return None


def _for_as_many(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """The overrides for as many ranks as the other launcher started on this node."""
    count = next((environment[name] for name in _COUNTS if environment.get(name, "1") not in ("", "1")), None)
    if count is None or any(word.startswith("hardware.gpus_per_node=") for word in words):
        return ""
    return f", with hardware.gpus_per_node={count} (and parallelism=ddp or another that uses several) for {count} ranks"
