"""`python -m tunebook.launch.node RUN_FOLDER --meet ADDRESS:PORT`: one node's part of a run, started on that node.

It joins the launcher's rendezvous, starts torchrun when all nodes are there, hands requests to stop on to its ranks,
and ends them when the launcher is gone. It ends when the launcher has published the run's exit code, with that code.
With `--evaluate WHEN` it starts an evaluation instead, which runs on one node: a container of Docker's outlives what
started it, and nothing else would end it.
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

_ANSWER_WITHIN_S = 30.0  # a launcher answers at once, also while it prepares


@dataclass(kw_only=True)
class Agent:
    """Follows the ranks of one node, linked to the launcher."""

    link: Link
    stop_timeout_s: float
    meet: str = "node 0"  # where the launcher was reached, for people
    answer_within_s: float = _ANSWER_WITHIN_S  # what accepts the connection and stays silent is no launcher
    say: Callable[[str], None] = lambda text: None
    asked: list[signal.Signals] = field(default_factory=list)  # requests to stop that this process got itself
    is_overdue: Callable[[], bool] = lambda: False  # whether a second request of this process should have ended it

    def wait_for_start(self) -> LauncherState:
        """What to start. Raises: RequestError when refused, TunebookError when the launcher is gone, or was none."""
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
        """Wait for the ranks to end, and stop them when asked to; their exit code, below zero when killed."""
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
        """Publish how the ranks ended and wait for the run's exit code; None when the launcher is gone."""
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
        """A request of this node is one of every node, unless the launcher is gone; a third ends the ranks here."""
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
    """The part of every node but the first, until the training has ended; the run's exit code."""
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
    """This node's part, until the run has ended; the run's exit code. `evaluation`: which to do instead of training.

    Raises: RequestError when this node is refused, TunebookError when there is no launcher.
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
        if config_sha256 is not None:  # somebody typed this here, and watches
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
    """Join the launcher's rendezvous with what this node has found out about itself."""
    launcher, facts = config.launcher, node_facts(config)
    # A container outlives a job that is cancelled while it starts: Slurm ends only Docker's client.
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
    """Start what this node is there for."""
    folder = Path(str(go.folder))
    if evaluation is not None:
        return start_command(evaluation_worker(folder, evaluation), evaluation_environment(config, os.environ))
    assert go.master_address is not None and go.master_port is not None
    environment = rank_environment(config, os.environ)
    if interface := socket_interface(state.address):
        # gloo takes the address of the host's name, which many systems set to loopback.
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    command = torchrun_command(config, folder, state.node, go.master_address, go.master_port)
    return start_command(command, environment, log=torchrun_log(folder, state.node))


def _end_alone(config: RunConfig, folder: Path) -> int:
    """The end of ranks whose launcher was lost. Raises: StoppedError where they saved, else TunebookError."""
    outcome = read_outcomes(folder, world_size(config))
    lost = "the launcher on node 0 was lost"
    if outcome.exit_code == StoppedError.exit_code:
        raise StoppedError(f"{lost}; {outcome.reason}", problem_id="launcher-lost")
    raise TunebookError(f"{lost}, and the ranks were ended: {outcome.reason}", problem_id="launcher-lost")


def main() -> int:
    """Take part in the run of a folder."""
    parser = argparse.ArgumentParser(prog="python -m tunebook.launch.node")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--meet", required=True)
    parser.add_argument("--node", type=int, default=os.environ.get("SLURM_NODEID", "0"))
    parser.add_argument("--evaluate", choices=("before", "after"))
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
