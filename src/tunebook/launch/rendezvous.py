"""Rendezvous of the launcher and the nodes of a run: a torch TCPStore that the launcher hosts.

Each side publishes one JSON document and reads the other's. The launcher publishes what to start, when to stop and how
the run ended. A node publishes its facts and how its ranks ended. A node publishes several times per second, so silence
means that it is lost.
"""

from __future__ import annotations

import json
import os
import signal
import socket
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
REFUSED_FOR_S = 30.0  # of refused connections; a launcher that listened before this node started has ended
CONNECT_TIMEOUT_S = 5.0
_CONNECT_EVERY_S = 1.0
_NAME_WITHIN_S = 30.0  # for a host name to resolve: a scheduler may publish it only when the node is up
_LAUNCHER, _JOINED = "launcher", "joined"  # keys in the store
_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


@dataclass(kw_only=True)
class NodeState:
    """What a node publishes (under Ray: a worker, which is one rank)."""

    node: int
    host: str
    address: str  # of this node, on the route to the launcher
    port: int  # for the rendezvous of the ranks, if this is node 0
    versions: str
    code: str  # hash of Tunebook's files
    weights: str | None = None  # fingerprint of the base model, if each node may have its own copy
    problems: list[str] = field(default_factory=list)  # why its ranks cannot run
    config_sha256: str | None = None  # only of a node that was started by hand
    machine: str | None = None  # Ray's ID of it
    inside: dict[str, Any] | None = None  # contents of its container
    beat: int = 0
    has_left: bool = False
    exit_code: int | None = None  # of its ranks
    stop_requests: list[str] = field(default_factory=list)  # signals that this node received
    notice: dict[str, Any] | None = None  # of preemption: `ranks` and `gone_in_s`
    id: str = ""  # of this process: another may join in its place
    silent_s: float = 0.0  # as the launcher sees it, while the launcher runs: a whole job may be suspended

    @property
    def has_gone(self) -> bool:
        """Whether the process has left, or is lost."""
        return self.has_left or self.silent_s > LOST_AFTER_S

    @property
    def is_active(self) -> bool:
        """Whether its ranks may still run."""
        return self.exit_code is None and not self.has_gone


@dataclass(kw_only=True)
class LauncherState:
    """What the launcher publishes."""

    refused: dict[str, str] = field(default_factory=dict)  # by ID: why it does not take part
    closed: str | None = None  # why no node can join any more
    members: list[str] = field(default_factory=list)  # IDs of the nodes that are starting or have started
    folder: str | None = None
    master_address: str = ""
    master_port: int = 0
    stops: list[tuple[str, float | None]] = field(default_factory=list)  # signal, seconds until ranks are killed
    exit_code: int | None = None  # of the run, once it has ended


def host_store(port: int, token: str) -> tuple[PrefixStore, int]:
    """Open the launcher's store on `port` (0: any free port); return it and the port.

    Raises: RequestError if the port is in use.
    """
    import_torch()
    try:
        store = open_store("127.0.0.1", port, is_master=True)
    except RuntimeError as error:
        text = str(error)
        why = "Address already in use" if "EADDRINUSE" in text else text.splitlines()[0]
        raise RequestError(
            f"launcher.master_port={port}: {why} on this machine; another program, or another run, listens there. Try "
            f"launcher.master_port={port + 1 if port < 65535 else port - 1} on every node",
            problem_id="port-in-use",
        ) from error
    return _keys_of_run(store, token), store.port


def join_store(host: str, port: int) -> tuple[PrefixStore, str]:
    """Open the launcher's store from a node; return it and an ID for this process."""
    store = _keys_of_run(open_store(host, port), os.environ.get(TOKEN_VARIABLE, ""))
    return store, str(store.add(_JOINED, 1))


def joined_ids(store: PrefixStore) -> list[str]:
    """Return the IDs of the processes that have joined, in their order."""
    return [str(number + 1) for number in range(store.add(_JOINED, 0))]


def publish(store: PrefixStore, state: LauncherState | NodeState) -> None:
    """Publish the state of the launcher or of a node."""
    store.set(state.id if isinstance(state, NodeState) else _LAUNCHER, json.dumps(asdict(state)))


def read_launcher(store: PrefixStore) -> LauncherState:
    """Return what the launcher has published; waits for it."""
    return LauncherState(**json.loads(store.get(_LAUNCHER)))


