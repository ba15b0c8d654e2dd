"""The function that Ray runs once per rank: it runs the rank in a child process, followed as with every launcher.

It needs a child process because Ray runs this function in a thread, where no signal can be handled. Also, a rank that
hangs must be ended without losing the process that reports it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from tunebook.config.frozen import load_config
from tunebook.errors import RequestError
from tunebook.launch.commands import rank_command
from tunebook.launch.logs import rank_log
from tunebook.launch.node import Agent, join_launcher
from tunebook.launch.node_facts import folder_problem, node_facts
from tunebook.launch.rendezvous import TOKEN_VARIABLE, open_store
from tunebook.launch.supervise import start_command
from tunebook.record.run_folder import RUN_FILE
from tunebook.train.environment import rank_environment

# Endings that were requested, or that another attempt would not change.
_DECIDED = (0, 2, 3, 4, 6, 7)
_ASK_EVERY_S = 1.0


def work(settings: dict[str, str]) -> None:
    """Run one worker: join the launcher, run the rank, and raise if Ray should restart all workers."""
    train = import_module("ray.train")
    context = train.get_context()
    rank, folder = int(context.get_world_rank()), Path(settings["folder"])
    os.environ[TOKEN_VARIABLE] = settings["token"]
    problem = None if (folder / RUN_FILE).is_file() else folder_problem(folder)
    if problem is not None:
        raise RequestError(problem, problem_id="folder-not-shared")
    config = load_config(folder / RUN_FILE)
    # The store for the rendezvous of the ranks; it lives as long as this worker.
    store = open_store("0.0.0.0", 0, is_master=True) if rank == 0 else None
    facts = node_facts(config, checks_machine=context.get_local_rank() == 0)
    facts["port"] = store.port if store is not None else 0
    facts["machine"] = import_module("ray").get_runtime_context().get_node_id()
    agent = join_launcher(config, settings["endpoint"], rank, print, [], facts)
    try:
        # Every worker asks, since Ray makes them agree; one of them reports it.
        watch = NoticeWatch(train.get_preemption_info, lambda notice: _report(agent, notice) if rank == 0 else None)
        watch.start()
        agent.wait_for_start()
        environment = rank_environment(config, os.environ)
        environment |= _rank_variables(context, *agent.add_addresses(environment))
        working_folder = Path(settings["working_folder"])
        started = start_command(
            rank_command(folder),
            environment,
            working_folder=working_folder if working_folder.is_dir() else folder,
        )
        exit_code = agent.follow(started)
        agent.wait_for_end(exit_code)
    finally:
        agent.close()
    if exit_code not in _DECIDED and not watch.has_come:  # after a notice, nothing must restart here
        raise RuntimeError(f"rank {rank} ended with exit code {exit_code}; it says why in {rank_log(folder, rank)}")


def _report(agent: Agent, notice: dict[str, Any]) -> None:
    agent.state.notice = notice
    agent.publish()


def _rank_variables(context: Any, master_address: str, master_port: int) -> dict[str, str]:
    """Return the variables that torchrun would set."""
    return {
        "RANK": str(context.get_world_rank()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "GROUP_RANK": str(context.get_node_rank()),
        "MASTER_ADDR": master_address,
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is not rank 0's
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


class NoticeWatch(threading.Thread):
    """Polls Ray Train for a preemption notice and forwards it.

    Ray has a notice when a node is drained: by its autoscaler, by a cloud's operator for a spot machine, or by `ray
    start --block` itself on SIGTERM, as in a pod that Kubernetes deletes. This is a thread because
    `ray.train.get_preemption_info` waits for the same call of every worker. One hung rank would otherwise keep all
    workers from reading what the launcher publishes.
    """

    def __init__(self, ask: Callable[[], Any], forward: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(name="notices", daemon=True)  # it may wait for a worker that is gone
        self.has_come = False
        self._ask, self._forward = ask, forward

    def run(self) -> None:
        """Poll until there is a notice."""
        try:
            while (info := self._ask()) is None:
                time.sleep(_ASK_EVERY_S)
        except Exception:  # from Ray: it ends this worker, or has lost another, which the launcher sees
            return
        self.has_come = True
        self._forward(notice_of(info, time.time()))


def notice_of(info: Any, now: float) -> dict[str, Any]:
    """Convert Ray Train's PreemptionInfo, whose deadline is in Unix milliseconds; `now` is in Unix seconds."""
    gone_in_s = None if info.deadline_ms is None else max(0.0, info.deadline_ms / 1000 - now)
    return {"ranks": list(info.preempted_ranks), "gone_in_s": gone_in_s}
