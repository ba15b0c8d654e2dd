"""`python -m tunebook.launch.node RUN_FOLDER --meet ADDRESS:PORT`: one node's part of a run, started on that node.

It joins the launcher's rendezvous, starts torchrun once all nodes have joined, and forwards stop requests to its ranks.
It ends the ranks if the launcher is gone. It exits with the run's exit code once the launcher has published it. With
`--evaluate WHEN` it starts an evaluation instead, which runs on one node. This is needed because a Docker container
outlives the process that started it, and nothing else would end it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tunebook.config.frozen import load_config
from tunebook.config.identity import config_hash
from tunebook.config.schema import RunConfig, SlurmConfig, world_size
from tunebook.errors import RequestError, StoppedError, TunebookError
from tunebook.launch.commands import evaluation_worker, torchrun_command
from tunebook.launch.logs import torchrun_log
from tunebook.launch.node_facts import folder_problem, free_port, node_facts, socket_interface
from tunebook.launch.rendezvous import REFUSED_FOR_S, LauncherState, Link, NodeState, find_launcher
from tunebook.launch.slurm.container import describe_container
from tunebook.processes import adopting_orphans, ask_to_stop_when_parent_dies, children_of, end_children
from tunebook.record.run_folder import RUN_FILE, read_outcomes
from tunebook.supervise import POLL_S, Started, StopRequests, start_command
from tunebook.train.environment import evaluation_environment, rank_environment

_ANSWER_WITHIN_S = 30.0  # a launcher replies at once, even while it prepares


@dataclass(kw_only=True)
class Agent:
    """Follows the ranks of one node, connected to the launcher."""

    link: Link
    stop_timeout_s: float
    meet: str = "node 0"  # where the launcher was reached, for messages
    answer_within_s: float = _ANSWER_WITHIN_S  # a process that accepts the connection but stays silent is no launcher
    say: Callable[[str], None] = lambda text: None
    asked: list[signal.Signals] = field(default_factory=list)  # stop requests that this process received
    is_overdue: Callable[[], bool] = lambda: False  # whether the deadline after a second stop request has passed

    def wait_for_start(self) -> LauncherState:
        """Wait for the start and return what to start.

        Raises: RequestError if refused, TunebookError if the launcher is gone or the listener is no launcher.
        """
        link, answer_by, has_said = self.link, time.monotonic() + self.answer_within_s, False
        while True:
            launcher = link.launcher
            if link.state.id in launcher.members:
                return launcher
            if (refused := link.state.refused or launcher.closed) is not None:
                raise RequestError(refused, problem_id="node-refused")
            if link.has_answered and not has_said:
                has_said = True
                self.say(f"{self.meet} has answered; waiting for node 0 to prepare, and for the other nodes")
            if self.asked:
                raise StoppedError(f"stopped by {self.asked[0].name} before the start", problem_id="stopped")
            if link.is_lost and link.has_answered:
                message = "the launcher on node 0 ended before the start; it reports why"
                raise TunebookError(message, problem_id="launcher-lost")
            if link.is_lost or (not link.has_answered and time.monotonic() > answer_by):
                silent = f"accepted the connection and sent nothing for {self.answer_within_s:g} s"
                raise TunebookError(
                    f"what listens at {self.meet} {'hung up' if link.is_lost else silent}, so it is no launcher, or "
                    "one that was killed; is launcher.master_port the one that node 0 printed or was given, and does "
                    "node 0 still run?",
                    problem_id="launcher-out-of-reach",
                )
            time.sleep(POLL_S)

    def follow(self, ranks: Started) -> int:
        """Wait for the ranks to end, and stop them on request; return their exit code, negative if killed."""
        kill_at: float | None = None
        num_stops, is_alone = 0, False
        while (exit_code := ranks.poll()) is None:
            launcher = self.link.launcher
            for name, kill_after_s in launcher.stops[num_stops:]:
                ranks.send(signal.Signals[name])
                kill_at = _sooner(kill_at, kill_after_s)
            num_stops = len(launcher.stops)
            if not is_alone and (self.link.is_lost or self.link.state.id not in launcher.members):
                is_alone = True  # nobody would record the end: save and leave
                ranks.send(signal.SIGTERM)
                kill_at = _sooner(kill_at, self.stop_timeout_s)
            while self.asked:
                self._hand_on(self.asked.pop(0), ranks)
            if (kill_at is not None and time.monotonic() > kill_at) or self.is_overdue():
                ranks.kill()
            time.sleep(POLL_S)
        return exit_code

    def wait_for_end(self, exit_code: int, problem: str | None = None) -> int | None:
        """Publish how the ranks ended and wait for the run's exit code; None if the launcher is gone."""
        state = self.link.state
        state.folder_problem, state.exit_code = problem, exit_code
        self.link.publish()
        while not self.link.is_lost and not self.is_overdue():
            if self.link.launcher.exit_code is not None:
                return self.link.launcher.exit_code
            if state.id not in self.link.launcher.members:
                return 1  # another attempt begins
            time.sleep(POLL_S)
        return None

    def _hand_on(self, number: signal.Signals, ranks: Started) -> None:
        """Forward a stop request to all nodes; act only here if the launcher is gone, or on the third request."""
        if self.link.is_lost or number is signal.SIGKILL:
            ranks.send(number)
        else:
            self.link.state.asked.append(number.name)
            self.link.publish()


