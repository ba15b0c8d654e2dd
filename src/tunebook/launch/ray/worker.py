"""What Ray runs once per rank: a rank in a process of its own, followed as on every other launcher.

In a process of its own, because Ray runs this function in a thread, where no signal can be handled, and because a rank
that hangs must be ended without losing who could say so.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from tunebook.config.frozen import load_config
from tunebook.errors import RequestError
from tunebook.launch.calling import (
    TOKEN_VARIABLE,
    call_launcher,
    folder_problem,
    hello,
    node_facts,
    socket_interface,
)
from tunebook.launch.commands import rank_command
from tunebook.launch.local import rank_environment, start_command
from tunebook.launch.logs import rank_log
from tunebook.launch.node import Agent
from tunebook.launch.ray.notices import NoticeWatch
from tunebook.record.files import RUN_FILE

# Endings that another attempt would not change, or that were asked for.
_DECIDED = (0, 2, 3, 4, 6, 7)


def work(settings: dict[str, str]) -> None:
    """One worker: call the launcher, run the rank, and raise where Ray should start all workers again."""
    train = import_module("ray.train")
    context = train.get_context()
    rank, folder = int(context.get_world_rank()), Path(settings["folder"])
    os.environ[TOKEN_VARIABLE] = settings["token"]
    problem = None if (folder / RUN_FILE).is_file() else folder_problem(folder)
    if problem is not None:
        raise RequestError(problem, problem_id="folder-not-shared")
    config = load_config(folder / RUN_FILE)
    store = _open_store() if rank == 0 else None
    facts = node_facts(config, is_judged=context.get_local_rank() == 0)
    line, reached_at = call_launcher(settings["meet"], config.launcher.start_timeout_s, print)
    try:
        port = store.port if store is not None else 0
        place = import_module("ray").get_runtime_context().get_node_id()
        hello(line, reached_at, node=rank, ranks=[rank], port=port, facts=facts, place=place)
        agent = Agent(line=line, stop_timeout_s=config.launcher.stop_timeout_s)
        # Every worker asks, since Ray has them agree; one of them tells.
        watch = NoticeWatch(train.get_preemption_info, agent.notices.append if rank == 0 else lambda notice: None)
        watch.start()
        go = agent.wait_for_go()
        environment = rank_environment(config, os.environ) | _rank_variables(context, go)
        if interface := socket_interface(line.own_address):
            environment.setdefault("GLOO_SOCKET_IFNAME", interface)
        working_folder = Path(settings["working_folder"])
        started = start_command(
            rank_command(folder, sys.executable),
            environment,
            working_folder=working_folder if working_folder.is_dir() else folder,
        )
        exit_code = agent.follow(started)
        agent.wait_for_end(exit_code)
    finally:
        line.close()
    if exit_code not in _DECIDED and not watch.has_come:  # after a notice nobody is to be started here again
        raise RuntimeError(f"rank {rank} ended with exit code {exit_code}; it says why in {rank_log(folder, rank)}")


def _open_store() -> Any:
    """The store in which the ranks find each other; it lives as long as this worker."""
    from datetime import timedelta

    from torch._C._distributed_c10d import TCPStore  # torch.distributed has it too, but not to mypy

    return TCPStore("0.0.0.0", 0, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False)


def _rank_variables(context: Any, go: dict[str, Any]) -> dict[str, str]:
    """What torchrun would set."""
    return {
        "RANK": str(context.get_world_rank()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "GROUP_RANK": str(context.get_node_rank()),
        "MASTER_ADDR": str(go["master_address"]),
        "MASTER_PORT": str(go["master_port"]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is not rank 0's
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
