"""Rendezvous of the launcher and the nodes of a run: a torch TCPStore that the launcher hosts.

Each side publishes one JSON document and reads the other's. The launcher publishes what to start, when to stop and how
the run ended. A node publishes its facts and how its ranks ended. A node publishes several times per second, so silence
means that it is lost.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tunebook.errors import RequestError, StoppedError, TunebookError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import PrefixStore, TCPStore

TOKEN_VARIABLE = "TUNEBOOK_RENDEZVOUS"  # names this run's keys in the store; nodes of another run do not know it
LOST_AFTER_S = 30.0  # of silence
PUBLISH_EVERY_S = 0.2
REFUSED_FOR_S = 30.0  # of refused connections; a launcher that listened before this node started has ended
_LAUNCHER = "launcher"  # key in the store
_CONNECT_TIMEOUT_S = 5.0
_CONNECT_EVERY_S = 1.0
_NAME_WITHIN_S = 30.0  # for a host name to resolve: a scheduler may publish it only when the node is up
_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


@dataclass(kw_only=True)
class NodeState:
    """What a node publishes (under Ray: a worker, which is one rank)."""

    node: int
    ranks: list[int]
    host: str
    address: str  # of this node, on the route to the launcher
    reached_at: str  # the launcher's address by which this node reached it
    port: int  # for the rendezvous of the ranks, if this is node 0
    versions: str
    code: str  # hash of Tunebook's files
    weights: str | None = None  # fingerprint of the base model, if each node may have its own copy
    problems: list[str] = field(default_factory=list)
    config_sha256: str | None = None  # only of a node that was started by hand
    place: str | None = None  # Ray's ID of the machine
    inside: dict[str, Any] | None = None  # contents of its container
    id: str = field(default_factory=lambda: secrets.token_hex(8))  # of this process: another may replace it
    beat: int = 0
    refused: str | None = None  # why it does not take part
    has_left: bool = False
    exit_code: int | None = None  # of its ranks
    folder_problem: str | None = None
    asked: list[str] = field(default_factory=list)  # signals that asked this node to stop
    notice: dict[str, Any] | None = None  # of preemption: `ranks` and `gone_in_s`


@dataclass(kw_only=True)
class LauncherState:
    """What the launcher publishes."""

    num_nodes: int
    unit: str = "node"
    config_sha256: str | None = None
    code: str | None = None  # hash that the code in containers must have
    closed: str | None = None  # why no node can join any more
    members: list[str] = field(default_factory=list)  # IDs of the nodes that are starting or have started
    restarts: bool = False  # whether lost nodes are replaced
    folder: str | None = None
    master_address: str | None = None
    master_port: int | None = None
    stops: list[tuple[str, float | None]] = field(default_factory=list)  # signal, seconds until ranks are killed
    exit_code: int | None = None  # of the run, once it has ended


def why_refused(state: NodeState, launcher: LauncherState) -> str | None:
    """Say why a node cannot take part, as far as the node itself can tell; None if it can."""
    who = f"{launcher.unit} {state.node} ({state.host})"
    if is_other_request(state, launcher):
        return (
            f"{who} was asked for another run: type the same command on every node, with a different "
            "launcher.node_rank; a separate run needs another launcher.master_port"
        )
    if launcher.closed is not None:
        return launcher.closed
    if not 0 <= state.node < launcher.num_nodes:
        return (
            f"{who} joined, and the run has {launcher.num_nodes}: numbers go from 0 to {launcher.num_nodes - 1}; set "
            "launcher.node_rank and hardware.num_nodes"
        )
    if launcher.members and not launcher.restarts:
        return f"{who} joined, and the run is at work already, with all its {launcher.unit}s; wait for it to end"
    if launcher.code is not None and state.code != launcher.code:
        return (
            f"{who} has other code of Tunebook in its container than the launcher: its files have the hash "
            f"{state.code[:12]}, the launcher's {launcher.code[:12]}; update the image of every node (make image, or "
            "make pull), or run the code in it: TUNEBOOK_USE_IMAGE_SOURCES=1"
        )
    return f"{who} cannot take part: {'; '.join(state.problems)}" if state.problems else None


def is_other_request(state: NodeState, launcher: LauncherState) -> bool:
    """Whether a node was started for another run than the launcher's."""
    return state.config_sha256 is not None and state.config_sha256 != launcher.config_sha256


def difference(unit: str, state: NodeState, other: NodeState) -> str | None:
    """Say how a node differs from another in what all nodes must share; None if it does not."""
    who, them = f"{unit} {state.node} ({state.host})", f"{unit} {other.node} ({other.host})"
    if state.versions != other.versions:
        return f"{who} has other software than {them}: {state.versions}, and there {other.versions}"
    if state.code != other.code:
        return (
            f"{who} has other code of Tunebook than {them}, of the same version: its files have the hash "
            f"{state.code[:12]}, and there {other.code[:12]}; bring every node to the same commit without local "
            "changes (git rev-parse HEAD; git status --short), or use one checkout that all nodes share"
        )
    if None not in (state.weights, other.weights) and state.weights != other.weights:
        return (  # some strategies read every copy, others only the first node's
            f"{who} has other weights of the base model in model.path than {them}: their fingerprint is "
            f"{str(state.weights)[:12]}, and there {str(other.weights)[:12]}; copy the folder again to the nodes that "
            "differ, or name one that all nodes share: model.path=/a/shared/folder"
        )
    return None


