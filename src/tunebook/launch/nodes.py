"""The launcher's side of a run on several nodes, in containers or under Ray: wait for all nodes and follow them.

The launcher names a node that is missing, differs from the others or is lost, and tells the others at once. Otherwise
ranks that communicate over NCCL would wait for it until `launcher.timeout_s`.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import TimeoutExpired

from rich.console import Console
from rich.text import Text

from tunebook.config.choices import LauncherName
from tunebook.config.identity import config_hash
from tunebook.config.schema import RunConfig
from tunebook.errors import Problem, RequestError, TunebookError
from tunebook.launch.logs import launcher_log, where
from tunebook.launch.rendezvous import (
    LOST_AFTER_S,
    TOKEN_VARIABLE,
    LauncherState,
    NodeState,
    difference,
    host_store,
    is_loopback,
    own_addresses,
    publish,
    read_node,
)
from tunebook.launch.slurm.container import why_not_started
from tunebook.processes import adopting_orphans, children_of, end_children
from tunebook.supervise import POLL_S, Failure, ProcessEnd, Started, StopRequests, start_command

# Seconds that ranks get to end after one of them has failed: no save can succeed without it. torchrun uses the same.
KILL_AFTER_S = 30.0
_LINGER_S = 10.0  # for a command that has nothing left to do
_CUT_OFF_S = 2.0  # for nodes to report that their ranks were killed; a hung or unreachable node does not report


@dataclass(kw_only=True)
class Member:
    """A node that has joined."""

    state: NodeState
    silent_s: float = 0.0  # since its state changed, counted only while this process runs: a whole job may be suspended
    is_lost: bool = False
    is_end_handled: bool = False

    @property
    def is_at_work(self) -> bool:
        """Whether its ranks may still run."""
        return self.state.exit_code is None and not self.is_lost


@dataclass(kw_only=True)
class NodeGroup:
    """The nodes of a run (under Ray: its ranks), which join on a port and are followed until they end."""

    launcher: LauncherState  # what the nodes read
    token: str = ""
    port: int = 0  # 0: any free port
    names: Mapping[int, str] = field(default_factory=dict)  # of nodes, if a scheduler knows them beforehand
    num_places: int | None = None  # number of machines the nodes must occupy, if they do not know it themselves
    on_start: Callable[[int], None] = lambda attempt: None  # called before the ranks start, with the attempt's number
    failure: TunebookError | None = None  # why the launcher ended the run
    stopped_by: str | None = None  # the signal that asked a node, or this process, to stop
    notice: str | None = None  # preemption notice from the scheduler, as text
    failed: Failure | None = None  # the rank that failed first, if each node is one rank
    lost_ranks: list[int] = field(default_factory=list)  # of the node that was lost last
    hosts: dict[int, str] = field(default_factory=dict)  # by rank
    members: dict[int, Member] = field(default_factory=dict)  # by node

    def __post_init__(self) -> None:
        self._store, self.port = host_store(self.port, self.token)
        self._attempt = 0
        self._previous_failure: TunebookError | None = None  # of the previous attempt
        self._is_concluded = False
        self._dismissed: dict[int, Member] = {}  # nodes sent away before the start
        self._earlier_ids: set[str] = set()  # node IDs of earlier attempts
        self.is_running = False  # whether every node has been told to start
        self._start_by = self._polled = 0.0
        self._stops: list[tuple[signal.Signals, float | None]] = []
        publish(self._store, self.launcher)  # nodes that join from now on get a reply and wait for `begin`

    def begin(self, folder: Path, *, start_timeout_s: float, stop_timeout_s: float) -> None:
        """Start the timer: nodes that are still missing after `start_timeout_s` end the run."""
        self.launcher.folder = str(folder)
        self._start_timeout_s, self._stop_timeout_s = start_timeout_s, stop_timeout_s
        self._polled = time.monotonic()
        self._start_by = self._polled + start_timeout_s

    def conclude(self) -> None:
        """Accept no more nodes; the failure of the last attempt becomes the failure of the run."""
        self._is_concluded = True
        self.failure = self.failure or self._previous_failure

    @property
    def has_been_running(self) -> bool:
        """Whether ranks have started, in this attempt or an earlier one."""
        return self.is_running or self._attempt > 0

    @property
    def is_over(self) -> bool:
        """Whether no node is active any more, after all were active or the run was given up."""
        has_begun = self.is_running or self.failure is not None or self.stopped_by is not None or self._is_concluded
        return has_begun and not self._is_any_at_work()

    def stop(self, number: signal.Signals, kill_after_s: float | None = None) -> None:
        """Send a stop request to the ranks of every node; safe to call from a signal handler."""
        self.stopped_by = self.stopped_by or number.name
        self._stops.append((number, kill_after_s))

    def give_up(self, failure: TunebookError, *, timeout_s: float = KILL_AFTER_S) -> None:
        """End the run: ask the ranks to stop, and kill them after `timeout_s`."""
        self.failure = self.failure or failure
        self._stop_ranks(signal.SIGTERM, timeout_s, failure.message)

    def end(self, exit_code: int) -> None:
        """Publish the run's exit code to the nodes; a node that joins later, such as a slow container, is refused."""
        self.launcher.exit_code = exit_code
        self.launcher.closed = self.launcher.closed or "the run has ended"
        publish(self._store, self.launcher)

    def has_unread_end(self) -> bool:
        """Whether some node may not have read yet how the run ended, or why it does not start."""
        members = self._dismissed | self.members
        for node, member in members.items():
            member.state = read_node(self._store, node) or member.state
        return any(not (member.is_lost or member.state.has_left) for member in members.values())

    def missing(self) -> str:
        """Name the nodes that have not joined."""
        count, unit = self.launcher.num_nodes, self.launcher.unit
        absent = [node for node in range(count) if node not in self.members]
        names = ", ".join(
            f"{unit} {node}" + (f" ({self.names[node]})" if node in self.names else "") for node in absent
        )
        return f"{names} of {count} {unit}s {'has' if len(absent) == 1 else 'have'} not joined"

    def poll(self, timeout_s: float) -> None:
        """Wait for `timeout_s`, read what the nodes have published, and act on it and on timeouts."""
        time.sleep(timeout_s)
        now = time.monotonic()
        passed_s, self._polled = min(now - self._polled, timeout_s + 1), now
        while self._stops:
            number, kill_after_s = self._stops.pop(0)
            self._stop_ranks(number, kill_after_s, f"stopped by {number.name} before the start")
        for node in range(self.launcher.num_nodes):
            state = read_node(self._store, node)
            if state is not None and state.refused is None and state.id not in self._earlier_ids:
                self._follow(node, state, passed_s)
        if self.is_running and self.launcher.restarts and not self._is_any_at_work():
            self._await_restart()
        elif not self.is_running and self.launcher.closed is None:
            self._start_or_give_up(now)
        publish(self._store, self.launcher)

    def _is_any_at_work(self) -> bool:
        return any(member.is_at_work for member in self.members.values())

    def _stop_ranks(self, number: signal.Signals, kill_after_s: float | None, why: str) -> None:
        """Stop running ranks; before the start, send away every node, including those that join later."""
        if self.is_running:
            self.launcher.stops.append((number.name, kill_after_s))
        else:
            self.launcher.closed = self.launcher.closed or why
            self._dismissed |= self.members
            self.members.clear()

    def _follow(self, node: int, state: NodeState, passed_s: float) -> None:
        member = self.members.get(node)
        if not self.is_running:
            if member is None or member.state.id != state.id:
                member = self.members[node] = Member(state=state)
            self._update(member, state, passed_s)
            if member.is_lost or self.launcher.closed is not None:
                del self.members[node]  # gone before the start: this node or its replacement may join again
            return
        assert member is not None
        if member.state.id != state.id:  # Ray restarted the rank, so the earlier process is gone
            member.is_lost = member.is_lost or member.is_at_work
        else:
            before = member.state
            self._update(member, state, passed_s)
            for name in state.asked[len(before.asked) :]:
                self.stop(signal.Signals[name])
            if state.notice is not None and before.notice is None:
                self._take_notice(state.notice["ranks"], state.notice["gone_in_s"])
        if not member.is_at_work and not member.is_end_handled:
            member.is_end_handled = True
            self._handle_end(member)

    def _update(self, member: Member, state: NodeState, passed_s: float) -> None:
        member.silent_s = 0.0 if state.beat != member.state.beat else member.silent_s + passed_s
        member.state = state
        has_gone = state.has_left or member.silent_s > LOST_AFTER_S
        member.is_lost = member.is_lost or (has_gone and state.exit_code is None)

    def _handle_end(self, member: Member) -> None:
        """Stop the other nodes if a node is lost or has failed."""
        state = member.state
        who = f"{self.launcher.unit} {state.node} ({state.host})"
        if member.is_lost:
            self.lost_ranks = state.ranks
            self.give_up(node_missing(_lost(who, state.ranks, self.launcher.unit)), timeout_s=self._stop_timeout_s)
        elif state.folder_problem is not None:
            self.give_up(RequestError(f"{who}: {state.folder_problem}", problem_id="folder-not-shared"))
        elif state.exit_code:
            if self.failed is None and len(state.ranks) == 1:
                self.failed = Failure(rank=state.ranks[0], exit_code=state.exit_code)
            self._stop_ranks(signal.SIGTERM, KILL_AFTER_S, "")

    def _start_or_give_up(self, now: float) -> None:
        """Start the ranks once every node has joined and all agree; otherwise name the nodes that do not."""
        states = [member.state for _, member in sorted(self.members.items())]
        published = [read_node(self._store, node) for node in range(self.launcher.num_nodes + 1)]
        refused = [state.refused for state in published if state is not None and state.refused is not None]
        unit = self.launcher.unit
        refused += [text for state in states[1:] if (text := difference(unit, state, states[0])) is not None]
        places = {state.place for state in states}
        is_complete = len(states) == self.launcher.num_nodes
        if self.num_places is not None and is_complete and len(places) != self.num_places:
            refused.append(
                f"the {unit}s were placed on {len(places)} machine{'s' if len(places) > 1 else ''}, and "
                f"hardware.num_nodes={self.num_places} was planned with; set hardware.num_nodes and gpus_per_node to "
                "what there is"
            )
        if refused:
            self.give_up(RequestError("; ".join(refused), problem_id="node-refused"))
        elif is_complete:
            self._start_ranks(states)
        elif now > self._start_by:
            limit = f"{self._start_timeout_s:g} s (launcher.start_timeout_s)"
            self.give_up(node_missing(f"{self.missing()} within {limit}{self._after_what()}"))

    def _start_ranks(self, states: list[NodeState]) -> None:
        self.on_start(self._attempt)
        self.failed = self._previous_failure = None
        self.lost_ranks = []
        self.is_running = True
        self.hosts = {rank: state.host for state in states for rank in state.ranks}
        # The first node may have reached the launcher over loopback, which other nodes cannot use. It then runs on the
        # launcher's machine, so the address by which the others reached that machine works.
        addresses = [states[0].address, *(state.reached_at for state in states)]
        self.launcher.master_address = next((each for each in addresses if not is_loopback(each)), addresses[0])
        self.launcher.master_port = states[0].port
        self.launcher.stops, self.launcher.members = [], [state.id for state in states]

    def _take_notice(self, ranks: list[int], gone_in_s: float | None) -> None:
        """Let all ranks save before some lose their machine, within the normal stop timeout."""
        when = "" if gone_in_s is None else f" in {gone_in_s:.0f} s"
        hosts = ", ".join(sorted({self.hosts[rank] for rank in ranks}))
        named = ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
        self.notice = f"{hosts} is to be taken away{when}, with {named}"
        timeout_s = self._stop_timeout_s
        self.stop(signal.SIGTERM, timeout_s if gone_in_s is None else min(timeout_s, gone_in_s))

    def _await_restart(self) -> None:
        """Wait for the nodes of the next attempt, which Ray starts after a failed one."""
        if all(member.state.exit_code == 0 for member in self.members.values()) or self.stopped_by is not None:
            return
        self._attempt += 1
        self._previous_failure = self.failure
        self.is_running, self.failure = False, None
        silent_s = max((member.silent_s for member in self.members.values() if member.is_lost), default=0.0)
        self._start_by = time.monotonic() + self._start_timeout_s - silent_s  # Ray counts from the loss, too
        self._earlier_ids |= {member.state.id for member in self.members.values()}
        self.members.clear()
        self.launcher.members = []  # tells the nodes of this attempt to leave

    def _after_what(self) -> str:
        """Describe how the previous attempt ended; empty if there was none."""
        if self._previous_failure is not None:
            return f" after {self._previous_failure.message}"
        if self.failed is not None:
            return f" after {where(self.failed.rank, self.hosts)} had failed: {self.failed.how}"
        return ""


