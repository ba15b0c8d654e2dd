"""A node's side of the roll call: what it says of itself, and the call to the launcher."""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import tunebook
from tunebook.config.book import INSTALLED_BOOK
from tunebook.config.choices import LauncherName
from tunebook.config.override_text import typed_list
from tunebook.config.schema import LauncherConfig, RunConfig
from tunebook.errors import Problem, RequestError, StoppedError, TunebookError
from tunebook.files import read_json
from tunebook.hardware.detect import Machine, detect_machine
from tunebook.launch.line import Line, is_loopback
from tunebook.model.weights_fingerprint import weights_fingerprint
from tunebook.plan.rules import check_environment
from tunebook.record.files import PREPARED_FILE, RUN_FILE

TOKEN_VARIABLE = "TUNEBOOK_ROLL_CALL"  # what the launcher's own nodes show when they call
_SAME_EVERYWHERE = ("tunebook", "torch", "transformers", "accelerate", "deepspeed")
_CALL_TIMEOUT_S = 5.0
_CALL_EVERY_S = 1.0
REFUSED_FOR_S = 30.0  # by a launcher that listened before it started who calls: it is gone
_NAME_WITHIN_S = 30.0  # for a name that is not known: a scheduler may make it known only when the node is up
_SIOCGIFADDR = 0x8915  # linux/sockios.h


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """What takes a node a while to find out of itself: before it calls, for a launcher does not wait long for words."""

    versions: str
    code: str
    problems: list[str]
    weights: str | None = None  # fingerprint of the base model's, where each node may have a copy of its own


def call_launcher(
    meet: str,
    timeout_s: float,
    say: Callable[[str], None],
    asked_to_stop: Sequence[signal.Signals] = (),
    *,
    refused_for_s: float | None = None,
) -> tuple[Line, str]:
    """Call until somebody answers; the line, and the address that answered. `meet` is `address[,address...]:port`.

    `refused_for_s`: how long calls that are refused go on, where the launcher listens before anybody calls.
    Raises: RequestError for a name that nobody knows, TunebookError when nobody answers within `timeout_s`,
    StoppedError when it comes to hold a request to stop.
    """
    names, _, port = meet.rpartition(":")
    started = time.monotonic()
    refused_since: float | None = None
    has_said = False
    while True:
        problems = []
        for name in names.split(","):
            try:
                connection = socket.create_connection((name, int(port)), timeout=_CALL_TIMEOUT_S)
                return Line(connection), str(connection.getpeername()[0])
            except OSError as error:
                problems.append(error)
        if asked_to_stop:
            raise StoppedError(f"stopped by {asked_to_stop[0].name} before the start", problem_id="stopped")
        found = list(zip(names.split(","), problems, strict=True))
        now = time.monotonic()
        refused_since = (refused_since or now) if _is_refused(found) else None
        refused_s = now - refused_since if refused_since is not None else 0.0
        why = "; ".join(f"{name}: {error.strerror or error}" for name, error in found)
        if refused_for_s is not None and refused_s >= refused_for_s:
            message = f"the launcher at {meet} has ended: calls are refused since {refused_for_s:g} s ({why})"
            raise TunebookError(message, problem_id="launcher-lost")
        if now - started > _NAME_WITHIN_S and all(isinstance(error, socket.gaierror) for error in problems):
            raise RequestError(f"{why}; name node 0 with launcher.master_address", problem_id="launcher-out-of-reach")
        if now - started > timeout_s:
            raise _no_answer(meet, timeout_s, why)
        if not has_said:
            has_said = True
            say(f"calling {meet}, up to {timeout_s:g} s ({why})")
        time.sleep(_CALL_EVERY_S)


def _no_answer(meet: str, timeout_s: float, why: str) -> TunebookError:
    return TunebookError(
        f"no launcher answers at {meet} within {timeout_s:g} s (launcher.start_timeout_s): {why}. Is the "
        "command for node 0 running there, and may this node reach that port?",
        problem_id="launcher-out-of-reach",
    )


