"""The part of the schema for launchers: what starts the ranks of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from tunebook.config.choices import ContainerRuntime, LauncherName
from tunebook.config.ranges import number


@dataclass(kw_only=True)
class LauncherConfig:
    """What starts the ranks, and how long they wait for each other."""

    name: LauncherName = MISSING  # set by launcher=NAME
    # Time until every node has joined, and that a rank waits for the others in one collective
    timeout_s: int = number(600, at_least=1, unit="seconds")
    # Time ranks get to save and end when their launcher is lost, or Slurm or Ray takes a machine away
    stop_timeout_s: int = number(300, at_least=1, unit="seconds")
    # launcher=local on several nodes: the number of this node; node 0 prepares, evaluates and keeps records
    node_rank: int = number(0, at_least=0)
    # launcher=local on several nodes: node 0's name or address, as the other nodes reach it
    master_address: str | None = None
    # launcher=local on several nodes: a port of node 0 that the others can reach; 29400 is torchrun's usual one
    master_port: int = number(29400, at_least=1, at_most=65535)


@dataclass(kw_only=True)
class SlurmConfig(LauncherConfig):
    """`sbatch` of a script that is rendered into the run folder; one task per node, torchrun inside it."""

    partition: str | None = None  # the partition of the job; null: the cluster's default
    account: str | None = None  # the account that is charged; null: the user's default
    time_limit: str | None = None  # as sbatch takes it: minutes, or days-hours:minutes:seconds; null: the partition's
    # Cores of a node; null: whole nodes, with all cores and memory (--exclusive --mem=0)
    cpus_per_task: int | None = number(None, at_least=1, unit="cores")
    wait: bool = False  # stay until the job has ended, show what it prints, end with its exit code; Ctrl-C stops it
    requeue: bool = True  # a job that was preempted, or reached its time limit, saves and resumes in another turn
    # The image the ranks run in; null: no container, the ranks run in the environment of the command
    container_image: str | None = None
    container_runtime: ContainerRuntime = ContainerRuntime.pyxis  # what runs the container
    container_mounts: list[str] = field(default_factory=list)  # further folders, mounted at the same path
    container_python: str = "python"  # the image's interpreter, with Tunebook installed
    extra_args: list[str] = field(default_factory=list)  # further sbatch options, such as --constraint=a100


@dataclass(kw_only=True)
class RayConfig(LauncherConfig):
    """Ray Train's TorchTrainer, one worker per GPU."""

    # Address of the cluster, HOST:PORT; auto: the one this machine is part of; local: one of its own
    address: str = "auto"
    cpus_per_worker: int = number(1, at_least=1, unit="cores")  # CPU cores that Ray reserves for each worker
    # How often a run that lost a worker is started again, from its newest checkpoint
    max_failures: int = number(3, at_least=0)
