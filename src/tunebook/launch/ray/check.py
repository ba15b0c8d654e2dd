"""Check that a Ray run can start before anything is prepared: the package, the cluster, its size.

`python -m tunebook.launch.ray.check ADDRESS` prints a cluster's resources as one line of JSON.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import socket
import sys
from importlib import import_module, metadata
from typing import Any

from tunebook.config.book import book_root
from tunebook.config.choices import Generation
from tunebook.config.schema import RayConfig, RunConfig, world_size
from tunebook.errors import Problem, RequestError, RulesError, TunebookError, first_line
from tunebook.hardware.image import read_image
from tunebook.processes import ask

_RAY_LOCK = "docker/requirements-ray.lock"
CLUSTER_TIMEOUT_S = 60.0
_UNTIL_THE_HEAD_IS_GONE_S = 30  # Ray's own default is 60
_CONNECT_TIMEOUT_S = 10.0  # Ray itself retries for half a minute and more


def check_ray(config: RunConfig) -> None:
    """Raises: RulesError without the package, RequestError if the cluster is unreachable or too small."""
    settings = config.launcher
    assert isinstance(settings, RayConfig)
    try:
        metadata.version("ray")
    except metadata.PackageNotFoundError as error:
        message = f"the package ray is not installed in this {'image' if read_image() else 'environment'}"
        problem = Problem(id="missing-package", key="launcher", message=message, fix=_how_to_get_ray())
        raise RulesError([problem]) from error
    if settings.address != "local":
        _check_size(config, cluster_resources(settings.address), "the Ray cluster has")
    elif (resources := local_resources()) is not None:
        _check_size(config, resources, "launcher.address=local: on this machine Ray has")


def _how_to_get_ray() -> str:
    if read_image() is not None:
        return f"an image of your own with {_RAY_LOCK} on top (docker/README.md), or WHERE=local after make"
    lock = book_root() / _RAY_LOCK
    if not lock.is_file():  # installed as a package, without a checkout
        return "pip install 'tunebook[ray]'"
    return f"{shlex.quote(sys.executable)} -m pip install --no-deps --require-hashes -r {shlex.quote(str(lock))}"


def cluster_resources(address: str, timeout_s: float = CLUSTER_TIMEOUT_S) -> dict[str, float]:
    """Return a cluster's total resources. A child process asks, because Ray's client exits when it gives up.

    Raises: RequestError if the cluster does not reply.
    """
    if address != "auto":
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
        except OSError as error:
            raise _out_of_reach(address, error.strerror or str(error)) from error
    return _query(address, timeout_s)


def _query(address: str, timeout_s: float) -> dict[str, float]:
    answer = ask(_command(address), timeout_s=timeout_s)
    if answer.is_late:
        raise _out_of_reach(address, str(answer.problem))
    try:
        answered: dict[str, Any] = json.loads(answer.text.strip().rpartition("\n")[2])
    except ValueError:
        raise _out_of_reach(address, answer.last_words or str(answer.problem)) from None
    if "error" in answered:
        raise _out_of_reach(address, answered["error"])
    return {name: float(value) for name, value in answered["resources"].items()}


def local_resources() -> dict[str, float] | None:
    """Return the resources that Ray counts on this machine, from a temporary local cluster; None if that fails.

    Ray's count may differ from the cores that this process may use. Ray ignores CPU affinity, so it counts more cores
    under taskset, and fewer if a container's CPU share is limited.
    """
    try:
        return _query("local", CLUSTER_TIMEOUT_S)
    except RequestError:
        return None  # the run's own start reports the cause, with its own timeout


def _command(address: str) -> list[str]:
    return [sys.executable, "-m", "tunebook.launch.ray.check", address]


def _out_of_reach(address: str, why: str) -> TunebookError:
    return RequestError(
        f"launcher.address={address}: no Ray cluster answers there ({why}). Type this on a machine of the cluster, "
        "with launcher.address=HOST:6379 of its head node; or start one here with launcher.address=local",
        problem_id="ray-out-of-reach",
    )


def worker_resources(config: RunConfig) -> dict[str, float]:
    """Return the resources of one worker."""
    settings = config.launcher
    assert isinstance(settings, RayConfig)
    gpu = {"GPU": 1.0} if config.hardware.generation is not Generation.cpu else {}
    return {"CPU": float(settings.cpus_per_worker)} | gpu


def _check_size(config: RunConfig, resources: dict[str, float], subject: str) -> None:
    count = world_size(config)
    for name, each in worker_resources(config).items():
        has = resources.get(name, 0.0)
        if has < count * each:
            raise RequestError(
                f"{subject} {has:g} {name}s, and {count} workers with {each:g} each need {count * each:g}; "
                "lower hardware.num_nodes, hardware.gpus_per_node or launcher.cpus_per_worker",
                problem_id="ray-too-small",
            )


def connect(address: str, runtime_env: dict[str, Any] | None = None) -> Any:
    """Connect this process to the cluster at an address, `auto` or `local`; return the package `ray`.

    Raises: ConnectionError or RuntimeError, from Ray, if there is no cluster.
    """
    # Ray reads these on import: no usage statistics, and relative paths start in the usual working folder.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(_UNTIL_THE_HEAD_IS_GONE_S))
    ray: Any = import_module("ray")
    here = {"include_dashboard": False} if address == "local" else {}
    ray.init(address=address, runtime_env=runtime_env, logging_level=logging.WARNING, **here)
    return ray


def main() -> None:
    """Print `{"resources": ...}` or `{"error": ...}`."""
    try:
        ray = connect(sys.argv[1])
        answered = {"resources": ray.cluster_resources()}
        if sys.argv[1] == "local":
            ray.shutdown()  # it was started only for this query
    except Exception as error:  # from Ray, which documents no base class
        answered = {"error": first_line(error)}
    print(json.dumps(answered), flush=True)
    os._exit(0)  # skips Ray's own shutdown, which waits for the head


if __name__ == "__main__":
    main()