def host_store(port: int, token: str) -> tuple[PrefixStore, int]:
    """Open the launcher's store on `port` (0: any free port); return it and the port.

    Raises: RequestError if the port is in use.
    """
    listener = _listen(port)
    port = listener.getsockname()[1]
    _import_torch()
    return _store("127.0.0.1", port, token, listener.detach()), port


def publish(store: PrefixStore, state: LauncherState) -> None:
    """Publish the launcher's state to every node."""
    store.set(_LAUNCHER, json.dumps(asdict(state)))


def read_node(store: PrefixStore, number: int) -> NodeState | None:
    """Return what a node has published.

    The last refused node with an invalid number is stored under the number of nodes.
    """
    with suppress(TypeError, ValueError):  # from another version of Tunebook, whose node counts as missing
        values = _read(store, f"node/{number}")
        if isinstance(values, dict) and _has_types(values):
            return NodeState(**values)
    return None


def _has_types(values: dict[str, Any]) -> bool:
    """Whether a document has the types that the code relies on: any program may write to the store."""
    types = {"node": int, "ranks": list, "host": str, "address": str, "port": int, "beat": int, "asked": list}
    return all(isinstance(values.get(name), kind) for name, kind in types.items())


def _read(store: PrefixStore, key: str) -> Any:
    return json.loads(store.get(key)) if store.check([key]) else None


class Link(threading.Thread):
    """A node's connection to the store; a thread, because operations hang as long as the launcher's machine does."""

    _store: PrefixStore

    def __init__(self, meet: str, state: NodeState) -> None:
        super().__init__(name="rendezvous", daemon=True)
        _import_torch()  # not in the thread: from a cold disk this takes minutes, which must not count as a late reply
        self.state, self.launcher, self.has_answered = state, LauncherState(num_nodes=0), False
        self._address = (state.reached_at, int(meet.rpartition(":")[2]))
        self._is_closed = self._is_dead = False
        self._seen = time.monotonic()
        self._changed = threading.Event()

    @property
    def is_lost(self) -> bool:
        """Whether the launcher or its machine is gone. A launcher that is only suspended still accepts connections."""
        if not self._is_dead and time.monotonic() - self._seen > LOST_AFTER_S:
            try:
                socket.create_connection(self._address, timeout=_CONNECT_TIMEOUT_S).close()
                self._seen = time.monotonic()
            except OSError:
                self._is_dead = True
        return self._is_dead

    def run(self) -> None:
        """Publish this node's state and read the launcher's, until the node leaves."""
        try:
            self._store = _store(*self._address, os.environ.get(TOKEN_VARIABLE, ""))
            self._join()
            while self.state.refused is None:
                has_left = self.state.has_left = self._is_closed
                self._write(self.state.node)
                self._read_launcher()
                if has_left:
                    return
                self._changed.wait(PUBLISH_EVERY_S)
                self._changed.clear()
        except Exception:  # torch: the connection was closed; json: this is no launcher
            self._is_dead = True

    def _join(self) -> None:
        while not self._store.check([_LAUNCHER]):
            time.sleep(PUBLISH_EVERY_S)
        self._read_launcher()
        state, launcher = self.state, self.launcher
        refused, other = why_refused(state, launcher), read_node(self._store, state.node)
        if other is not None and (launcher.restarts or other.has_left or other.refused or not self._is_alive(other)):
            other = None  # Ray never runs a rank twice
        if other is not None and refused is None:
            refused = (
                f"{launcher.unit} {state.node} ({state.host}) joined, and so did {other.host} with that number: each "
                "node needs its own launcher.node_rank"
            )
        state.refused = refused
        # A command for another run, or one that comes too late, must not end this run.
        is_stray = launcher.members or launcher.closed or (other is not None and is_other_request(state, launcher))
        if refused is not None and not is_stray:
            is_possible = 0 <= state.node < launcher.num_nodes and other is None
            self._write(state.node if is_possible else launcher.num_nodes)

    def _write(self, number: int) -> None:
        self.state.beat += 1
        self._store.set(f"node/{number}", json.dumps(asdict(self.state)))

    def _is_alive(self, other: NodeState) -> bool:
        """Whether the other node with this node's number still publishes."""
        time.sleep(10 * PUBLISH_EVERY_S)
        now = read_node(self._store, other.node)
        return now is not None and (now.id, now.beat) != (other.id, other.beat)

    def _read_launcher(self) -> None:
        self.launcher = LauncherState(**_read(self._store, _LAUNCHER))
        self._seen, self.has_answered = time.monotonic(), True

    def publish(self) -> None:
        """Publish a changed state to the launcher now."""
        self._changed.set()

    def close(self) -> None:
        """Leave the rendezvous, and tell the launcher if it is reachable."""
        self._is_closed = True
        self.publish()
        self.join(_CONNECT_TIMEOUT_S)


