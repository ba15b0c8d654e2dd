"""The launcher's side of a run on several nodes, in containers or under Ray: wait for all nodes and follow them.

The launcher names a node that is missing, differs from the others or is lost, and tells the others at once. Otherwise
ranks that communicate over NCCL would wait for it until `launcher.timeout_s`.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired

from rich.console import Console

from tunebook.config.choices import LauncherName
from tunebook.config.identity import config_hash
from tunebook.config.schema import RunConfig, SlurmConfig, world_size
from tunebook.errors import Problem, RequestError, TunebookError
from tunebook.launch.logs import launcher_log, where
from tunebook.launch.rendezvous import (
    TOKEN_VARIABLE,
    LauncherState,
    NodeState,
    host_store,
    joined_ids,
    own_addresses,
    publish,
    read_node,
)
from tunebook.launch.slurm.client import node_names
from tunebook.launch.slurm.container import required_code, why_not_started
from tunebook.launch.supervise import POLL_S, Failure, ProcessEnd, Started, StopRequests, start_command
from tunebook.processes import adopting_orphans, children_of, end_children
from tunebook.terminal import print_text

# Seconds that ranks get to end after one of them has failed: no save can succeed without it. torchrun uses the same.
KILL_AFTER_S = 30.0
_LINGER_S = 10.0  # for a command that has nothing left to do
_CUT_OFF_S = 2.0  # for nodes to report that their ranks were killed; a hung or unreachable node does not report
_REPLACED_AFTER_S = 2.0  # of silence before the start, if another process joins with the same number


class NodeGroup:
    """The nodes of a run (under Ray: its ranks), which join on a port and are followed until they end.

    Raises: RequestError if the port is in use.
    """

    def __init__(self, config: RunConfig, *, is_evaluation: bool = False) -> None:
        launcher, hardware = config.launcher, config.hardware
        self._config = config
        self._is_ray = launcher.name is LauncherName.ray
        self._unit = "rank" if self._is_ray else "node"
        self._num_nodes = 1 if is_evaluation else world_size(config) if self._is_ray else hardware.num_nodes
        self._ranks_per_node = 1 if is_evaluation or self._is_ray else hardware.gpus_per_node or 1
        self._code = required_code(config)
        self._names = dict(enumerate(node_names())) if isinstance(launcher, SlurmConfig) else {}
        is_by_hand = has_later_nodes(config)
        self._config_sha256 = config_hash(config) if is_by_hand else None
        self.token = "" if is_by_hand else secrets.token_hex(16)  # known only to the run's own nodes
        self._store, self.port = host_store(launcher.master_port if is_by_hand else 0, self.token)
        self.launcher = LauncherState()
        self.members: dict[int, NodeState] = {}  # by node
        self.hosts: dict[int, str] = {}  # by rank
        self.failure: TunebookError | None = None  # why the launcher ended the run
        self.stopped_by: str | None = None  # the signal that asked a node, or this process, to stop
        self.notice: str | None = None  # preemption notice from the scheduler, as text
        self.failed: Failure | None = None  # the rank that failed first, if each node is one rank
        self.lost_ranks: list[int] = []  # of the node that was lost last
        self.on_start: Callable[[], None] = lambda: None  # called before the ranks of each attempt start
        self._joined: dict[str, NodeState] = {}  # by ID
        self._refusals: dict[int, str] = {}  # by node
        self._stops: list[tuple[signal.Signals, float | None]] = []
        self._start_by, self._read_at = 0.0, time.monotonic()
        self._begins = threading.Event()
        # Until `begin`, nodes that join get a reply while this process prepares the data.
        self._replies = threading.Thread(target=self._reply, daemon=True)
        self._replies.start()

    @property
    def endpoint(self) -> str:
        """The addresses of this machine and the port, in the form that `find_launcher` reads."""
        return f"{','.join(own_addresses())}:{self.port}"

    def _reply(self) -> None:
        while not self._begins.is_set():
            self._read()
            publish(self._store, self.launcher)
            self._begins.wait(POLL_S)

    def begin(self, folder: Path) -> None:
        """Start the timer: nodes that are still missing after `launcher.start_timeout_s` end the run."""
        self._begins.set()
        self._replies.join()
        self.launcher.folder = str(folder)
        self._start_by = time.monotonic() + self._config.launcher.start_timeout_s

    @property
    def is_running(self) -> bool:
        """Whether every node has been told to start."""
        return bool(self.launcher.members)

    @property
    def has_been_running(self) -> bool:
        """Whether ranks have started, in this attempt or an earlier one."""
        return bool(self.hosts)

    @property
    def is_over(self) -> bool:
        """Whether no node is active any more, after all were active or the run was given up."""
        return not self._is_any_active() if self.is_running else self.launcher.closed is not None

    def stop(self, number: signal.Signals, kill_after_s: float | None = None) -> None:
        """Send a stop request to the ranks of every node; safe to call from a signal handler."""
        self.stopped_by = self.stopped_by or number.name
        self._stops.append((number, kill_after_s))

    def give_up(self, failure: TunebookError, *, timeout_s: float = KILL_AFTER_S) -> None:
        """End the run: ask the ranks to stop, and kill them after `timeout_s`; the first failure counts."""
        if self.launcher.closed is None and not (self.is_running and self.failure is not None):
            self.failure = failure
        self._stop_ranks(signal.SIGTERM, timeout_s, failure.message)

    def end(self, exit_code: int) -> None:
        """Publish the run's exit code to the nodes; a node that joins later, such as a slow container, is refused."""
        self.launcher.exit_code = exit_code
        self.launcher.closed = self.launcher.closed or "the run has ended"
        publish(self._store, self.launcher)

    def has_unread_end(self) -> bool:
        """Whether some node may not have read yet how the run ended, or why it does not start."""
        self._read()
        return any(not state.has_gone for state in self._joined.values())

    def missing(self) -> str:
        """Name the nodes that have not joined."""
        absent = [node for node in range(self._num_nodes) if node not in self.members]
        names = [f"{self._unit} {node}" + (f" ({self._names[node]})" if node in self._names else "") for node in absent]
        verb = "has" if len(absent) == 1 else "have"
        return f"{', '.join(names)} of {self._num_nodes} {self._unit}s {verb} not joined"

    def poll(self, timeout_s: float) -> None:
        """Wait for `timeout_s`, read what the nodes have published, and act on it and on timeouts."""
        time.sleep(timeout_s)
        while self._stops:
            number, kill_after_s = self._stops.pop(0)
            if not self.is_running and self.launcher.closed is None:
                self.failure = None  # of the last attempt: the run ends by this request, and not for want of another
            self._stop_ranks(number, kill_after_s, f"stopped by {number.name} before the start")
        self._read()
        if self.is_running and self._is_ray and not self._is_any_active():
            self._await_restart()
        elif not self.is_running and self.launcher.closed is None:
            self._start_or_give_up()
        publish(self._store, self.launcher)

    def _is_any_active(self) -> bool:
        return any(state.is_active for state in self.members.values())

    def _stop_ranks(self, number: signal.Signals, kill_after_s: float | None, why: str) -> None:
        """Stop running ranks; before the start, send away every node, including those that join later."""
        if self.is_running:
            self.launcher.stops.append((number.name, kill_after_s))
        else:
            self.launcher.closed = self.launcher.closed or why

    def _read(self) -> None:
        """Read what the nodes have published, and act on it."""
        now = time.monotonic()
        passed_s, self._read_at = min(now - self._read_at, 1.0), now
        for node_id in joined_ids(self._store):
            before = self._joined.get(node_id)
            if (before and before.has_gone) or (state := read_node(self._store, node_id)) is None:
                continue
            if before is not None and before.beat == state.beat:
                state.silent_s = before.silent_s + passed_s
            self._joined[node_id] = state
            if before is not None and before is self.members.get(state.node):
                self.members[state.node] = state
                self._follow(state, before)
            elif node_id not in self.launcher.refused and self.launcher.closed is None:
                self._admit(state)

    def _admit(self, new: NodeState) -> None:
        """Let a process take part as its node, or refuse it; if another is that node, find out whether it still is."""
        other, why = self.members.get(new.node), self._why_refused(new)
        if other is not None and self._is_ray:  # Ray never runs a rank twice, so the earlier process is gone
            if self.is_running and other.is_active:
                other.silent_s = float("inf")
                self._handle_end(other)
            if self.is_running:
                return  # the new one belongs to the next attempt
        elif other is not None and why is None and other.silent_s < _REPLACED_AFTER_S:
            if other.silent_s > 0:
                return
            why = (
                f"{self._name(new)} joined, and so did {other.host} with that number: each {self._unit} needs its own "
                "launcher.node_rank"
            )
        if why is None:
            if other is not None:
                self.launcher.refused[other.id] = f"{self._name(other)} was silent, and {new.host} joined in its place"
            self.members[new.node] = new
            self._refusals.pop(new.node, None)
            return
        self.launcher.refused[new.id] = why
        # A command for another run, or one that comes too late, must not end this run.
        if not self.is_running and not (self._is_for_another_run(new) and other is not None):
            self._refusals[new.node] = why

    def _name(self, state: NodeState) -> str:
        return f"{self._unit} {state.node} ({state.host})"

    def _is_for_another_run(self, state: NodeState) -> bool:
        return state.config_sha256 is not None and state.config_sha256 != self._config_sha256

    def _why_refused(self, state: NodeState) -> str | None:
        """Say why a node cannot take part, whatever the other nodes are; None if it can."""
        who = self._name(state)
        if self._is_for_another_run(state):
            return (
                f"{who} was started for another run: type the same command on every node, with a different "
                "launcher.node_rank; a separate run needs another launcher.master_port"
            )
        if not 0 <= state.node < self._num_nodes:
            return (
                f"{who} joined, and the run has {self._num_nodes}: numbers go from 0 to {self._num_nodes - 1}; set "
                "launcher.node_rank and hardware.num_nodes"
            )
        if self.is_running and not self._is_ray:
            return f"{who} joined, and the run has already started with all its nodes; wait for it to end"
        if self._code is not None and state.code != self._code:
            return (
                f"{who} has different Tunebook code in its container than the launcher: its files have the hash "
                f"{state.code[:12]} instead of {self._code[:12]}; update the image of every node (make image, or "
                "make pull), or run the code in it: TUNEBOOK_USE_IMAGE_SOURCES=1"
            )
        return f"{who} cannot take part: {'; '.join(state.problems)}" if state.problems else None

    def _difference(self, state: NodeState, other: NodeState) -> str | None:
        """Say how a node differs from another in what all nodes must share; None if it does not."""
        who, them = self._name(state), self._name(other)
        if state.versions != other.versions:
            return f"{who} has different software than {them}: {state.versions} instead of {other.versions}"
        if state.code != other.code:
            return (
                f"{who} has different Tunebook code than {them}, of the same version: its files have the hash "
                f"{state.code[:12]} instead of {other.code[:12]}; bring every node to the same commit without local "
                "changes (git rev-parse HEAD; git status --short), or use one checkout that all nodes share"
            )
        if None not in (state.weights, other.weights) and state.weights != other.weights:
            return (  # some strategies read every copy, others only the first node's
                f"{who} has different weights of the base model in model.path than {them}: the fingerprint is "
                f"{str(state.weights)[:12]} instead of {str(other.weights)[:12]}; copy the folder again to the nodes "
                "that differ, or name one that all nodes share: model.path=/a/shared/folder"
            )
        return None

    def _follow(self, state: NodeState, before: NodeState) -> None:
        """Act on what a member has published, or on its silence."""
        if not self.is_running:
            if state.has_gone:  # this node or its replacement may join again
                del self.members[state.node]
            return
        for name in state.stop_requests[len(before.stop_requests) :]:
            self.stop(signal.Signals[name])
        if state.notice is not None and before.notice is None:
            self._take_notice(state.notice["ranks"], state.notice["gone_in_s"])
        if before.is_active and not state.is_active:
            self._handle_end(state)

    def _handle_end(self, state: NodeState) -> None:
        """Stop the other nodes if a node is lost or has failed."""
        who, ranks = self._name(state), self._ranks(state)
        if state.exit_code is None:
            last = f" to {ranks[-1]}" if len(ranks) > 1 else ""
            with_ranks = "" if self._is_ray else f" with rank{'s' if last else ''} {ranks[0]}{last}"
            lost = _node_missing(f"{who} was lost{with_ranks}: its launcher was killed, or the machine failed")
            self.lost_ranks = ranks
            self.give_up(lost, timeout_s=self._config.launcher.stop_timeout_s)
        elif state.problems:
            self.give_up(RequestError(f"{who}: {'; '.join(state.problems)}", problem_id="folder-not-shared"))
        elif state.exit_code:
            if self.failed is None and len(ranks) == 1:
                self.failed = Failure(rank=ranks[0], exit_code=state.exit_code)
            self._stop_ranks(signal.SIGTERM, KILL_AFTER_S, "")

    def _ranks(self, state: NodeState) -> list[int]:
        first = state.node * self._ranks_per_node
        return list(range(first, first + self._ranks_per_node))

    def _start_or_give_up(self) -> None:
        """Start the ranks once every node has joined and all agree; otherwise name the nodes that do not."""
        states = [state for _, state in sorted(self.members.items())]
        is_complete = len(states) == self._num_nodes
        refused = [why for _, why in sorted(self._refusals.items())]
        refused += [why for state in states[1:] if (why := self._difference(state, states[0])) is not None]
        found, planned = len({state.machine for state in states}), self._config.hardware.num_nodes
        if self._is_ray and is_complete and found != planned:
            refused.append(
                f"the ranks were placed on {found} machine{'s' if found > 1 else ''}, and hardware.num_nodes={planned} "
                "was planned; set hardware.num_nodes and gpus_per_node to what there is"
            )
        if refused:
            self.give_up(RequestError("; ".join(refused), problem_id="node-refused"))
        elif is_complete:
            self.on_start()
            self.failed, self.failure, self.lost_ranks = None, None, []
            self.hosts = {rank: state.host for state in states for rank in self._ranks(state)}
            self.launcher.master_address, self.launcher.master_port = states[0].address, states[0].port
            self.launcher.stops, self.launcher.members = [], [state.id for state in states]
        elif time.monotonic() > self._start_by:
            limit = f"{self._config.launcher.start_timeout_s:g} s (launcher.start_timeout_s)"
            self.give_up(_node_missing(f"{self.missing()} within {limit}{self._previous_end()}"))

    def _previous_end(self) -> str:
        """Describe how the previous attempt ended; empty if there was none."""
        if self.failure is not None:
            return f" after {self.failure.message}"
        if self.failed is not None:
            return f" after {where(self.failed.rank, self.hosts)} had failed: {self.failed.how}"
        return ""

    def _take_notice(self, ranks: list[int], gone_in_s: float | None) -> None:
        """Let all ranks save before some lose their machine, within the normal stop timeout."""
        when = "" if gone_in_s is None else f" in {gone_in_s:.0f} s"
        hosts = ", ".join(sorted({self.hosts[rank] for rank in ranks}))
        named = ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
        self.notice = f"{hosts} will be preempted{when}, with {named}"
        timeout_s = self._config.launcher.stop_timeout_s
        self.stop(signal.SIGTERM, timeout_s if gone_in_s is None else min(timeout_s, gone_in_s))

    def _await_restart(self) -> None:
        """Wait for the nodes of the next attempt, which Ray starts after a failed one."""
        states = list(self.members.values())
        if all(state.exit_code == 0 for state in states) or self.stopped_by is not None:
            return
        silent_s = max((state.silent_s for state in states if state.silent_s < float("inf")), default=0.0)
        self._start_by = time.monotonic() + self._config.launcher.start_timeout_s - silent_s  # Ray counts from the loss
        self.launcher.refused |= {state.id: "another attempt begins" for state in states}
        self.launcher.members = []
        self.members.clear()

    def run(
        self,
        command: list[str],
        folder: Path,
        *,
        exit_code_of: Callable[[], int],
        keep_open: Sequence[int] = (),
    ) -> ProcessEnd:
        """Run a command that starts the nodes until all have ended; leaves no process behind.

        `exit_code_of` reads the run's exit code from its folder; the nodes end with it. Raises: TunebookError if nodes
        were refused before the command started.
        """
        log, requests = launcher_log(folder), StopRequests(self.stop)
        with requests.listening(), adopting_orphans():
            before = set(children_of(os.getpid()))
            self.begin(folder)
            self.poll(0)  # nodes that were started by hand may have been refused by now
            if self.failure is not None:
                self.end(self.failure.exit_code)
                _wait_until(lambda: not self.has_unread_end(), _LINGER_S, requests)
                raise self.failure
            reported_before = log.stat().st_size if log.is_file() else 0
            started = start_command(command, os.environ | {TOKEN_VARIABLE: self.token}, keep_open, log=log)
            while not self.is_over and requests.overdue_s < _CUT_OFF_S:
                self.poll(POLL_S)
                if requests.overdue_s > 0:
                    self.stop(signal.SIGKILL)
                if self.is_running:
                    continue
                # srun would wait for the nodes that have started, and they for the missing one.
                if (error := why_not_started(self._config, log, reported_before)) is not None:
                    self.give_up(error)
                elif started.poll() is not None and self.has_been_running:
                    break  # Ray starts no other attempt; the ranks have written how they ended
                elif started.poll() is not None:
                    how = f"{Path(command[0]).name} ended (exit code {started.poll()})"
                    self.give_up(_node_missing(f"{how}, and {self.missing()}"))
            self.end(exit_code_of())
            self._wait_for_command(started, requests)
            end_children(exclude=before, timeout_s=_LINGER_S, is_urgent=lambda: requests.is_urgent)
        return ProcessEnd(
            exit_code=started.process.returncode,
            stopped_by=requests.first or self.stopped_by,
            failed=self.failed,
            failure=self.failure,
            lost_ranks=tuple(self.lost_ranks),
            notice=self.notice,
        )

    def _wait_for_command(self, started: Started, requests: StopRequests) -> None:
        """Wait for the nodes and their command; then terminate the command, then kill it.

        After a second stop request the command is killed at once.
        """
        if self.stopped_by is not None and not self.has_been_running:
            started.process.terminate()  # stops nodes that have not joined yet

        def has_ended() -> bool:
            return started.poll() is not None

        timeout_s = _LINGER_S if self.failure else KILL_AFTER_S
        _wait_until(lambda: has_ended() and not self.has_unread_end(), timeout_s, requests)
        if not has_ended():
            started.process.terminate()
            _wait_until(has_ended, _LINGER_S, requests)
            started.process.kill()
            with suppress(TimeoutExpired):
                started.process.wait(_LINGER_S)


