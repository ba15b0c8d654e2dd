"""`python -m tunebook.launch.node RUN_FOLDER --endpoint ADDRESS:PORT`: one node's part of a run, started on that node.

It joins the launcher's rendezvous, starts torchrun once all nodes have joined, and forwards stop requests to its ranks.
It ends the ranks if the launcher is gone. It exits with the run's exit code once the launcher has published it. With
`--evaluate WHEN` it starts an evaluation instead, which runs on one node. This is needed because a Docker container
outlives the process that started it, and nothing else would end it.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from tunebook.config.frozen import load_config
from tunebook.config.identity import config_hash
from tunebook.config.schema import RunConfig, SlurmConfig, world_size
from tunebook.errors import RequestError, StoppedError, TunebookError
from tunebook.launch.commands import evaluation_worker, torchrun_command
from tunebook.launch.logs import torchrun_log
from tunebook.launch.node_facts import folder_problem, node_facts, socket_interface
from tunebook.launch.rendezvous import (
    CONNECT_TIMEOUT_S,
    LOST_AFTER_S,
    REFUSED_FOR_S,
    LauncherState,
    NodeState,
    find_launcher,
    import_torch,
    is_loopback,
    join_store,
    publish,
    read_launcher,
)
from tunebook.launch.slurm.container import describe_container
from tunebook.launch.supervise import POLL_S, Started, StopRequests, start_command
from tunebook.processes import adopting_orphans, ask_to_stop_when_parent_dies, children_of, end_children, free_port
from tunebook.record.run_folder import RUN_FILE, read_outcomes
from tunebook.terminal import outlive_readers, print_text
from tunebook.train.environment import evaluation_environment, rank_environment

_ANSWER_WITHIN_S = 30.0  # a launcher replies at once, even while it prepares
PUBLISH_EVERY_S = 0.2


class Agent(threading.Thread):
    """One node's part: connected to the launcher, it follows the ranks.

    The connection has a thread, because the store's operations hang as long as the launcher's machine does.
    """

    def __init__(self, state: NodeState, launcher_at: tuple[str, int], stop_timeout_s: float) -> None:
        super().__init__(name="rendezvous", daemon=True)
        import_torch()  # not in the thread: from a cold disk this takes minutes, which must not count as a late reply
        self.state, self.launcher = state, LauncherState()
        self.stop_timeout_s = stop_timeout_s
        self.endpoint = "node 0"  # where the launcher was found, for messages
        self.answer_within_s = _ANSWER_WITHIN_S  # what accepts the connection but stays silent is no launcher
        self.say: Callable[[str], None] = lambda text: None
        self.stop_requests: list[signal.Signals] = []  # that this process received
        self.is_overdue: Callable[[], bool] = lambda: False  # whether the deadline after a second request has passed
        self._launcher_at = launcher_at
        self._has_answered = self._is_closed = self._is_dead = False
        self._seen = time.monotonic()
        self._changed = threading.Event()

    def run(self) -> None:
        """Publish this node's state and read the launcher's, until the node leaves."""
        try:
            store, self.state.id = join_store(*self._launcher_at)
            while not self.state.has_left:
                self.state.has_left = self._is_closed
                self.state.beat += 1
                publish(store, self.state)
                self.launcher = read_launcher(store)
                self._seen, self._has_answered = time.monotonic(), True
                self._changed.wait(PUBLISH_EVERY_S)
                self._changed.clear()
        except Exception:  # torch: the connection was closed; json: this is no launcher
            self._is_dead = True

    def publish(self) -> None:
        """Publish a changed state to the launcher now."""
        self._changed.set()

    def close(self) -> None:
        """Leave the rendezvous, and tell the launcher if it is reachable."""
        self._is_closed = True
        self.publish()
        self.join(CONNECT_TIMEOUT_S)

    @property
    def is_member(self) -> bool:
        """Whether this node takes part in the current attempt."""
        return self.state.id in self.launcher.members

    @property
    def refused(self) -> str | None:
        """Why this node does not take part."""
        return None if self.is_member else self.launcher.refused.get(self.state.id) or self.launcher.closed

    @property
    def is_lost(self) -> bool:
        """Whether the launcher or its machine is gone. A launcher that is only suspended still accepts connections."""
        if not self._is_dead and time.monotonic() - self._seen > LOST_AFTER_S:
            try:
                socket.create_connection(self._launcher_at, timeout=CONNECT_TIMEOUT_S).close()
                self._seen = time.monotonic()
            except OSError:
                self._is_dead = True
        return self._is_dead

    def wait_for_start(self) -> LauncherState:
        """Wait for the start and return what to start.

        Raises: RequestError if refused, TunebookError if the launcher is gone or the listener is no launcher.
        """
        answer_by, has_said = time.monotonic() + self.answer_within_s, False
        while not self.is_member:
            if self.refused is not None:
                raise RequestError(self.refused, problem_id="node-refused")
            if self._has_answered and not has_said:
                has_said = True
                self.say(f"{self.endpoint} has answered; waiting for node 0 to prepare, and for the other nodes")
            if self.stop_requests:
                raise StoppedError(f"stopped by {self.stop_requests[0].name} before the start", problem_id="stopped")
            if self.is_lost and self._has_answered:
                message = "the launcher on node 0 ended before the start; it reports why"
                raise TunebookError(message, problem_id="launcher-lost")
            if self.is_lost or (not self._has_answered and time.monotonic() > answer_by):
                silent = f"accepted the connection and sent nothing for {self.answer_within_s:g} s"
                what = "closed the connection" if self.is_lost else silent
                raise TunebookError(
                    f"what listens at {self.endpoint} {what}, so it is not a launcher, or one that was killed; is "
                    "launcher.master_port the one that node 0 printed or was given, and does node 0 still run?",
                    problem_id="launcher-out-of-reach",
                )
            time.sleep(POLL_S)
        return self.launcher

    def follow(self, ranks: Started) -> int:
        """Wait for the ranks to end, and stop them on request; return their exit code, negative if killed."""
        kill_at = float("inf")
        num_stops, is_alone = 0, False
        while (exit_code := ranks.poll()) is None:
            stops = self.launcher.stops[num_stops:]
            num_stops += len(stops)
            if not is_alone and (self.is_lost or not self.is_member):
                is_alone = True  # nobody would record the end: save and leave
                stops.append((signal.SIGTERM.name, self.stop_timeout_s))
            for name, kill_after_s in stops:
                ranks.send(signal.Signals[name])
                if kill_after_s is not None:
                    kill_at = min(kill_at, time.monotonic() + kill_after_s)
            while self.stop_requests:
                number = self.stop_requests.pop(0)
                if self.is_lost or number is signal.SIGKILL:  # SIGKILL: the third request
                    ranks.send(number)
                else:
                    self.state.stop_requests.append(number.name)  # for all nodes
                    self.publish()
            if time.monotonic() > kill_at or self.is_overdue():
                ranks.kill()
            time.sleep(POLL_S)
        return exit_code

    def wait_for_end(self, exit_code: int, problem: str | None = None) -> int | None:
        """Publish how the ranks ended and wait for the run's exit code; None if the launcher is gone."""
        self.state.problems, self.state.exit_code = [problem] if problem else [], exit_code
        self.publish()
        while not self.is_lost and not self.is_overdue():
            if self.launcher.exit_code is not None:
                return self.launcher.exit_code
            if not self.is_member:
                return 1  # another attempt begins
            time.sleep(POLL_S)
        return None

    def add_addresses(self, environment: dict[str, str]) -> tuple[str, int]:
        """Return address and port of the ranks' rendezvous; let gloo use the interface that reached the launcher.

        gloo would use the address of the host name, which many systems set to loopback.
        """
        if interface := socket_interface(self.state.address):
            environment.setdefault("GLOO_SOCKET_IFNAME", interface)
        # If node 0 reached the launcher over loopback, it is on the launcher's machine.
        address = self.launcher.master_address
        return self._launcher_at[0] if is_loopback(address) else address, self.launcher.master_port


