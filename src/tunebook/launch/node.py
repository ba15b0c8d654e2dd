"""`python -m tunebook.launch.node RUN_FOLDER --meet ADDRESS:PORT`: one node's part of a run, started on that node.

It calls the launcher, starts torchrun when all nodes are there, hands requests to stop on to its ranks, and ends them
when the launcher is gone. It ends when the launcher says so, with the run's exit code. With `--evaluate WHEN` the same
is done for an evaluation, which runs on one node: a container of Docker's outlives what started it, and nobody else
would end it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tunebook.config.frozen import load_config
from tunebook.config.schema import RunConfig, SlurmConfig, world_size
from tunebook.errors import RequestError, StoppedError, TunebookError
from tunebook.evaluate.command import worker_command
from tunebook.evaluate.spread import evaluation_environment
from tunebook.launch.calling import (
    REFUSED_FOR_S,
    call_launcher,
    folder_problem,
    free_port,
    hello,
    node_facts,
    socket_interface,
)
from tunebook.launch.commands import torchrun_command
from tunebook.launch.descendants import adopting_orphans, children_of, end_children
from tunebook.launch.line import Line, Message
from tunebook.launch.local import POLL_S, Started, StopRequests, rank_environment, start_command
from tunebook.launch.logs import torchrun_log
from tunebook.launch.slurm.inside import describe_inside
from tunebook.parent_death import ask_to_stop_when_parent_dies
from tunebook.record.files import RUN_FILE
from tunebook.record.run_folder import read_outcomes

_ANSWER_WITHIN_S = 30.0  # a launcher answers at once, also while it prepares


@dataclass(frozen=True, kw_only=True)
class Notice:
    """That machines of the run are to be taken away, by what runs the cluster."""

    ranks: tuple[int, ...]  # those on them
    gone_in_s: float | None  # None: nobody said when


@dataclass(kw_only=True)
class Agent:
    """Follows the ranks of one node while it stays on the line with the launcher."""

    line: Line
    stop_timeout_s: float
    meet: str = "node 0"  # where it was called, for people
    answer_within_s: float = _ANSWER_WITHIN_S  # what takes the call and says nothing is no launcher
    say: Callable[[str], None] = lambda text: None
    asked: list[signal.Signals] = field(default_factory=list)  # requests to stop that this process got itself
    notices: list[Notice] = field(default_factory=list)  # may be added to by a thread
    is_overdue: Callable[[], bool] = lambda: False  # whether a second request of this process should have ended it

    def __post_init__(self) -> None:
        self._is_answered = False

    def wait_for_go(self) -> Message:
        """What to start. Raises: RequestError when refused, TunebookError when the launcher is gone, or was none."""
        answer_by = time.monotonic() + self.answer_within_s
        while True:
            for message in self.line.receive(POLL_S):
                self._is_answered = True
                if message["kind"] == "welcome":
                    self.say(f"{self.meet} has answered; waiting for node 0 to prepare, and for the other nodes")
                if message["kind"] == "go":
                    return message
                if message["kind"] == "refuse":
                    raise RequestError(str(message["message"]), problem_id="node-refused")
            if self.asked:
                raise StoppedError(f"stopped by {self.asked[0].name} before the start", problem_id="stopped")
            if self.line.is_closed:
                raise self._hung_up()
            if not self._is_answered and time.monotonic() > answer_by:
                raise self._no_launcher(f"took the call and said nothing for {self.answer_within_s:g} s")

    def _hung_up(self) -> TunebookError:
        """The error for a line that was closed before the start: by a launcher, which says so, or by anybody else."""
        if self._is_answered:
            return TunebookError(
                "the launcher on node 0 ended before the start; it says why", problem_id="launcher-lost"
            )
        return self._no_launcher("hung up without an answer")

    def _no_launcher(self, what: str) -> TunebookError:
        return TunebookError(
            f"what listens at {self.meet} {what}, so it is no launcher, or one that was killed; is "
            "launcher.master_port the one that node 0 printed or was given, and does node 0 still run?",
            problem_id="launcher-out-of-reach",
        )

    def follow(self, ranks: Started) -> int:
        """Wait for the ranks to end, telling them what the launcher says; their exit code, below zero when killed."""
        kill_at: float | None = None
        is_alone = False
        while (exit_code := ranks.poll()) is None:
            for message in self.line.receive(POLL_S):
                if message["kind"] == "stop":
                    ranks.send(signal.Signals[message["signal"]])
                    kill_at = _sooner(kill_at, message["kill_after_s"])
            if self.line.is_closed:
                if not is_alone:  # nobody would hear of the end: save and leave
                    ranks.send(signal.SIGTERM)
                    kill_at = _sooner(kill_at, self.stop_timeout_s)
                is_alone = True
                time.sleep(POLL_S)
            while self.asked:
                self._hand_on(self.asked.pop(0), ranks)
            while self.notices:
                self.line.send("notice", **asdict(self.notices.pop(0)))
            if (kill_at is not None and time.monotonic() > kill_at) or self.is_overdue():
                ranks.kill()
        return exit_code

    def wait_for_end(self, exit_code: int, why: str | None = None) -> int | None:
        """Say how the ranks ended and wait for the launcher's word: the run's exit code, or None when it is gone."""
        self.line.send("ended", exit_code=exit_code, why=why)
        while not self.line.is_closed and not self.is_overdue():
            for message in self.line.receive(POLL_S):
                if message["kind"] == "end":
                    return int(message["exit_code"])
        return None

    def _hand_on(self, number: signal.Signals, ranks: Started) -> None:
        """A request of this node is one of every node, unless the launcher is gone; a third ends the ranks here."""
        if self.line.is_closed or number is signal.SIGKILL:
            ranks.send(number)
        else:
            self.line.send("asked", signal=number.name)


def _sooner(kill_at: float | None, after_s: float | None) -> float | None:
    if after_s is None:
        return kill_at
    new = time.monotonic() + after_s
    return new if kill_at is None else min(kill_at, new)


def take_part(
    config: RunConfig,
    meet: str,
    node: int,
    say: Callable[[str], None],
    config_sha256: str | None = None,
    *,
    evaluation: str | None = None,
) -> int:
    """This node's part, from the call to the end; the run's exit code. `evaluation`: which to do instead of training.

    Raises: RequestError when the launcher refuses, TunebookError when it is not there.
    """
    launcher = config.launcher
    asked: list[signal.Signals] = []
    requests = StopRequests(asked.append)
    with requests.listening(), adopting_orphans():
        line = _call_in(config, meet, node, say, asked, config_sha256, evaluation)
        agent = Agent(
            line=line,
            stop_timeout_s=launcher.stop_timeout_s,
            meet=meet,
            answer_within_s=min(_ANSWER_WITHIN_S, launcher.start_timeout_s),
            asked=asked,
            is_overdue=lambda: requests.overdue_s > 0,
        )
        if config_sha256 is not None:  # somebody typed this here, and looks on
            agent.say = say
        go = agent.wait_for_go()
        folder = Path(go["folder"])
        if problem := folder_problem(folder):
            agent.wait_for_end(RequestError.exit_code, problem)
            raise RequestError(f"node {node}: {problem}", problem_id="folder-not-shared")
        what = "its ranks" if evaluation is None else f"the evaluation {evaluation}"
        say(f"node {node}: starts {what} of the run in {folder}")
        before = set(children_of(os.getpid()))
        ranks = _start(config, go, node, line, evaluation)
        exit_code = agent.follow(ranks)
        timeout_s = launcher.stop_timeout_s if exit_code < 0 else 0
        end_children(exclude=before, timeout_s=timeout_s, is_urgent=lambda: requests.is_urgent)
        code = agent.wait_for_end(exit_code)
        if code is None and requests.is_urgent:
            raise StoppedError(f"stopped twice by {requests.first}, without a word from {meet}", problem_id="stopped")
        return code if code is not None else _end_alone(config, folder)


def _call_in(
    config: RunConfig,
    meet: str,
    node: int,
    say: Callable[[str], None],
    asked: list[signal.Signals],
    config_sha256: str | None,
    evaluation: str | None,
) -> Line:
    """Call the launcher and say who calls; what takes time is found out before, since it waits for no long hello."""
    launcher = config.launcher
    facts = node_facts(config)
    inside = describe_inside(config) if node == 0 else None
    # A container outlives a job that is cancelled while it starts: Slurm ends only Docker's client.
    refused_for_s = REFUSED_FOR_S if isinstance(launcher, SlurmConfig) else None
    line, reached_at = call_launcher(meet, launcher.start_timeout_s, say, asked, refused_for_s=refused_for_s)
    hello(
        line,
        reached_at,
        node=node,
        ranks=_ranks_of(node, config, evaluation),
        port=free_port(),
        facts=facts,
        config_sha256=config_sha256,
        inside=inside,
    )
    return line


def _ranks_of(node: int, config: RunConfig, evaluation: str | None) -> list[int]:
    """The ranks of a node; an evaluation is one process."""
    if evaluation is not None:
        return [0]
    per_node = config.hardware.gpus_per_node
    assert per_node is not None
    return list(range(node * per_node, (node + 1) * per_node))


def _start(config: RunConfig, go: Message, node: int, line: Line, evaluation: str | None) -> Started:
    """Start what this node is there for."""
    folder = Path(go["folder"])
    if evaluation is not None:
        command = worker_command(folder, evaluation)
        return start_command(command, evaluation_environment(config, os.environ))
    return start_command(
        torchrun_command(config, folder, node, go["master_address"], go["master_port"]),
        _environment(config, line.own_address),
        log=torchrun_log(folder, node),
    )


def _end_alone(config: RunConfig, folder: Path) -> int:
    """The end of ranks whose launcher was lost. Raises: StoppedError where they saved, else TunebookError."""
    outcome = read_outcomes(folder, world_size(config))
    lost = "the launcher on node 0 was lost"
    if outcome.exit_code == StoppedError.exit_code:
        raise StoppedError(f"{lost}; {outcome.reason}", problem_id="launcher-lost")
    raise TunebookError(f"{lost}, and the ranks were ended: {outcome.reason}", problem_id="launcher-lost")


def _environment(config: RunConfig, address: str) -> dict[str, str]:
    environment = rank_environment(config, os.environ)
    if interface := socket_interface(address):
        # gloo takes the address of the host's name, which many systems set to loopback.
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    return environment


def main() -> int:
    """Take part in the run of a folder."""
    parser = argparse.ArgumentParser(prog="python -m tunebook.launch.node")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--meet", required=True)
    parser.add_argument("--node", type=int, default=os.environ.get("SLURM_NODEID", "0"))
    parser.add_argument("--evaluate", choices=("before", "after"))
    words = parser.parse_args()
    ask_to_stop_when_parent_dies()
    try:
        if not (words.folder / RUN_FILE).is_file():
            raise RequestError(str(folder_problem(words.folder)), problem_id="folder-not-shared")
        return take_part(
            load_config(words.folder / RUN_FILE),
            words.meet,
            words.node,
            lambda text: print(text, flush=True),
            evaluation=words.evaluate,
        )
    except TunebookError as error:
        print(f"node {words.node}: {error.message}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