def _wait_until(is_done: Callable[[], bool], timeout_s: float, requests: StopRequests) -> None:
    """Poll until it is done; stop after the timeout, or after a second stop request."""
    end = time.monotonic() + timeout_s
    while not is_done() and time.monotonic() < end and not requests.is_urgent:
        time.sleep(POLL_S)


def _node_missing(why: str) -> TunebookError:
    """Return the error for a missing node."""
    return TunebookError(why, problem_id="node-missing")


def has_later_nodes(config: RunConfig) -> bool:
    """Whether the user types the same command on other nodes, which join this one."""
    return config.launcher.name is LauncherName.local and config.hardware.num_nodes > 1


def is_later_node(config: RunConfig) -> bool:
    """Whether this node joins node 0."""
    return has_later_nodes(config) and config.launcher.node_rank > 0


def open_to_nodes(config: RunConfig, console: Console) -> NodeGroup:
    """Open the port for the nodes of `launcher=local`; nodes may join from now on. Raises: RequestError."""
    launcher, num_nodes = config.launcher, config.hardware.num_nodes
    group = NodeGroup(config)
    name = launcher.master_address or socket.gethostname()
    others, number = ("1", "1") if num_nodes == 2 else (f"N of 1 to {num_nodes - 1}", "N")
    text = f"on node {others}, type the same with: launcher.node_rank={number} launcher.master_address={name}"
    print_text(text, console)
    try:
        socket.getaddrinfo(name, launcher.master_port)
    except (OSError, UnicodeError) as error:  # later nodes retry: a scheduler may publish names only once nodes are up
        if launcher.master_address:
            message = f"node 0 cannot resolve {name} itself ({error}); nodes that cannot resolve it do not reach node 0"
            key = "launcher.master_address"
            problem = Problem(id="master-address-unknown", key=key, message=message, fix=f"{key}=null", is_error=False)
            print_text(f"warning: {problem.text()}", console, style="yellow")
    return group