def read_node(store: PrefixStore, node_id: str) -> NodeState | None:
    """Return what a node has published; None for what only another program or version can have written."""
    if not store.check([node_id]):
        return None
    with suppress(TypeError, ValueError):
        state = NodeState(**json.loads(store.get(node_id)))
        types = {"node": int, "host": str, "address": str, "port": int, "beat": int, "stop_requests": list}
        if state.id == node_id and all(isinstance(getattr(state, name), kind) for name, kind in types.items()):
            return state
    return None


def _keys_of_run(store: TCPStore, token: str) -> PrefixStore:
    from torch._C._distributed_c10d import PrefixStore  # torch.distributed has it too, but not to mypy

    return PrefixStore(f"tunebook-{token}", store)


def open_store(host: str, port: int, *, is_master: bool = False) -> TCPStore:
    """Open a torch store, which this process hosts if it is the master."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(host, port, is_master=is_master, timeout=timedelta(seconds=60), wait_for_workers=False)


def import_torch() -> None:
    """Import torch so that its C++ code prints no stack traces for a lost connection, which is reported in one line."""
    before = os.environ.get(_LOG_LEVEL)
    os.environ.setdefault(_LOG_LEVEL, "FATAL")
    import torch  # noqa: F401

    if before is None:
        del os.environ[_LOG_LEVEL]


def find_launcher(
    endpoint: str,
    timeout_s: float,
    say: Callable[[str], None],
    stop_requests: Sequence[signal.Signals] = (),
    *,
    refused_for_s: float = float("inf"),
) -> tuple[str, str]:
    """Retry until a launcher listens at `address[,address...]:port`; return this node's and its address.

    `refused_for_s` limits how long refused connections are retried, for launchers that listen before any node starts.
    Raises: RequestError for an unknown name, TunebookError if nobody listens within `timeout_s`, StoppedError when
    `stop_requests` gets an element.
    """
    names, _, port = endpoint.rpartition(":")
    started = refused_since = time.monotonic()
    has_said = False
    while True:
        problems: dict[str, OSError] = {}
        for name in names.split(","):
            try:
                with socket.create_connection((name, int(port)), timeout=CONNECT_TIMEOUT_S) as connection:
                    return plain_address(connection.getsockname()[0]), str(connection.getpeername()[0])
            except OSError as error:
                problems[name] = error
        if stop_requests:
            raise StoppedError(f"stopped by {stop_requests[0].name} before the start", problem_id="stopped")
        now = time.monotonic()
        refused_since = refused_since if _is_refused(problems) else now
        why = "; ".join(f"{name}: {error.strerror or error}" for name, error in problems.items())
        if now - refused_since > refused_for_s:
            message = f"the launcher at {endpoint} has ended: connections are refused since {refused_for_s:g} s ({why})"
            raise TunebookError(message, problem_id="launcher-lost")
        if now - started > _NAME_WITHIN_S and all(isinstance(error, socket.gaierror) for error in problems.values()):
            raise RequestError(f"{why}; name node 0 with launcher.master_address", problem_id="launcher-out-of-reach")
        if now - started > timeout_s:
            raise TunebookError(
                f"no launcher answers at {endpoint} within {timeout_s:g} s (launcher.start_timeout_s): {why}. Is the "
                "command for node 0 running there, and may this node reach that port?",
                problem_id="launcher-out-of-reach",
            )
        if not has_said:
            has_said = True
            say(f"connecting to {endpoint}, up to {timeout_s:g} s ({why})")
        time.sleep(_CONNECT_EVERY_S)


def _is_refused(problems: dict[str, OSError]) -> bool:
    """Whether the launcher's machine refuses connections; a refusal on loopback alone may be another machine's."""
    refused = [name for name, error in problems.items() if isinstance(error, ConnectionRefusedError)]
    return len(refused) == len(problems) or any(not is_loopback(name) for name in refused)


def plain_address(address: str) -> str:
    """Return an IPv4 address without the prefix that it has on an IPv6 socket."""
    return address.removeprefix("::ffff:")


def is_loopback(address: str) -> bool:
    """Whether an address refers to this machine only."""
    return address.startswith("127.") or address == "::1"


def own_addresses() -> list[str]:
    """Addresses by which nodes may reach this machine, likeliest first; loopback last, for nodes on this machine."""
    found = []
    for name in filter(None, [os.environ.get("SLURMD_NODENAME"), socket.gethostname()]):
        with suppress(OSError):
            found += [str(info[4][0]) for info in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing: finds the source address for external packets
        found.append(str(probe.getsockname()[0]))
    return [*dict.fromkeys(address for address in found if not is_loopback(address)), "127.0.0.1"]
