"""Facts that a node collects about itself before it joins a run: software, code, weights and missing requirements."""

from __future__ import annotations

import fcntl
import hashlib
import socket
import struct
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import tunebook
from tunebook.config.book import INSTALLED_BOOK
from tunebook.config.choices import LauncherName
from tunebook.config.override_text import typed_list
from tunebook.config.schema import LauncherConfig, RunConfig
from tunebook.data.prepared import PREPARED_FILE
from tunebook.errors import Problem, RequestError
from tunebook.files import read_json, sha256_file
from tunebook.hardware.detect import Machine, detect_machine
from tunebook.launch.rendezvous import is_loopback
from tunebook.model.weights_fingerprint import weights_fingerprint
from tunebook.record.run_folder import RUN_FILE
from tunebook.train.packages import installed_version
from tunebook.train.requirements import check_environment

_SAME_EVERYWHERE = ("tunebook", "torch", "transformers", "accelerate", "deepspeed")
_SIOCGIFADDR = 0x8915  # linux/sockios.h


def node_facts(config: RunConfig, *, checks_machine: bool = True) -> dict[str, Any]:
    """Return this node's facts, keyed as in `NodeState`; `checks_machine` adds those that one rank checks for all."""
    facts: dict[str, Any] = {"host": socket.gethostname(), "versions": software(), "code": code_hash()}
    if not checks_machine:
        return facts
    weights = None
    if config.hardware.num_nodes > 1:
        with suppress(RequestError):  # nothing readable: ranks that need the weights report it
            weights = weights_fingerprint(config.model)
    return facts | {"problems": node_problems(config), "weights": weights}


def software() -> str:
    """The package versions that all ranks of a run must share."""
    return ", ".join(
        f"{name} {version}" for name in _SAME_EVERYWHERE if (version := installed_version(name)) is not None
    )


def code_hash() -> str:
    """Hash Tunebook's own Python files, independent of their location; an installed book next to them does not count.

    A version does not distinguish two commits, and ranks with different code may train on different data without an
    error.
    """
    package = Path(tunebook.__file__).parent
    found = {file.relative_to(package): file for file in package.rglob("*.py") if file.is_file()}
    files = {name.as_posix(): file for name, file in found.items() if name.parts[0] != INSTALLED_BOOK}
    whole = hashlib.sha256()
    for name in sorted(files):
        whole.update(f"{name}\0{sha256_file(files[name])}\n".encode())
    return whole.hexdigest()


def node_problems(config: RunConfig) -> list[str]:
    """Return what this machine is missing for its ranks."""
    launcher = LauncherConfig(name=LauncherName.local)  # a node is checked as the machine it is
    machine = detect_machine()
    found = check_environment(replace(config, launcher=launcher), machine)
    return [f"{problem.key}: {problem.message} (fix: {_fix_on_nodes(problem, machine)})" for problem in found]


def _fix_on_nodes(problem: Problem, machine: Machine) -> str:
    """Say how to fix a problem of one node of several: `auto` would inspect another machine."""
    if problem.id != "other-gpu-here":
        return problem.fix
    kind = machine.gpus[0].generation.name
    return (
        "run on nodes with GPUs of one generation, under Slurm by launcher.partition or "
        f"{typed_list('launcher.extra_args', ['--constraint=FEATURE'])}; where all of them have {kind}, hardware={kind}"
    )


def folder_problem(folder: Path) -> str | None:
    """Say why a node cannot use a run folder, None if it can: it must see the launcher's files there."""
    if not (folder / RUN_FILE).is_file():
        return f"the run folder {folder} is not there; name one that all nodes share: outputs=/a/shared/folder"
    prepared = Path(read_json(folder / PREPARED_FILE)["folder"])
    if not prepared.is_dir():
        return f"the prepared data {prepared} is not there; set TUNEBOOK_CACHE to a folder that all nodes share"
    return None


def socket_interface(address: str) -> str | None:
    """Return the network interface that has an IPv4 address; None for loopback, or if no interface has it."""
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