def join_run(config: RunConfig, console: Console) -> int:
    """Run the part of any node but the first until training has ended; return the run's exit code."""
    launcher = config.launcher
    endpoint = f"{launcher.master_address}:{launcher.master_port}"

    def say(text: str) -> None:
        print_text(text, console)

    return take_part(config, endpoint, launcher.node_rank, say, config_hash(config))


def join_launcher(
    config: RunConfig,
    endpoint: str,
    node: int,
    say: Callable[[str], None],
    stop_requests: list[signal.Signals],
    facts: dict[str, Any],
) -> Agent:
    """Find the launcher and join its rendezvous with this node's facts."""
    # A container outlives a job that is canceled during its start: Slurm ends only the Docker client.
    refused_for_s = REFUSED_FOR_S if isinstance(config.launcher, SlurmConfig) else float("inf")
    timeout_s = config.launcher.start_timeout_s
    address, reached_at = find_launcher(endpoint, timeout_s, say, stop_requests, refused_for_s=refused_for_s)
    state = NodeState(node=node, address=address, **facts)
    agent = Agent(state, (reached_at, int(endpoint.rpartition(":")[2])), config.launcher.stop_timeout_s)
    agent.endpoint, agent.stop_requests = endpoint, stop_requests
    agent.answer_within_s = min(_ANSWER_WITHIN_S, timeout_s)
    agent.start()
    return agent