def find_launcher(
    meet: str,
    timeout_s: float,
    say: Callable[[str], None],
    asked_to_stop: Sequence[signal.Signals] = (),
    *,
    refused_for_s: float | None = None,
) -> tuple[str, str]:
    """Retry until a launcher listens at `meet`, `address[,address...]:port`; return this node's and its address.

    `refused_for_s` limits how long refused connections are retried, for launchers that listen before any node starts.
    Raises: RequestError for an unknown name, TunebookError if nobody listens within `timeout_s`, StoppedError when
    `asked_to_stop` gets an element.
    """
    names, _, port = meet.rpartition(":")
    started, refused_since, has_said = time.monotonic(), None, False
    while True:
        problems: dict[str, OSError] = {}
        for name in names.split(","):
            try:
                with socket.create_connection((name, int(port)), timeout=_CONNECT_TIMEOUT_S) as connection:
                    return plain_address(connection.getsockname()[0]), str(connection.getpeername()[0])
            except OSError as error:
                problems[name] = error
        if asked_to_stop:
            raise StoppedError(f"stopped by {asked_to_stop[0].name} before the start", problem_id="stopped")
        now = time.monotonic()
        refused_since = (refused_since or now) if _is_refused(problems) else None
        why = "; ".join(f"{name}: {error.strerror or error}" for name, error in problems.items())
        if refused_for_s is not None and refused_since is not None and now - refused_since >= refused_for_s:
            message = f"the launcher at {meet} has ended: connections are refused since {refused_for_s:g} s ({why})"
            raise TunebookError(message, problem_id="launcher-lost")
        if now - started > _NAME_WITHIN_S and all(isinstance(error, socket.gaierror) for error in problems.values()):
            raise RequestError(f"{why}; name node 0 with launcher.master_address", problem_id="launcher-out-of-reach")
        if now - started > timeout_s:
            raise TunebookError(
                f"no launcher answers at {meet} within {timeout_s:g} s (launcher.start_timeout_s): {why}. Is the "
                "command for node 0 running there, and may this node reach that port?",
                problem_id="launcher-out-of-reach",
            )
        if not has_said:
            has_said = True
            say(f"connecting to {meet}, up to {timeout_s:g} s ({why})")
        time.sleep(_CONNECT_EVERY_S)


def plain_address(address: str) -> str:
    """Return an IPv4 address without the prefix that it has on an IPv6 socket."""
    return address.removeprefix("::ffff:")


def is_loopback(address: str) -> bool:
    """Whether an address refers to this machine only."""
    return address.startswith("127.") or address == "::1"


def own_addresses() -> list[str]:
    """Addresses by which nodes may reach this machine, likeliest first; loopback last, for nodes on this machine."""
    names, found = [os.environ.get("SLURMD_NODENAME", ""), socket.gethostname()], []
    for name in filter(None, names):
        with suppress(OSError):
            infos = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
            found += [str(info[4][0]) for info in infos if not is_loopback(str(info[4][0]))]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing: finds the source address for external packets
        found.append(str(probe.getsockname()[0]))
    return list(dict.fromkeys([*found, "127.0.0.1"]))


def _is_refused(problems: dict[str, OSError]) -> bool:
    """Whether the launcher's machine refuses connections; a refusal on loopback alone may be another machine's."""
    refused = [name for name, error in problems.items() if isinstance(error, ConnectionRefusedError)]
    return len(refused) == len(problems) or any(not is_loopback(name) for name in refused)


def _listen(port: int) -> socket.socket:
    has_both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, backlog=4096, dualstack_ipv6=has_both)
    except OSError as error:
        raise RequestError(
            f"launcher.master_port={port}: {error.strerror} on this machine; another program, or another run, listens "
            f"there. Try launcher.master_port={port + 1} on every node",
            problem_id="port-in-use",
        ) from error


def _store(host: str, port: int, token: str, listener: int | None = None) -> PrefixStore:
    from torch._C._distributed_c10d import PrefixStore  # torch.distributed has it too, but not to mypy

    return PrefixStore(f"tunebook-{token}", open_store(host, port, listener=listener))


def open_store(host: str, port: int, *, is_master: bool = False, listener: int | None = None) -> TCPStore:
    """Open a torch store; `listener` is the descriptor of a socket on which this process hosts it."""
    from torch._C._distributed_c10d import TCPStore

    timeout = timedelta(seconds=60)
    if listener is None:
        return TCPStore(host, port, is_master=is_master, timeout=timeout, wait_for_workers=False)
    return TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener)


def _import_torch() -> None:
    """Import torch so that its C++ code prints no stack traces for a lost connection, which is reported in one line."""
    before = os.environ.get(_LOG_LEVEL)
    os.environ.setdefault(_LOG_LEVEL, "FATAL")
    import torch  # noqa: F401

    if before is None:
        del os.environ[_LOG_LEVEL]
