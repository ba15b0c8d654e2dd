"""The command that starts the ranks of a run, as an argument list. Pure functions; nothing is run here."""

from __future__ import annotations

import sys
from pathlib import Path

from tunebook.config.choices import Generation, LauncherName
from tunebook.config.schema import RayConfig, RunConfig, SlurmConfig
from tunebook.errors import RequestError

_TRAIN = "tunebook.train"
_PORT = 29500  # torchrun's own default


def launch_command(config: RunConfig, folder: Path, python: str = sys.executable) -> list[str]:
    """The argument list for a resolved configuration whose run folder is `folder`."""
    if config.launcher.name is LauncherName.slurm:
        return slurm_command(config, folder, python)
    if config.launcher.name is LauncherName.ray:
        return ray_command(config, folder, python)
    return local_command(config, folder, python)


def local_command(config: RunConfig, folder: Path, python: str) -> list[str]:
    """One process for one rank, torchrun for several on this machine."""
    if config.hardware.gpus_per_node == 1:
        return [python, "-m", _TRAIN, str(folder)]
    return [
        *[python, "-m", "torch.distributed.run", "--standalone"],
        *["--nproc_per_node", str(config.hardware.gpus_per_node)],
        *["-m", _TRAIN, str(folder)],
    ]


def slurm_command(config: RunConfig, folder: Path, python: str) -> list[str]:
    """sbatch with one task per node; each task runs torchrun, which finds the others at the first node."""
    slurm = config.launcher
    assert isinstance(slurm, SlurmConfig)
    hardware = config.hardware
    torchrun = (
        f"{python} -m torch.distributed.run --nnodes {hardware.num_nodes} --nproc_per_node {hardware.gpus_per_node} "
        f"--rdzv_backend c10d --rdzv_id $SLURM_JOB_ID --rdzv_endpoint $HEAD_NODE:{_PORT} -m {_TRAIN} {folder}"
    )
    head = "HEAD_NODE=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"
    options = {
        "--job-name": config.recipe or "tunebook",
        "--nodes": str(hardware.num_nodes),
        "--ntasks-per-node": "1",
        "--partition": slurm.partition,
        "--account": slurm.account,
        "--time": slurm.time_limit,
        "--cpus-per-task": str(slurm.cpus_per_task) if slurm.cpus_per_task else None,
        "--gpus-per-node": str(hardware.gpus_per_node) if hardware.generation is not Generation.cpu else None,
        "--output": str(folder / "slurm-%j.out"),
    }
    said = [f"{key}={value}" for key, value in options.items() if value is not None]
    return ["sbatch", *said, *slurm.extra_args, "--wrap", f"{head}; srun --kill-on-bad-exit=1 bash -c '{torchrun}'"]


def ray_command(config: RunConfig, folder: Path, python: str) -> list[str]:
    """Ray's own job client: the ranks of one node are one job that asks for that node's GPUs.

    Raises: RequestError for several nodes, which one such job cannot span.
    """
    ray, hardware = config.launcher, config.hardware
    assert isinstance(ray, RayConfig) and hardware.gpus_per_node is not None
    if hardware.num_nodes > 1:
        raise RequestError(
            f"launcher=ray with hardware.num_nodes={hardware.num_nodes}: a Ray job of this version runs on one node; "
            "try launcher=slurm, or hardware.num_nodes=1",
            problem_id="ray-several-nodes",
        )
    resources = ["--entrypoint-num-cpus", str(ray.cpus_per_worker * hardware.gpus_per_node)]
    if hardware.generation is not Generation.cpu:
        resources += ["--entrypoint-num-gpus", str(hardware.gpus_per_node)]
    address = [] if ray.address == "auto" else ["--address", ray.address]
    return ["ray", "job", "submit", *address, *resources, "--", *local_command(config, folder, python)]