def take_part(
    config: RunConfig,
    endpoint: str,
    node: int,
    say: Callable[[str], None],
    config_sha256: str | None = None,
    *,
    evaluation: str | None = None,
) -> int:
    """Run this node's part until the run has ended; return the run's exit code.

    `evaluation` names the evaluation to run instead of training. Raises: RequestError if this node is refused,
    TunebookError if there is no launcher.
    """
    stop_timeout_s = config.launcher.stop_timeout_s
    stop_requests: list[signal.Signals] = []
    requests = StopRequests(stop_requests.append)
    with requests.listening(), adopting_orphans():
        facts = node_facts(config) | {"port": free_port(), "config_sha256": config_sha256}
        if node == 0:
            facts["inside"] = describe_container(config)
        agent = join_launcher(config, endpoint, node, say, stop_requests, facts)
        agent.is_overdue = lambda: requests.overdue_s > 0
        if config_sha256 is not None:  # the user typed the command here, and watches
            agent.say = say
        try:
            folder = Path(str(agent.wait_for_start().folder))
            if problem := folder_problem(folder):
                agent.wait_for_end(RequestError.exit_code, problem)
                raise RequestError(f"node {node}: {problem}", problem_id="folder-not-shared")
            what = "its ranks" if evaluation is None else f"the evaluation {evaluation}"
            say(f"node {node}: starts {what} of the run in {folder}")
            before = set(children_of(os.getpid()))
            exit_code = agent.follow(_start(config, agent, folder, evaluation))
            timeout_s = stop_timeout_s if exit_code < 0 else 0
            end_children(exclude=before, timeout_s=timeout_s, is_urgent=lambda: requests.is_urgent)
            code = agent.wait_for_end(exit_code)
        finally:
            agent.close()
    if code is not None:
        return code
    if requests.is_urgent:
        raise StoppedError(f"stopped twice by {requests.first}; no answer from {endpoint}", problem_id="stopped")
    outcome, lost = read_outcomes(folder, world_size(config)), "the launcher on node 0 was lost"
    if outcome.exit_code == StoppedError.exit_code:
        raise StoppedError(f"{lost}; {outcome.reason}", problem_id="launcher-lost")
    raise TunebookError(f"{lost}, and the ranks were ended: {outcome.reason}", problem_id="launcher-lost")


def _start(config: RunConfig, agent: Agent, folder: Path, evaluation: str | None) -> Started:
    """Start the ranks or the evaluation."""
    if evaluation is not None:
        return start_command(evaluation_worker(folder, evaluation), evaluation_environment(config, os.environ))
    environment = rank_environment(config, os.environ)
    command = torchrun_command(config, folder, agent.state.node, *agent.add_addresses(environment))
    return start_command(command, environment, log=torchrun_log(folder, agent.state.node))


def main() -> int:
    """Run one node's part for the given run folder."""
    parser = argparse.ArgumentParser(prog="python -m tunebook.launch.node")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--node", type=int, default=os.environ.get("SLURM_NODEID", "0"))
    parser.add_argument("--evaluate", choices=("contamination", "before", "after"))
    arguments = parser.parse_args()
    folder, node = arguments.folder, arguments.node
    ask_to_stop_when_parent_dies()
    outlive_readers()

    def say(text: str) -> None:
        print(text, flush=True)

    try:
        if not (folder / RUN_FILE).is_file():
            raise RequestError(str(folder_problem(folder)), problem_id="folder-not-shared")
        return take_part(load_config(folder / RUN_FILE), arguments.endpoint, node, say, evaluation=arguments.evaluate)
    except TunebookError as error:
        print(f"node {node}: {error.message}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