def _sooner(kill_at: float | None, after_s: float | None) -> float | None:
    if after_s is None:
        return kill_at
    new = time.monotonic() + after_s
    return new if kill_at is None else min(kill_at, new)


def join_run(config: RunConfig, console: Console) -> int:
    """Run the part of any node but the first until training has ended; return the run's exit code."""
    launcher = config.launcher
    meet = f"{launcher.master_address}:{launcher.master_port}"

    def say(text: str) -> None:
        console.print(Text(text), soft_wrap=True)

    return take_part(config, meet, launcher.node_rank, say, config_hash(config))


def take_part(
    config: RunConfig,
    meet: str,
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
    launcher = config.launcher
    asked: list[signal.Signals] = []
    requests = StopRequests(asked.append)
    with requests.listening(), adopting_orphans():
        link = _join(config, meet, node, say, asked, config_sha256, evaluation)
        agent = Agent(
            link=link,
            stop_timeout_s=launcher.stop_timeout_s,
            meet=meet,
            answer_within_s=min(_ANSWER_WITHIN_S, launcher.start_timeout_s),
            asked=asked,
            is_overdue=lambda: requests.overdue_s > 0,
        )
        if config_sha256 is not None:  # the user typed the command here, and watches
            agent.say = say
        try:
            go = agent.wait_for_start()
            folder = Path(str(go.folder))
            if problem := folder_problem(folder):
                agent.wait_for_end(RequestError.exit_code, problem)
                raise RequestError(f"node {node}: {problem}", problem_id="folder-not-shared")
            what = "its ranks" if evaluation is None else f"the evaluation {evaluation}"
            say(f"node {node}: starts {what} of the run in {folder}")
            before = set(children_of(os.getpid()))
            exit_code = agent.follow(_start(config, go, link.state, evaluation))
            timeout_s = launcher.stop_timeout_s if exit_code < 0 else 0
            end_children(exclude=before, timeout_s=timeout_s, is_urgent=lambda: requests.is_urgent)
            code = agent.wait_for_end(exit_code)
        finally:
            link.close()
        if code is None and requests.is_urgent:
            raise StoppedError(f"stopped twice by {requests.first}; no answer from {meet}", problem_id="stopped")
        return code if code is not None else _end_alone(config, folder)


def _join(
    config: RunConfig,
    meet: str,
    node: int,
    say: Callable[[str], None],
    asked: list[signal.Signals],
    config_sha256: str | None,
    evaluation: str | None,
) -> Link:
    """Join the launcher's rendezvous and publish this node's facts."""
    launcher, facts = config.launcher, node_facts(config)
    # A container outlives a job that is canceled during its start: Slurm ends only the Docker client.
    refused_for_s = REFUSED_FOR_S if isinstance(launcher, SlurmConfig) else None
    address, reached_at = find_launcher(meet, launcher.start_timeout_s, say, asked, refused_for_s=refused_for_s)
    per_node = config.hardware.gpus_per_node or 1
    state = NodeState(
        node=node,
        ranks=[0] if evaluation is not None else list(range(node * per_node, (node + 1) * per_node)),
        address=address,
        reached_at=reached_at,
        port=free_port(),
        config_sha256=config_sha256,
        inside=describe_container(config) if node == 0 else None,
        **facts,
    )
    link = Link(meet, state)
    link.start()
    return link


def _start(config: RunConfig, go: LauncherState, state: NodeState, evaluation: str | None) -> Started:
    """Start the ranks or the evaluation."""
    folder = Path(str(go.folder))
    if evaluation is not None:
        return start_command(evaluation_worker(folder, evaluation), evaluation_environment(config, os.environ))
    assert go.master_address is not None and go.master_port is not None
    environment = rank_environment(config, os.environ)
    if interface := socket_interface(state.address):
        # gloo uses the address of the host name, which many systems set to loopback.
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    command = torchrun_command(config, folder, state.node, go.master_address, go.master_port)
    return start_command(command, environment, log=torchrun_log(folder, state.node))


def _end_alone(config: RunConfig, folder: Path) -> int:
    """Report ranks whose launcher was lost. Raises: StoppedError if they saved, else TunebookError."""
    outcome = read_outcomes(folder, world_size(config))
    lost = "the launcher on node 0 was lost"
    if outcome.exit_code == StoppedError.exit_code:
        raise StoppedError(f"{lost}; {outcome.reason}", problem_id="launcher-lost")
    raise TunebookError(f"{lost}, and the ranks were ended: {outcome.reason}", problem_id="launcher-lost")


def main() -> int:
    """Run one node's part for the given run folder."""
    parser = argparse.ArgumentParser(prog="python -m tunebook.launch.node")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--meet", required=True)
    parser.add_argument("--node", type=int, default=os.environ.get("SLURM_NODEID", "0"))
    parser.add_argument("--evaluate", choices=("contamination", "before", "after"))
    arguments = parser.parse_args()
    ask_to_stop_when_parent_dies()
    try:
        if not (arguments.folder / RUN_FILE).is_file():
            raise RequestError(str(folder_problem(arguments.folder)), problem_id="folder-not-shared")
        return take_part(
            load_config(arguments.folder / RUN_FILE),
            arguments.meet,
            arguments.node,
            lambda text: print(text, flush=True),
            evaluation=arguments.evaluate,
        )
    except TunebookError as error:
        print(f"node {arguments.node}: {error.message}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
