"""Build the commands that start the ranks of a run, as argument lists. Pure functions; nothing runs here.

One rank is `tunebook.train`; torchrun starts several. On several nodes torchrun's c10d rendezvous joins them: the user
types the same command on each node, or srun starts `launch.local` on each, which becomes torchrun. Ray's workers start
one rank each.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from rich.console import Console

from tunebook.config.choices import LauncherName
from tunebook.config.launchers import SlurmConfig
from tunebook.config.override_text import shell_command
from tunebook.config.schema import RunConfig
from tunebook.launch.container import in_container, is_contained
from tunebook.launch.logs import torchrun_log
from tunebook.launch.slurm import JOB_SCRIPT, output_pattern, submit_command
from tunebook.processes import free_port
from tunebook.terminal import print_text

_TRAIN = "tunebook.train"
RANK = "tunebook.launch.rank"  # tunebook.train plus what only several ranks need
_NODE = "tunebook.launch.local"
_EVALUATE = "tunebook.evaluate"
_RAY = "tunebook.launch.ray"
DIES_WITH_PARENT = "--dies-with-parent"
ENDPOINT_LATER = "<host>:<port>"  # of the rendezvous, chosen in the job


def launch_command(config: RunConfig, folder: Path) -> list[str]:
    """Return the command for the user's machine that launches a resolved configuration from its run folder."""
    if config.launcher.name is LauncherName.slurm:
        return submit_command(folder / JOB_SCRIPT)
    return ranks_command(config, folder, endpoint_of(config))


def ranks_command(config: RunConfig, folder: Path, endpoint: str = ENDPOINT_LATER) -> list[str]:
    """Return the command that starts every rank, in a Slurm job or not; by hand, those of this node."""
    if config.launcher.name is LauncherName.ray:
        return [sys.executable, "-m", _RAY, str(folder)]
    if uses_srun(config):
        node = [sys.executable, "-m", _NODE, str(folder), "--endpoint", endpoint]
        return [*step_command(config, folder), *in_container(config, folder, node)]
    return node_command(config, folder, endpoint, is_first=config.launcher.node_rank == 0)


def node_command(config: RunConfig, folder: Path, endpoint: str, *, is_first: bool) -> list[str]:
    """Return the command for the ranks of one node: one process for one rank alone, torchrun for several.

    The first node opens the port of the rendezvous at `endpoint`, in the form HOST:PORT.
    """
    hardware, timeout_s = config.hardware, config.launcher.timeout_s
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    ranks = ["--nproc-per-node", str(hardware.gpus_per_node), "-m", RANK, str(folder)]
    if hardware.num_nodes > 1:
        limits = f"join_timeout={timeout_s},read_timeout={timeout_s},is_host={int(is_first)}"
        return [
            *[*torchrun, "--nnodes", str(hardware.num_nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint],
            *["--rdzv-id", folder.name, "--rdzv-conf", limits, *ranks],
        ]
    if hardware.gpus_per_node == 1:
        return [sys.executable, "-m", _TRAIN, str(folder)]
    return [*torchrun, "--standalone", *ranks]


def endpoint_of(config: RunConfig) -> str:
    """Return host and port of the rendezvous: the user's for nodes started by hand, else a free port of this host."""
    launcher = config.launcher
    if launcher.name is LauncherName.local:
        return f"{launcher.master_address or socket.gethostname()}:{launcher.master_port}"
    return f"{socket.gethostname()}:{free_port()}"


def uses_srun(config: RunConfig) -> bool:
    """Whether srun starts the ranks: in a Slurm job on several nodes or in containers."""
    is_in_job = isinstance(config.launcher, SlurmConfig)
    return is_in_job and (config.hardware.num_nodes > 1 or is_contained(config))


def uses_other_machines(config: RunConfig) -> bool:
    """Whether srun or Ray starts the ranks, on other machines too."""
    return uses_srun(config) or config.launcher.name is LauncherName.ray


def is_later_node(config: RunConfig) -> bool:
    """Whether this is a node of `launcher=local` that joins node 0."""
    return config.launcher.name is LauncherName.local and config.launcher.node_rank > 0


def evaluation_command(config: RunConfig, folder: Path, when: str) -> list[str]:
    """Return the command for an evaluation in a container on the first node of a Slurm job; the host may lack torch."""
    inside = [sys.executable, "-m", _EVALUATE, "--run", str(folder), "--when", when]
    return [*step_command(config), *in_container(config, folder, inside)]


def step_command(config: RunConfig, folder: Path | None = None) -> list[str]:
    """Return srun with one task per node, which ends all nodes if one fails; without a folder, on one node.

    With a folder, each node's torchrun writes its errors to a log of its own.
    """
    nodes = str(config.hardware.num_nodes if folder is not None else 1)
    command = ["srun", "--nodes", nodes, "--ntasks", nodes, "--ntasks-per-node", "1", "--kill-on-bad-exit=1"]
    if folder is not None:
        command.append(f"--error={output_pattern(torchrun_log(folder, 0).parent, 'torchrun-%t.log')}")
    return command


def show_command(command: list[str], console: Console, label: str = "launch") -> None:
    """Print a command as one line that can be pasted into a shell."""
    print_text(f"{label}: {shell_command(command)}", console)
