"""Connect to a Ray cluster; `python -m tunebook.launch.ray.cluster ADDRESS` prints what it has, as one line of JSON."""

from __future__ import annotations

import json
import logging
import os
import sys
from importlib import import_module
from typing import Any

_UNTIL_THE_HEAD_IS_GONE_S = 30  # Ray's own default is 60


def connect(address: str, runtime_env: dict[str, Any] | None = None) -> Any:
    """Connect this process to the cluster at an address, `auto` or `local`; returns the package `ray`.

    Raises: ConnectionError or RuntimeError, by Ray, when there is none.
    """
    # Read when Ray is imported. Nothing leaves the machine; relative paths mean what they mean elsewhere.
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
        said = {"resources": ray.cluster_resources()}
        if sys.argv[1] == "local":
            ray.shutdown()  # it was started for this question
    except Exception as error:  # Ray's, which it documents no base class of
        said = {"error": str(error).strip().splitlines()[0]}
    print(json.dumps(said), flush=True)
    os._exit(0)  # without Ray's own leave-taking, which waits for the head


if __name__ == "__main__":
    main()