def _is_refused(found: list[tuple[str, OSError]]) -> bool:
    """Whether the launcher's machine says that nobody listens; loopback may be another machine's."""
    refused = [name for name, error in found if isinstance(error, ConnectionRefusedError)]
    return len(refused) == len(found) or any(not is_loopback(name) for name in refused)


def hello(
    line: Line,
    reached_at: str,
    *,
    node: int,
    ranks: list[int],
    port: int,
    facts: NodeFacts,
    config_sha256: str | None = None,
    place: str | None = None,
    inside: dict[str, Any] | None = None,
) -> None:
    """Say who calls: the node, its ranks, a port on which they can meet, and what it has found of itself.

    `inside` is what its container holds.
    """
    line.send(
        "hello",
        token=os.environ.get(TOKEN_VARIABLE, ""),
        node=node,
        ranks=ranks,
        host=socket.gethostname(),
        address=line.own_address,
        reached_at=reached_at,
        port=port,
        versions=facts.versions,
        code=facts.code,
        problems=facts.problems,
        weights=facts.weights,
        config_sha256=config_sha256,
        place=place,
        inside=inside,
    )


def node_facts(config: RunConfig, *, is_judged: bool = True) -> NodeFacts:
    """Look at this machine; `is_judged`: also for what it lacks and has, which one of its ranks may do for all."""
    facts = NodeFacts(versions=software(), code=code_hash(), problems=[])
    if not is_judged:
        return facts
    return replace(facts, problems=node_problems(config), weights=own_weights(config))


def own_weights(config: RunConfig) -> str | None:
    """The fingerprint of the base model's weights as this one of several nodes sees them under `model.path`.

    None where there is no other node, no such folder, or nothing in it that can be read: ranks that need it say so.
    """
    if config.hardware.num_nodes > 1:
        with suppress(RequestError):
            return weights_fingerprint(config.model)
    return None


def software() -> str:
    """The versions that all ranks of a run must have in common."""
    return ", ".join(f"{name} {version}" for name in _SAME_EVERYWHERE if (version := _version(name)) is not None)


def code_hash() -> str:
    """The hash of Tunebook's own Python files, wherever they lie; the book's are beside them where it is installed.

    A version does not tell two commits apart, and ranks of different code may train without a word on different data.
    """
    package = Path(tunebook.__file__).parent
    found = {file.relative_to(package): file for file in package.rglob("*.py") if file.is_file()}
    files = {name.as_posix(): file for name, file in found.items() if name.parts[0] != INSTALLED_BOOK}
    whole = hashlib.sha256()
    for name in sorted(files):
        whole.update(f"{name}\0{hashlib.sha256(files[name].read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def node_problems(config: RunConfig) -> list[str]:
    """What this machine lacks for its ranks."""
    launcher = LauncherConfig(name=LauncherName.local)  # a node is judged by the machine it is
    machine = detect_machine()
    found = check_environment(replace(config, launcher=launcher), machine)
    return [f"{problem.key}: {problem.message} (fix: {_fix_on_nodes(problem, machine)})" for problem in found]


def _fix_on_nodes(problem: Problem, machine: Machine) -> str:
    """What to change where one node of several has the problem: `auto` would look at another machine."""
    if problem.id != "other-gpu-here":
        return problem.fix
    kind = machine.gpus[0].generation.name
    return (
        "run on nodes with GPUs of one generation, under Slurm by launcher.partition or "
        f"{typed_list('launcher.extra_args', ['--constraint=FEATURE'])}; where all of them have {kind}, hardware={kind}"
    )


def folder_problem(folder: Path) -> str | None:
    """Why a node cannot work in a run folder: it must see what the launcher wrote there."""
    if not (folder / RUN_FILE).is_file():
        return f"the run folder {folder} is not there; name one that all nodes share: outputs=/a/shared/folder"
    prepared = Path(read_json(folder / PREPARED_FILE)["folder"])
    if not prepared.is_dir():
        return f"the prepared data {prepared} is not there; set TUNEBOOK_CACHE to a folder that all nodes share"
    return None


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def socket_interface(address: str) -> str | None:
    """The network interface that has an IPv4 address; None for loopback and where none has."""
    if is_loopback(address):
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
