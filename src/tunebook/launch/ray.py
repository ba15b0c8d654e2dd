"""Ray Train: check the cluster, start one worker per rank, and run each rank in a child process of its worker.

`python -m tunebook.launch.ray RUN_FOLDER` runs Ray Train's TorchTrainer. Ray places the workers, gives each its GPU,
and restarts all of them when one is lost. The ranks then resume from the newest checkpoint of the run folder.
`python -m tunebook.launch.ray --resources ADDRESS` prints a cluster's resources as JSON.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tunebook.config.choices import Generation
from tunebook.config.frozen import load_config
from tunebook.config.launchers import RayConfig
from tunebook.config.schema import RunConfig, world_size
from tunebook.errors import RequestError, counted
from tunebook.launch.commands import DIES_WITH_PARENT, RANK
from tunebook.launch.local import load_shared_config, refuse_other_node
from tunebook.launch.logs import rank_log
from tunebook.processes import ask, ending, free_port, start, stop_when_input_ends
from tunebook.record.run_folder import RUN_FILE, STOP_FILE, outcome_file, write_outcome
from tunebook.train.environment import handed_on, rank_environment

CLUSTER_TIMEOUT_S = 60.0
_UNTIL_THE_HEAD_IS_GONE_S = 30  # Ray's own default is 60
# Endings that were requested, or that another attempt would not change.
_DECIDED = (0, 2, 3, 4, 6, 7)
_ASK_EVERY_S = 1.0


def check_ray(config: RunConfig) -> None:
    """Raises: RequestError without the package, and if the cluster is unreachable or too small."""
    settings = config.launcher
    assert isinstance(settings, RayConfig)
    if find_spec("ray") is None:
        raise RequestError(
            "launcher=ray: the package ray is not installed; type: pip install 'tunebook[ray]', or in a checkout: "
            "python -m pip install --no-deps --require-hashes -r docker/requirements-ray.lock (for "
            "containers see docker/README.md)",
            problem_id="missing-package",
        )
    if settings.address == "local":
        return
    resources = cluster_resources(settings.address)
    count = world_size(config)
    for name, share in worker_resources(config).items():
        total, needed = resources.get(name, 0.0), count * share
        if total < needed:
            raise RequestError(
                f"the Ray cluster has {total:g} of the {needed:g} {name}s that {counted(count, 'worker')} need; "
                "lower hardware.num_nodes, hardware.gpus_per_node or launcher.cpus_per_worker",
                problem_id="ray-too-small",
            )


def cluster_resources(address: str, timeout_s: float = CLUSTER_TIMEOUT_S) -> dict[str, float]:
    """Return a cluster's total resources. A child process asks, because Ray's client exits when it gives up.

    Raises: RequestError if the cluster does not reply.
    """
    answer = ask([sys.executable, "-m", "tunebook.launch.ray", "--resources", address], timeout_s=timeout_s)
    if answer.failure is not None:
        raise RequestError(
            f"launcher.address={address}: no Ray cluster answers there ({answer.failure}). Type this on a machine of "
            "the cluster, with launcher.address=HOST:6379 of its head node; or start one here with "
            "launcher.address=local",
            problem_id="ray-out-of-reach",
        )
    resources: dict[str, float] = json.loads(answer.text.strip().rpartition("\n")[2])
    return resources


def worker_resources(config: RunConfig) -> dict[str, float]:
    """Return the resources of one worker."""
    settings = config.launcher
    assert isinstance(settings, RayConfig)
    gpu = {"GPU": 1.0} if config.hardware.generation is not Generation.cpu else {}
    return {"CPU": float(settings.cpus_per_worker)} | gpu


def connect(address: str, variables: dict[str, str] | None = None) -> Any:
    """Connect this process to the cluster at an address, `auto` or `local`; return the package `ray`.

    `variables` are those of the workers.

    Raises: ConnectionError or RuntimeError, from Ray, if there is no cluster.
    """
    # Ray reads these on import: no usage statistics, and relative paths start in the usual working folder.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(_UNTIL_THE_HEAD_IS_GONE_S))
    ray: Any = import_module("ray")
    here = {"include_dashboard": False} if address == "local" else {}
    ray.init(address=address, runtime_env={"env_vars": variables or {}}, logging_level=logging.WARNING, **here)
    return ray


def make_trainer(config: RunConfig, folder: Path) -> Any:
    """Return Ray Train's trainer, which starts one worker per rank."""
    train, torch_train = import_module("ray.train"), import_module("ray.train.torch")
    settings = config.launcher
    assert isinstance(settings, RayConfig)
    return torch_train.TorchTrainer(
        work,
        train_loop_config={"folder": str(folder), "working_folder": str(Path.cwd())},
        # Only the workers use this process group; their ranks make their own for training.
        torch_config=torch_train.TorchConfig(backend="gloo", timeout_s=settings.timeout_s),
        scaling_config=train.ScalingConfig(
            num_workers=world_size(config),
            use_gpu=config.hardware.generation is not Generation.cpu,
            resources_per_worker=worker_resources(config),
            placement_strategy="STRICT_PACK" if config.hardware.num_nodes == 1 else "PACK",
        ),
        run_config=train.RunConfig(
            name="ray",
            storage_path=str(folder),
            failure_config=train.FailureConfig(
                max_failures=settings.max_failures,
                controller_failure_limit=0,
                preemption_grace_s=settings.stop_timeout_s,
            ),
        ),
    )