def _lost(who: str, ranks: list[int], unit: str) -> str:
    """Return the message for a node that is silent, or that left while its ranks were running."""
    last = f" to {ranks[-1]}" if len(ranks) > 1 else ""
    with_ranks = f" with rank{'s' if last else ''} {ranks[0]}{last}" if ranks and unit != "rank" else ""
    return f"{who} was lost{with_ranks}: its launcher was killed, or the machine"


def node_missing(why: str) -> TunebookError:
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
    state = LauncherState(num_nodes=num_nodes, config_sha256=config_hash(config))
    group = NodeGroup(launcher=state, port=launcher.master_port)
    name = launcher.master_address or socket.gethostname()
    others, number = ("1", "1") if num_nodes == 2 else (f"N of 1 to {num_nodes - 1}", "N")
    text = f"on node {others}, type the same with: launcher.node_rank={number} launcher.master_address={name}"
    console.print(Text(text), soft_wrap=True)
    if (warning := address_warning(config)) is not None:
        console.print(Text(f"warning: {warning.text()}", style="yellow"), soft_wrap=True)
    return group


def address_warning(config: RunConfig) -> Problem | None:
    """Return a warning if node 0 cannot resolve the name by which the other nodes are to reach it.

    It is no error, since later nodes retry: a scheduler may publish names only once nodes are up.
    """
    launcher, key = config.launcher, "launcher.master_address"
    if not launcher.master_address or launcher.node_rank > 0 or config.hardware.num_nodes < 2:
        return None
    try:
        socket.getaddrinfo(launcher.master_address, launcher.master_port)
    except (OSError, UnicodeError) as error:
        message = (
            f"node 0 does not find {launcher.master_address} itself ({error}); where the other nodes do not either, "
            "they call in vain"
        )
        return Problem(id="master-address-unknown", key=key, message=message, fix=f"{key}=null", is_error=False)
    return None


