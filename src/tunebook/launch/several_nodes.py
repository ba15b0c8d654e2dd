"""`launcher=local` on several nodes: the same command is typed on each, with another `launcher.node_rank`.

Node 0 prepares, evaluates and keeps the records; the others call it at `launcher.master_address` and only train.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from tunebook.config.choices import LauncherName
from tunebook.config.identity import config_hash
from tunebook.config.schema import RunConfig
from tunebook.launch.node import take_part
from tunebook.launch.roll_call import RollCall
from tunebook.plan.rules.environment import address_warning


def has_later_nodes(config: RunConfig) -> bool:
    """Whether other nodes will call this one."""
    return config.launcher.name is LauncherName.local and config.hardware.num_nodes > 1


def is_later_node(config: RunConfig) -> bool:
    """Whether this node calls node 0."""
    return has_later_nodes(config) and config.launcher.node_rank > 0


@contextmanager
def open_to_nodes(config: RunConfig, console: Console) -> Iterator[RollCall]:
    """The roll call, on the port that the other nodes know, which answers from now on. Raises: RequestError."""
    launcher, num_nodes = config.launcher, config.hardware.num_nodes
    roll = RollCall(num_members=num_nodes, token="", port=launcher.master_port, config_sha256=config_hash(config))
    name = launcher.master_address or socket.gethostname()
    others, number = ("1", "1") if num_nodes == 2 else (f"N of 1 to {num_nodes - 1}", "N")
    text = f"on node {others}, type the same with: launcher.node_rank={number} launcher.master_address={name}"
    console.print(Text(text), soft_wrap=True)
    if (warning := address_warning(config)) is not None:
        console.print(Text(f"warning: {warning.text()}", style="yellow"), soft_wrap=True)
    roll.answer_early()
    try:
        yield roll
    finally:
        roll.close(1)


def join_run(config: RunConfig, console: Console) -> int:
    """The part of every node but the first, from the call to the end of the training; the run's exit code."""
    launcher = config.launcher
    meet = f"{launcher.master_address}:{launcher.master_port}"

    def say(text: str) -> None:
        console.print(Text(text), soft_wrap=True)

    return take_part(config, meet, launcher.node_rank, say, config_hash(config))
