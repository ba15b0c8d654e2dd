"""What node 0 says to whoever types the same on the other nodes."""

import socket
from io import StringIO

import pytest
from rich.console import Console

from tunebook.config.compose import compose
from tunebook.hardware.detect import Machine
from tunebook.launch.calling import free_port
from tunebook.launch.several_nodes import open_to_nodes
from tunebook.plan.auto.resolve import resolve_auto

CPU = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0)


@pytest.mark.parametrize(("known", "is_warned"), [("", True), ("head", False)])
def test_a_name_that_only_the_other_nodes_know_is_warned_of_and_called_by(monkeypatch, known, is_warned):
    def find(name, *_rest, **_more):
        if name != known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", find)
    words = ["hardware.num_nodes=2", "launcher.master_address=head", f"launcher.master_port={free_port()}"]
    config = resolve_auto(compose("quickstart", words).config, CPU).config
    out = StringIO()
    with open_to_nodes(config, Console(file=out, width=200)):
        pass
    said = out.getvalue().splitlines()
    assert said[0] == "on node 1, type the same with: launcher.node_rank=1 launcher.master_address=head"
    assert ("warning: launcher.master_address: node 0 does not find head itself" in "".join(said[1:])) is is_warned