def new_token() -> str:
    """Return a name for this run's keys in the store, known only to its own nodes."""
    return secrets.token_hex(16)


def address_of(group: NodeGroup) -> str:
    """Return the addresses of this machine and the port, in the form that `find_launcher` reads."""
    return f"{','.join(own_addresses())}:{group.port}"


def run_on_nodes(
    command: list[str],
    environment: Mapping[str, str],
    group: NodeGroup,
    config: RunConfig,
    folder: Path,
    *,
    exit_code_of: Callable[[], int],
    keep_open: Sequence[int] = (),
    find_stall: Callable[[], TunebookError | None] = lambda: None,
) -> ProcessEnd:
    """Run a command that starts nodes, which join `group`, until all have ended; leaves no process behind.

    `exit_code_of` reads the run's exit code from its folder; the nodes end with it. `find_stall` is polled for a reason
    why the ranks will never end; if it returns one, they are killed.
    """
    launcher, log = config.launcher, launcher_log(folder)
    requests = StopRequests(group.stop)
    with requests.listening(), adopting_orphans():
        before = set(children_of(os.getpid()))
        group.begin(folder, start_timeout_s=launcher.start_timeout_s, stop_timeout_s=launcher.stop_timeout_s)
        group.poll(0)  # nodes that were started by hand may have been refused by now
        if group.failure is not None:
            _end(group, None, requests, group.failure.exit_code)
            return ProcessEnd(exit_code=group.failure.exit_code, stopped_by=None, failure=group.failure)
        reported_before = log.stat().st_size if log.is_file() else 0
        started = start_command(command, {**environment, TOKEN_VARIABLE: group.token}, keep_open, log=log)
        is_cut_off = False
        while not group.is_over and requests.overdue_s < _CUT_OFF_S:
            group.poll(POLL_S)
            if requests.overdue_s > 0 and not is_cut_off:
                group.stop(signal.SIGKILL)
                is_cut_off = True
            if group.is_running and group.failure is None and (stall := find_stall()) is not None:
                group.give_up(stall, timeout_s=_CUT_OFF_S)
            # srun would wait for the nodes that have started, and they for the missing one.
            if not group.is_running and (error := why_not_started(config, log, reported_before)) is not None:
                group.give_up(error)
            elif started.poll() is not None and not group.is_running:
                _ended_early(group, command, started)
        _end(group, started, requests, exit_code_of())
        end_children(exclude=before, timeout_s=_LINGER_S, is_urgent=lambda: requests.is_urgent)
    return ProcessEnd(
        exit_code=started.process.returncode,
        stopped_by=requests.first or group.stopped_by,
        failed=group.failed,
        failure=group.failure,
        lost_ranks=tuple(group.lost_ranks),
        notice=group.notice,
    )


def _ended_early(group: NodeGroup, command: list[str], started: Started) -> None:
    if group.has_been_running:
        group.conclude()  # the ranks have written how they ended
        return
    why = f"{Path(command[0]).name} ended (exit code {started.process.returncode}), and {group.missing()}"
    group.give_up(node_missing(why))


def _end(group: NodeGroup, started: Started | None, requests: StopRequests, exit_code: int) -> None:
    """Publish the exit code and wait for the nodes and their command; then terminate the command, then kill it.

    After a second stop request the command is killed at once.
    """
    group.end(exit_code)
    patience_s = _LINGER_S if group.failure else KILL_AFTER_S
    if started is not None and group.stopped_by is not None and not group.has_been_running:
        started.process.terminate()  # stops nodes that have not joined yet
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number is not None and started is not None:
            started.process.send_signal(number)
        end = time.monotonic() + (patience_s if number is None else _LINGER_S)
        while time.monotonic() < end and not (requests.is_urgent and number is not signal.SIGKILL):
            has_ended = started is None or started.poll() is not None
            if has_ended and (number is not None or not group.has_unread_end()):
                return
            time.sleep(POLL_S)
    with suppress(TimeoutExpired):
        if started is not None:
            started.process.wait(POLL_S)