def work(settings: dict[str, str]) -> None:
    """Run one worker: run the rank, and raise if Ray should restart all workers.

    The rank is a child process because Ray runs this function in a thread, where no signal can be handled.
    """
    train = import_module("ray.train")
    context, folder, working_folder = train.get_context(), Path(settings["folder"]), Path(settings["working_folder"])
    rank, host = int(context.get_world_rank()), socket.gethostname()
    config = load_shared_config(folder)
    outcome_file(folder, rank).unlink(missing_ok=True)  # of an earlier attempt
    if context.get_local_rank() == 0:
        try:
            refuse_other_node(config, folder)
        except RequestError as error:
            write_outcome(folder, rank=rank, exit_code=error.exit_code, reason=error.message)
            raise
    environment = rank_environment(config, os.environ) | _rank_variables(context)
    # In every worker, since Ray makes them agree; from here on no worker waits for all others.
    has_notice = watch_notices(train.get_preemption_info, folder / STOP_FILE)
    with start(
        [sys.executable, "-m", RANK, str(folder), DIES_WITH_PARENT],
        environment,
        working_folder=working_folder if working_folder.is_dir() else folder,
    ) as process:
        exit_code = process.wait()
    if exit_code in _DECIDED or has_notice.is_set():  # after a notice, nothing must restart here
        return
    reason = f"rank {rank} on {host} {ending(exit_code)}; its output is in {rank_log(folder, rank)}"
    if not outcome_file(folder, rank).is_file():
        write_outcome(folder, rank=rank, exit_code=1, reason=reason)
    raise RuntimeError(reason)


def _rank_variables(context: Any) -> dict[str, str]:
    """Return the variables that torchrun would set; rank 0 opens its store on another port than its worker's."""
    port = import_module("ray.train.collective").broadcast_from_rank_zero(free_port())
    return {
        "RANK": str(context.get_world_rank()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "GROUP_RANK": str(context.get_node_rank()),
        "MASTER_ADDR": os.environ["MASTER_ADDR"],
        "MASTER_PORT": str(port),
    }


def watch_notices(get_notice: Callable[[], Any], stop_file: Path) -> threading.Event:
    """Poll Ray Train for a preemption notice in a thread; the event is set once there is one.

    The notice is written into the file by which the ranks are asked to stop. Ray has one when a node is drained: by its
    autoscaler, by a cloud's operator for a spot machine, or by `ray start --block` itself on SIGTERM, as in a pod that
    Kubernetes deletes. `ray.train.get_preemption_info` waits for the same call of every worker.
    """
    has_come = threading.Event()

    def watch() -> None:
        try:
            while (notice := get_notice()) is None:
                time.sleep(_ASK_EVERY_S)
        except Exception:  # from Ray: it ends this worker, or has lost another
            return
        has_come.set()
        stop_file.write_text(f"a preemption notice for rank {', '.join(map(str, notice.preempted_ranks))}")

    threading.Thread(target=watch, name="notices", daemon=True).start()  # it may wait for a worker that is gone
    return has_come


def main() -> int:
    """Start the workers and wait for them; the run's outcome is in its folder."""
    if sys.argv[1] == "--resources":
        print(json.dumps(connect(sys.argv[2]).cluster_resources()), flush=True)
        os._exit(0)  # skips Ray's own shutdown, which waits for the head
    stop_when_input_ends()
    folder = Path(sys.argv[1])
    config = load_config(folder / RUN_FILE)
    settings = config.launcher
    assert isinstance(settings, RayConfig)
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", str(settings.timeout_s))
    ray = connect(settings.address, handed_on(os.environ))
    try:
        make_trainer(config, folder).fit()
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    # Ray sends functions of a module by their name, but those of a program as they are.
    sys.exit(import_module("tunebook.launch.ray").main())
