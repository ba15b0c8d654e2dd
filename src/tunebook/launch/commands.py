"""Build the commands that start the ranks of a run, as argument lists. Pure functions; nothing runs here.

On one node the command is `tunebook.train` for one rank, torchrun for several. On several nodes, the user or srun
starts `tunebook.launch.node` on each; it joins the launcher and then starts torchrun. For Ray see `launch.ray`.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from rich.console import Console

from tunebook.config.choices import LauncherName
from tunebook.config.override_text import shell_command
from tunebook.config.schema import RunConfig, SlurmConfig
from tunebook.launch.slurm.client import submit_command
from tunebook.launch.slurm.container import in_container, is_contained
from tunebook.record.contamination import CHECK, is_checked_by_evaluation, needs_check
from tunebook.terminal import print_text

_TRAIN = "tunebook.train"
_RANK = "tunebook.launch.rank"  # tunebook.train plus what only several ranks need
_NODE = "tunebook.launch.node"
_EVALUATE = "tunebook.evaluate"
_RAY = "tunebook.launch.ray"
_SLURM_JOB = "tunebook.commands.slurm_job"
JOB_SCRIPT = "job.sh"
DIES_WITH_PARENT = "--dies-with-parent"
ENDPOINT_LATER = "<address>:<port>"  # of the launcher, known once it listens


def launch_command(config: RunConfig, folder: Path) -> list[str]:
    """Return the command for the user's machine that launches a resolved configuration from its run folder."""
    if config.launcher.name is LauncherName.slurm:
        return submit_command(folder / JOB_SCRIPT)
    return ranks_command(config, folder)


def ranks_command(config: RunConfig, folder: Path, endpoint: str = ENDPOINT_LATER) -> list[str]:
    """Return the command that starts every rank, in a Slurm job or not; `endpoint` is the launcher's."""
    if config.launcher.name is LauncherName.ray:
        return [sys.executable, "-m", _RAY, str(folder), "--endpoint", endpoint]
    if not has_rendezvous(config):
        return one_node_command(config, folder)
    if isinstance(config.launcher, SlurmConfig):
        return [*step_command(config), *in_container(config, folder, node_command(folder, endpoint, None))]
    return node_command(folder, endpoint, config.launcher.node_rank)


def has_rendezvous(config: RunConfig) -> bool:
    """Whether processes on each node join the launcher: on several nodes, in containers, and under Ray."""
    return config.hardware.num_nodes > 1 or is_contained(config) or config.launcher.name is LauncherName.ray


def one_node_command(config: RunConfig, folder: Path) -> list[str]:
    """Return the command for one node: one process for one rank, torchrun for several."""
    if config.hardware.gpus_per_node == 1:
        return [sys.executable, "-m", _TRAIN, str(folder)]
    return [
        *[sys.executable, "-m", "torch.distributed.run", "--standalone"],
        *["--nproc_per_node", str(config.hardware.gpus_per_node)],
        *["-m", _RANK, str(folder)],
    ]


def torchrun_command(config: RunConfig, folder: Path, node: int, master_address: str, master_port: int) -> list[str]:
    """Return the torchrun command of one node of several; the rendezvous of the ranks is on node 0."""
    return [
        *[sys.executable, "-m", "torch.distributed.run"],
        *["--nnodes", str(config.hardware.num_nodes), "--node_rank", str(node)],
        *["--nproc_per_node", str(config.hardware.gpus_per_node)],
        *["--master_addr", master_address, "--master_port", str(master_port)],
        *["--rdzv_conf", f"timeout={config.launcher.start_timeout_s}"],
        *["-m", _RANK, str(folder)],
    ]


def rank_command(folder: Path) -> list[str]:
    """Return the command that a Ray worker runs for one rank, whose environment names it; it dies with the worker."""
    return [sys.executable, "-m", _RANK, str(folder), DIES_WITH_PARENT]


def node_command(folder: Path, endpoint: str, node: int | None) -> list[str]:
    """Return the command for one node; without a number, the node takes its number from Slurm."""
    number = [] if node is None else ["--node", str(node)]
    return [sys.executable, "-m", _NODE, str(folder), "--endpoint", endpoint, *number]


def evaluation_command(config: RunConfig, folder: Path, endpoint: str, when: str) -> list[str]:
    """Return the command for an evaluation in a container on the first node of a Slurm job; the host may lack torch."""
    inside = [*node_command(folder, endpoint, None), "--evaluate", when]
    return [*step_command(config, 1), *in_container(config, folder, inside)]


def evaluation_worker(folder: Path, when: str) -> list[str]:
    """Return the command that a node runs in a container to evaluate a run."""
    return [sys.executable, "-m", _EVALUATE, "--run", str(folder), "--when", when]


def job_commands(config: RunConfig, folder: Path) -> list[list[str]]:
    """Return the commands that a Slurm job runs on its nodes in order; empty if the job's own process trains alone."""
    if not has_rendezvous(config):
        return []
    evaluation = config.evaluation
    is_evaluated_inside = bool(evaluation.tasks) and is_contained(config)
    commands = [ranks_command(config, folder)]
    if is_evaluated_inside and evaluation.before:
        commands.insert(0, evaluation_command(config, folder, ENDPOINT_LATER, "before"))
    if is_contained(config) and needs_check(config) and not is_checked_by_evaluation(config):
        commands.insert(0, evaluation_command(config, folder, ENDPOINT_LATER, CHECK))
    if is_evaluated_inside and evaluation.after:
        commands.append(evaluation_command(config, folder, ENDPOINT_LATER, "after"))
    return commands


def step_command(config: RunConfig, num_nodes: int | None = None) -> list[str]:
    """Return srun with one task per node. If one task fails, the launcher handles the others, so that they can save."""
    nodes = str(num_nodes or config.hardware.num_nodes)
    return ["srun", "--nodes", nodes, "--ntasks", nodes, "--ntasks-per-node", "1", "--kill-on-bad-exit=0"]


def job_body(folder: Path) -> str:
    """Return the last line of a job script; `exec` makes Slurm's signals reach the launcher, not a shell."""
    return f"exec {shlex.join([sys.executable, '-m', _SLURM_JOB, str(folder)])}"


def show_command(command: list[str], console: Console, what: str = "launch") -> None:
    """Print a command as one line that can be pasted into a shell."""
    print_text(f"{what}: {shell_command(command)}", console)
