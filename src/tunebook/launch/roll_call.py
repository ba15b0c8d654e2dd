"""The launcher's side of a run on several nodes: every node calls in, hears where to meet, and stays on the line.

So a node that never comes, comes with other hardware, or is lost, is known by name, and the others are told at once:
ranks that talk over NCCL would wait for it until `launcher.timeout_s`. One thread, which calls `poll` in its loop;
while the launcher prepares that is one of its own, so that who calls is answered (`answer_early`).
"""

from __future__ import annotations

import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tunebook.errors import RequestError, TunebookError
from tunebook.launch.line import DEAD_AFTER_S, Line, Message, is_loopback
from tunebook.launch.logs import Failure, where

# Seconds that ranks get to end after one of them has failed: no save can succeed without it. torchrun gives as many.
KILL_AFTER_S = 30
_HELLO_WITHIN_S = 30
_HELLO: dict[str, type] = {
    "node": int, "ranks": list, "host": str, "address": str, "reached_at": str, "port": int, "versions": str,
    "code": str, "problems": list,
}  # fmt: skip
_NUM_STRANGERS = 64  # connections that have not said hello yet
_POLL_EARLY_S = 0.2
_SHOWN_OF_HASH = 12


@dataclass(kw_only=True)
class Member:
    """A node (of a Ray run: a rank) that has called in."""

    line: Line
    hello: Message
    exit_code: int | None = None  # of its ranks, once they have ended

    @property
    def host(self) -> str:
        """The name of its machine."""
        return str(self.hello["host"])

    @property
    def is_at_work(self) -> bool:
        """Whether its ranks may still run."""
        return self.exit_code is None and not self.line.is_closed


@dataclass(kw_only=True)
class _Call:
    line: Line
    since: float


