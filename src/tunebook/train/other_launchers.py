"""Refuses a command that another launcher runs, or for which another launcher left variables in the environment.

torch, accelerate, transformers and DeepSpeed read their number of processes, precision and strategy from variables that
launchers set. Tunebook is a launcher itself and sets what its ranks need (`train.environment`, torchrun).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tunebook.errors import RequestError

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PREFIXES = ("TORCHELASTIC_", "PET_", "ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
_OF_MPI = ("OMPI_COMM_", "MV2_COMM_", "PMI_", "PMIX_")  # srun sets some, too, also for a single task
_COUNTS = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_READ_ONLY = ("explain", "list", "plan", "report", "diff", "doctor")  # several copies of these are harmless


def without_other_launchers(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables of other launchers: of srun and Ray, which start Tunebook's own."""
    others = (*_PREFIXES, *_OF_MPI)
    return {name: text for name, text in environment.items() if name not in _NAMES and not name.startswith(others)}


def refuse_inside_launcher(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raises: RequestError inside another launcher. `arguments` are those after `tunebook`.

    mpirun and srun may start the nodes of a run on several, each with its own launcher.node_rank.
    """
    command = next((argument for argument in arguments if not argument.startswith("-")), None)
    if command is None or command in _READ_ONLY:
        return
    variables = sorted(name for name in environment if name in _NAMES or name.startswith(_PREFIXES))
    if not any(argument.startswith("launcher.node_rank=") for argument in arguments):
        variables += [name for name in _COUNTS if environment.get(name, "1") != "1"]
    if variables:
        raise RequestError(
            f"another launcher has set {', '.join(variables)}, and Tunebook starts its own ranks: type the command "
            "without torchrun, accelerate launch, deepspeed, mpirun or srun, with hardware.gpus_per_node=N for N "
            f"ranks; where none of them runs, first: unset {' '.join(variables)}",
            problem_id="inside-launcher",
        )
