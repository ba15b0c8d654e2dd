"""The nodes of a run on several: what node 0 records before the ranks start, and how the other nodes join.

Node 0 writes `start.json` into the run folder, where it stays while the ranks run. Each node compares itself with it.
`python -m tunebook.launch.local RUN_FOLDER --endpoint HOST:PORT` is what srun starts on each node: it becomes torchrun.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

import tunebook
from tunebook.config.book import INSTALLED_BOOK
from tunebook.config.choices import LauncherName
from tunebook.config.frozen import load_config
from tunebook.config.identity import config_hash
from tunebook.config.schema import RunConfig, world_size
from tunebook.data.prepared import PREPARED_FILE
from tunebook.errors import RequestError, TunebookError
from tunebook.files import atomic_write_json, read_json, sha256_file
from tunebook.launch.commands import endpoint_of, node_command
from tunebook.launch.container import is_contained, record_container, runs_image_sources
from tunebook.launch.logs import last_lines, torchrun_log
from tunebook.launch.supervise import run_and_wait
from tunebook.model.weight_files import weights_fingerprint
from tunebook.record.run_folder import (
    RUN_FILE,
    STOP_FILE,
    find_runs,
    has_outcome,
    read_outcomes,
    run_name,
    write_outcome,
)
from tunebook.terminal import print_text
from tunebook.train.environment import rank_environment
from tunebook.train.requirements import installed_version

START_FILE = "start.json"
_SAME_EVERYWHERE = ("tunebook", "torch", "transformers", "accelerate", "deepspeed")
_POLL_S = 1.0


def announce_start(config: RunConfig, folder: Path) -> None:
    """Record what every node must share; for containers only the code, since their host may lack the packages."""
    facts = _node_facts(config)
    if is_contained(config):
        code = None if runs_image_sources() else facts["code"]
        facts = {"configuration": facts["configuration"], "code": code}
    atomic_write_json(folder / START_FILE, facts | {"port": config.launcher.master_port})


def refuse_other_node(config: RunConfig, folder: Path) -> None:
    """Refuse a machine that does not see the run's files, or differs from node 0. Raises: RequestError."""
    host = socket.gethostname()
    prepared = Path(read_json(folder / PREPARED_FILE)["folder"])
    if not prepared.is_dir():
        message = f"{host}: there is no prepared data {prepared}; set TUNEBOOK_CACHE to a folder that all nodes share"
        raise RequestError(message, problem_id="folder-not-shared")
    expected = read_json(folder / START_FILE)
    for name, own in _node_facts(config).items():
        if expected.get(name) not in (None, own):
            raise RequestError(
                f"{host} has different {name} than node 0: {own} instead of {expected[name]}; give every node the same "
                "commit without local changes, the same packages, and the same model",
                problem_id="node-refused",
            )


def load_shared_config(folder: Path) -> RunConfig:
    """Load the configuration of a run on a node that another one started. Raises: RequestError."""
    if not (folder / RUN_FILE).is_file():
        message = (
            f"{socket.gethostname()}: there is no run in {folder}; use a folder that all nodes share: outputs=FOLDER"
        )
        raise RequestError(message, problem_id="folder-not-shared")
    return load_config(folder / RUN_FILE)


def _node_facts(config: RunConfig) -> dict[str, Any]:
    versions = {name: installed_version(name) for name in _SAME_EVERYWHERE}
    return {
        "configuration": config_hash(config),
        "code": code_hash(),
        "packages": ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None),
        "weights": weights_fingerprint(config.model) if config.hardware.num_nodes > 1 else None,
    }


def code_hash() -> str:
    """Hash Tunebook's own Python files, independent of their location; an installed book next to them does not count.

    A version does not distinguish two commits, and ranks with different code may train on different data without an
    error.
    """
    package = Path(tunebook.__file__).parent
    paths = {file.relative_to(package): file for file in package.rglob("*.py") if file.is_file()}
    files = {name.as_posix(): file for name, file in paths.items() if name.parts[0] != INSTALLED_BOOK}
    whole = hashlib.sha256()
    for name in sorted(files):
        whole.update(f"{name}\0{sha256_file(files[name])}\n".encode())
    return whole.hexdigest()


def note_for_other_nodes(config: RunConfig) -> str | None:
    """Return what to type on the other nodes, if the user starts them by hand."""
    if config.launcher.name is not LauncherName.local or config.hardware.num_nodes == 1:
        return None
    host, _, _ = endpoint_of(config).rpartition(":")
    return f"on every other node, type the same command with launcher.node_rank=N launcher.master_address={host}"


def join_run(config: RunConfig, named: Path | None, console: Console) -> int:
    """Start this node's ranks of a run that node 0 started by hand, and wait; return the run's exit code.

    `named` is the run folder, if the user named it. Raises: TunebookError if node 0 or the ranks do not start.
    """
    launcher = config.launcher
    folder = _wait_for_start(config, named, console)
    refuse_other_node(config, folder)
    log = torchrun_log(folder, launcher.node_rank)
    print_text(f"node {launcher.node_rank}: starting its ranks of the run in {folder}", console)
    command = node_command(config, folder, endpoint_of(config), is_first=False)
    run_and_wait(
        command,
        rank_environment(config, os.environ),
        log=log,
        stop_timeout_s=launcher.stop_timeout_s,
        stop_file=folder / STOP_FILE,
        end_timeout_s=launcher.timeout_s,
    )
    if not has_outcome(folder):
        raise TunebookError(f"the ranks did not start: {' '.join(last_lines(log)[-1:])} ({log})", problem_id="run-lost")
    outcome = read_outcomes(folder, world_size(config))
    print_text(outcome.reason, console)
    return outcome.exit_code


def _wait_for_start(config: RunConfig, named: Path | None, console: Console) -> Path:
    """Return the folder of a run of this configuration whose ranks node 0 is starting."""
    required = {"configuration": config_hash(config), "port": config.launcher.master_port}
    outputs, timeout_s = Path(config.outputs), config.launcher.timeout_s
    end = time.monotonic() + timeout_s
    print_text(f"waiting for node 0 to start this run in {named or outputs}", console)
    while time.monotonic() < end:
        runs = [named] if named is not None else find_runs(outputs, run_name(config))
        for folder in reversed(runs):
            with suppress(FileNotFoundError):
                start = read_json(folder / START_FILE)
                if all(start[name] == value for name, value in required.items()):
                    return folder
        time.sleep(_POLL_S)
    raise TunebookError(
        f"node 0 has started no run of this configuration in {named or outputs} within {timeout_s:g} s "
        "(launcher.timeout_s); type the same command on every node, with outputs in a folder that all nodes share",
        problem_id="node-missing",
    )


def main() -> int:
    """Compare this node of a Slurm job with the first one, and become what starts its ranks."""
    parser = argparse.ArgumentParser(prog="python -m tunebook.launch.local")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--endpoint", required=True)
    arguments = parser.parse_args()
    folder, node = arguments.folder, int(os.environ["SLURM_NODEID"])
    try:
        config = load_shared_config(folder)
        refuse_other_node(config, folder)
    except TunebookError as error:
        print(error.message, file=sys.stderr)
        if folder.is_dir():
            write_outcome(folder, rank=node, exit_code=error.exit_code, reason=error.message)
        return error.exit_code
    if node == 0 and is_contained(config):
        record_container(config, folder)
    command = node_command(config, folder, arguments.endpoint, is_first=node == 0)
    return os.execvpe(command[0], command, rank_environment(config, os.environ))


if __name__ == "__main__":
    sys.exit(main())