@dataclass(kw_only=True)
class RollCall:
    """Waits for `num_members` nodes on a port and follows them to their end."""

    num_members: int
    token: str  # what a caller must know
    config_sha256: str | None = None  # compared with what a node that somebody started by hand was asked for
    code: str | None = None  # of the launcher, which members in containers must have too; None: any that all have
    port: int = 0  # 0: any that is free
    unit: str = "node"
    names: Mapping[int, str] = field(default_factory=dict)  # of nodes, where a scheduler tells them beforehand
    reassembles: bool = False  # whether lost nodes are replaced, by Ray
    num_places: int | None = None  # machines that the members must be spread over, where they do not say it themselves
    on_go: Callable[[int], None] = lambda attempt: None  # called before the ranks start, with the attempt's number
    failure: TunebookError | None = None  # why the run was ended from here
    stopped_by: str | None = None  # the signal by which a node, or this process, was asked to stop
    notice: str | None = None  # which machines of the run are to be taken away, and when
    failed: Failure | None = None  # the rank that failed first, where a member is one rank
    lost_ranks: list[int] = field(default_factory=list)  # of the node that was lost last
    hosts: dict[int, str] = field(default_factory=dict)  # of ranks

    def __post_init__(self) -> None:
        self._members: dict[int, Member] = {}
        self._strangers: list[_Call] = []
        self._refused_early: dict[int, str] = {}  # why, of those that have not called again rightly
        self._folder: Path | None = None
        self._attempt = 0
        self._after_what = ""  # how the attempt before ended
        self._last_failure: TunebookError | None = None  # of the attempt before
        self._is_concluded = False
        self._sent_home: str | None = None  # why, to everybody who still calls
        self._has_ended = False
        self.is_running = False  # whether every node has been told to go
        self._start_by: float | None = None
        self._kill_at: float | None = None
        self._stops: list[tuple[signal.Signals, float | None]] = []  # and in how many seconds ranks are killed
        self._early: threading.Thread | None = None
        self._has_begun = threading.Event()
        self._listener = _listen(self.port, self.num_members)
        self.port = self._listener.getsockname()[1]

    def answer_early(self) -> None:
        """Hear who calls from now on until `begin`, in a thread: what is done meanwhile may take hours.

        A caller without an answer could not tell a launcher that prepares from a wrong port.
        """
        self._early = threading.Thread(target=self._poll_early, daemon=True, name="roll-call")
        self._early.start()

    def _poll_early(self) -> None:
        while not self._has_begun.is_set():
            self.poll(_POLL_EARLY_S)

    def _take_over(self) -> None:
        """From now on this thread is the one that polls."""
        self._has_begun.set()
        if self._early is not None:
            self._early.join()

    def begin(self, folder: Path, *, start_timeout_s: float, stop_timeout_s: float) -> None:
        """From now on nodes are started, and those that are missing `start_timeout_s` later end the run.

        One that was refused before, and has not called again rightly, ends it now: its command has ended.
        """
        self._take_over()
        self._folder = folder
        self._start_timeout_s, self._stop_timeout_s = start_timeout_s, stop_timeout_s
        self._start_by = time.monotonic() + start_timeout_s
        if self._refused_early:
            self.give_up(RequestError("; ".join(self._refused_early.values()), problem_id="node-refused"))

    def conclude(self) -> None:
        """Nobody will call any more; what ended the last attempt has ended the run."""
        self._is_concluded = True
        self.failure = self.failure or self._last_failure

    @property
    def has_been_running(self) -> bool:
        """Whether ranks have been started, in this attempt or in one before."""
        return self.is_running or self._attempt > 0

    @property
    def is_over(self) -> bool:
        """Whether no node is at work any more, after all were, or after the run was given up."""
        has_begun = self.is_running or self.failure is not None or self.stopped_by is not None or self._is_concluded
        return has_begun and not any(member.is_at_work for member in self._members.values())

    def stop(self, number: signal.Signals, kill_after_s: float | None = None) -> None:
        """Hand a request to stop on to the ranks of every node; may be called from a signal handler."""
        self.stopped_by = self.stopped_by or number.name
        self._stops.append((number, kill_after_s))

    def poll(self, timeout_s: float) -> None:
        """Take calls and messages for at most `timeout_s`, and do what time-outs ask for."""
        watched: list[Line | socket.socket] = [self._listener]
        watched += [member.line for member in self._members.values() if not member.line.is_closed]
        watched += [call.line for call in self._strangers]
        with suppress(InterruptedError):
            ready, _, _ = select.select(watched, [], [], timeout_s)
            if self._listener in ready:
                self._take_call()
        while self._stops:
            number, kill_after_s = self._stops.pop(0)
            if self.is_running:
                self._tell_all("stop", signal=number.name, kill_after_s=kill_after_s)
            else:
                self._dismiss(f"stopped by {number.name} before the start")
        for call in list(self._strangers):
            self._hear_stranger(call)
        for node, member in list(self._members.items()):
            self._hear(node, member)
        if not self._has_ended:
            self._mind_the_time()

    def give_up(self, failure: TunebookError, *, timeout_s: float = KILL_AFTER_S) -> None:
        """End the run: ranks are asked to stop, and killed `timeout_s` later."""
        self.failure = self.failure or failure
        if self.is_running:
            self._tell_all("stop", signal=signal.SIGTERM.name, kill_after_s=timeout_s)
        else:
            self._dismiss(failure.message)

    def end(self, exit_code: int) -> None:
        """Tell the nodes how the run ended; who calls later, such as a container that was slow, is sent home."""
        self._take_over()
        self._has_ended = True
        self._sent_home = self._sent_home or "the run has ended"
        self._tell_all("end", exit_code=exit_code)
        for member in self._members.values():
            member.line.close()

    def close(self, exit_code: int) -> None:
        """Tell the nodes how the run ended, and answer nobody any more."""
        self.end(exit_code)
        for call in self._strangers:
            call.line.close()
        self._listener.close()

    def missing(self) -> str:
        """The nodes that have not called in."""
        absent = [node for node in range(self.num_members) if node not in self._members]
        names = ", ".join(f"{self.unit} {node}" + self._in_brackets(node) for node in absent)
        return f"{names} of {self.num_members} {self.unit}s {'has' if len(absent) == 1 else 'have'} not called in"

    def hello_of(self, node: int) -> Message:
        """What a node that is in said of itself."""
        return self._members[node].hello

    def _dismiss(self, why: str) -> None:
        """Send everybody home before the start, also who calls later."""
        self._sent_home = why
        self._tell_all("refuse", message=why)
        self._hang_up()

    def _in_brackets(self, node: int) -> str:
        return f" ({self.names[node]})" if node in self.names else ""

    def _take_call(self) -> None:
        try:
            connection, _address = self._listener.accept()
        except OSError:
            return
        self._strangers.append(_Call(line=Line(connection), since=time.monotonic()))
        if len(self._strangers) > _NUM_STRANGERS:
            self._strangers.pop(0).line.close()

    def _hear_stranger(self, call: _Call) -> None:
        for message in call.line.receive(0):
            self._strangers.remove(call)
            if message.get("token") != self.token or not _is_hello(message):
                call.line.send("refuse", message="another run, or another version of Tunebook, is at work on this port")
                call.line.close()
            else:
                self._let_in(Member(line=call.line, hello=message))
            return
        if call.line.is_closed or time.monotonic() - call.since > _HELLO_WITHIN_S:
            self._strangers.remove(call)
            call.line.close()

    def _let_in(self, member: Member) -> None:
        node = int(member.hello["node"])
        problem = self._problem_with(node, member)
        if problem is not None:
            member.line.send("refuse", message=problem)
            member.line.close()
            # Somebody else's command, or the same typed twice, must not end what trains already, nor who comes late
            # change how the run has ended.
            if self.is_running or self._sent_home is not None or self._is_stray(node, member):
                return
            if self._folder is None:  # nothing is lost yet: it may be corrected and call again
                self._refused_early[node] = problem
            else:
                self.give_up(RequestError(problem, problem_id="node-refused"))
            return
        member.line.send("welcome")
        self._refused_early.pop(node, None)
        self._members[node] = member
        if len(self._members) == self.num_members and self._folder is not None:
            self._go()

    def _problem_with(self, node: int, member: Member) -> str | None:
        """Why a node cannot take part."""
        who = f"{self.unit} {node} ({member.host})"
        if self._is_of_other_words(member):
            return (
                f"{who} was asked for another run: type the same words on every node, but for launcher.node_rank; "
                "a run of its own needs another launcher.master_port"
            )
        if self._sent_home is not None:
            return self._sent_home  # soon said on node 0, too
        if not 0 <= node < self.num_members:
            return (
                f"{who} called in, and the run has {self.num_members}: numbers go from 0 to {self.num_members - 1}; "
                "set launcher.node_rank and hardware.num_nodes"
            )
        if self.is_running and not self.reassembles:
            return f"{who} called in, and the run is at work already, with all its {self.unit}s; wait for it to end"
        if self._is_in(node):
            by_that = f"{self._members[node].host} by that number"
            return f"{who} called in, and so did {by_that}: each node needs a launcher.node_rank"
        if (other := self._other_software(who, member) or self._other_weights(who, member)) is not None:
            return other
        problems = member.hello["problems"]
        return f"{who} cannot take part: {'; '.join(problems)}" if problems else None

    def _other_software(self, who: str, member: Member) -> str | None:
        """How a member's code or packages differ from the launcher's, where these are required, or from another's."""
        if self.code is not None and member.hello["code"] != self.code:
            return (
                f"{who} has other code of Tunebook in its container than the launcher: its files have the hash "
                f"{member.hello['code'][:_SHOWN_OF_HASH]}, and there {self.code[:_SHOWN_OF_HASH]}; bring the image of "
                "every node up to date (make image, or make pull), or run what it holds: TUNEBOOK_USE_IMAGE_SOURCES=1"
            )
        for other, first in self._members.items():
            if member.hello["versions"] != first.hello["versions"]:
                return (
                    f"{who} has other software than {self.unit} {other} ({first.host}): {member.hello['versions']}, "
                    f"and there {first.hello['versions']}"
                )
            if member.hello["code"] != first.hello["code"]:
                return (
                    f"{who} has other code of Tunebook than {self.unit} {other} ({first.host}), of the same version: "
                    f"its files have the hash {member.hello['code'][:_SHOWN_OF_HASH]}, and there "
                    f"{first.hello['code'][:_SHOWN_OF_HASH]}; bring every node to the same commit without changes of "
                    "its own (git rev-parse HEAD; git status --short), or use one checkout that all nodes share"
                )
        return None

    def _other_weights(self, who: str, member: Member) -> str | None:
        """How a member's copy of the base model differs from another's, where both have looked at one.

        Some strategies read every copy and some the first node's alone, which after a new start may be another node.
        """
        own = member.hello.get("weights")
        for other, first in self._members.items():
            theirs = first.hello.get("weights")
            if None not in (own, theirs) and own != theirs:
                return (
                    f"{who} has other weights of the base model in model.path than {self.unit} {other} ({first.host}): "
                    f"their fingerprint is {str(own)[:_SHOWN_OF_HASH]}, and there {str(theirs)[:_SHOWN_OF_HASH]}; copy "
                    "the folder anew to the nodes that have another, or name one that all nodes share: "
                    "model.path=/a/shared/folder"
                )
        return None

    def _is_in(self, node: int) -> bool:
        """Whether a node by that number is on the line."""
        return node in self._members and not self._members[node].line.is_closed

    def _is_of_other_words(self, member: Member) -> bool:
        asked_for = member.hello.get("config_sha256")
        return asked_for is not None and asked_for != self.config_sha256

    def _is_stray(self, node: int, member: Member) -> bool:
        """Whether a node of other words belongs to another run: here that number is not waited for.

        One that is waited for was most likely typed with a mistake: it is no use to wait for the right one.
        """
        return self._is_of_other_words(member) and self._is_in(node)

    def _go(self) -> None:
        places = {member.hello["place"] for member in self._members.values()}
        if self.num_places is not None and len(places) != self.num_places:
            wrong = (
                f"the {self.unit}s were placed on {len(places)} machine{'s' if len(places) > 1 else ''}, and "
                f"hardware.num_nodes={self.num_places} was planned with; set hardware.num_nodes and gpus_per_node to "
                "what there is"
            )
            self.give_up(RequestError(wrong, problem_id="node-refused"))
            return
        self.on_go(self._attempt)
        self.failed = self._last_failure = None
        self.lost_ranks = []
        self.is_running, self._start_by = True, None
        self.hosts = {rank: m.host for m in self._members.values() for rank in m.hello["ranks"]}
        master = next(m for m in self._members.values() if 0 in m.hello["ranks"])
        # The first node may have reached the launcher over loopback, where the others do not find it: it is then on the
        # launcher's own machine, whose address is the one by which the others reached that.
        addresses = [master.hello["address"], *(member.hello["reached_at"] for member in self._members.values())]
        address = next((address for address in addresses if not is_loopback(address)), addresses[0])
        self._tell_all("go", folder=str(self._folder), master_address=address, master_port=master.hello["port"])

    def _hear(self, node: int, member: Member) -> None:
        was_at_work = member.is_at_work
        for message in member.line.receive(0):
            if message["kind"] == "ended":
                member.exit_code = int(message["exit_code"])
                if member.exit_code != 0 and self.failed is None and len(member.hello["ranks"]) == 1:
                    self.failed = Failure(rank=member.hello["ranks"][0], exit_code=member.exit_code)
                if message["why"] is not None:
                    why = f"{self.unit} {node} ({member.host}): {message['why']}"
                    self.give_up(RequestError(why, problem_id="folder-not-shared"))
            elif message["kind"] == "asked":
                self.stop(signal.Signals[message["signal"]])
            elif message["kind"] == "notice":
                self._take_notice([int(rank) for rank in message["ranks"]], message["gone_in_s"])
        if not was_at_work or member.is_at_work or not self.is_running:
            return
        who = f"{self.unit} {node} ({member.host})"
        if member.exit_code is None:
            self._kill_at = self._kill_at or time.monotonic() + self._stop_timeout_s + KILL_AFTER_S
            self.lost_ranks = member.hello["ranks"]
            self.give_up(node_missing(_lost(who, self.lost_ranks, self.unit)), timeout_s=self._stop_timeout_s)
        elif member.exit_code != 0 and any(other.is_at_work for other in self._members.values()):
            self._kill_at = self._kill_at or time.monotonic() + 2 * KILL_AFTER_S
            self._tell_all("stop", signal=signal.SIGTERM.name, kill_after_s=KILL_AFTER_S)

    def _take_notice(self, ranks: list[int], gone_in_s: float | None) -> None:
        """Let all ranks save before some lose their machine, within the time that any stop gets."""
        when = "" if gone_in_s is None else f" in {gone_in_s:.0f} s"
        hosts = ", ".join(sorted({self.hosts[rank] for rank in ranks}))
        named = ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
        self.notice = f"{hosts} is to be taken away{when}, with {named}"
        timeout_s = self._stop_timeout_s
        self.stop(signal.SIGTERM, timeout_s if gone_in_s is None else min(timeout_s, gone_in_s))

    def _mind_the_time(self) -> None:
        now = time.monotonic()
        if not self.is_running:
            for node in [node for node, member in self._members.items() if member.line.is_closed]:
                self._members.pop(node).line.close()  # gone before the start: it, or its successor, may call again
        if self._start_by is not None and now > self._start_by and self.failure is None:
            late = f"{self.missing()} within {self._start_timeout_s:g} s (launcher.start_timeout_s){self._after_what}"
            self.give_up(node_missing(late))
        if self._kill_at is not None and now > self._kill_at:
            self._kill_at = now + DEAD_AFTER_S
            self._tell_all("stop", signal=signal.SIGKILL.name, kill_after_s=None)
        if self.reassembles and self.is_running and not any(m.is_at_work for m in self._members.values()):
            self._await_the_next()

    def _await_the_next(self) -> None:
        """After an attempt that failed its nodes may be started again, by what started them."""
        if all(member.exit_code == 0 for member in self._members.values()) or self.stopped_by is not None:
            return
        self._attempt += 1
        self._last_failure = self.failure
        if self.failure is not None:
            self._after_what = f" after {self.failure.message}"
        elif self.failed is not None:
            self._after_what = f" after {where(self.failed.rank, self.hosts)} had failed: {self.failed.how}"
        self.is_running, self.failure, self._kill_at = False, None, None
        self._tell_all("end", exit_code=1)
        self._hang_up()
        self._start_by = time.monotonic() + self._start_timeout_s

    def _hang_up(self) -> None:
        """Forget the members: they may call again."""
        for member in self._members.values():
            member.line.close()
        self._members.clear()

    def _tell_all(self, kind: str, **values: object) -> None:
        for member in self._members.values():
            if not member.line.is_closed:
                member.line.send(kind, **values)


def _is_hello(message: Message) -> bool:
    """Whether a message is a whole hello: anybody may call a port."""
    return message["kind"] == "hello" and all(isinstance(message.get(key), kind) for key, kind in _HELLO.items())


def _lost(who: str, ranks: list[int], unit: str) -> str:
    """What is said of a member whose line was closed from the other end."""
    last = f" to {ranks[-1]}" if len(ranks) > 1 else ""
    with_ranks = f" with rank{'s' if last else ''} {ranks[0]}{last}" if ranks and unit != "rank" else ""
    return f"{who} was lost{with_ranks}: its launcher was killed, or the machine"


def node_missing(why: str) -> TunebookError:
    """The error for a node that is not there."""
    return TunebookError(why, problem_id="node-missing")


def _listen(port: int, backlog: int) -> socket.socket:
    has_both = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("", port),
            family=socket.AF_INET6 if has_both else socket.AF_INET,
            backlog=max(128, backlog),
            dualstack_ipv6=has_both,
        )
    except OSError as error:
        raise RequestError(
            f"launcher.master_port={port}: {error.strerror} on this machine; another program, or another run, listens "
            f"there. Try launcher.master_port={port + 1} on every node",
            problem_id="port-in-use",
        ) from error
