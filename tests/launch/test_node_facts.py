"""What a node finds out about its own machine, and how it finds the launcher."""

import errno
import json
import os
import signal
import socket

import pytest

from tunebook.config.choices import Generation
from tunebook.config.compose import compose
from tunebook.config.schema import ModelConfig
from tunebook.errors import RequestError, StoppedError, TunebookError
from tunebook.hardware.detect import Gpu, Machine
from tunebook.launch import node_facts as module
from tunebook.launch import rendezvous
from tunebook.launch.node_facts import (
    code_hash,
    folder_problem,
    node_facts,
    node_problems,
    socket_interface,
)
from tunebook.launch.rendezvous import find_launcher
from tunebook.model.weights_fingerprint import weights_fingerprint
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.processes import free_port


def machine_of(name, capability, generation):
    gpus = [
        Gpu(name=name, memory_gib=80.0, compute_capability=capability, generation=generation, index=index)
        for index in range(8)
    ]
    return Machine(gpus=gpus, driver="590.10", num_cpus=64, host_memory_gib=500.0)


H100S = machine_of("NVIDIA H100 80GB HBM3", (9, 0), Generation.hopper)
A100S = machine_of("NVIDIA A100-SXM4-80GB", (8, 0), Generation.ampere)


@pytest.mark.parametrize("launcher", ["local", "slurm", "ray"])
def test_a_node_with_gpus_of_another_generation_says_what_to_change(monkeypatch, launcher):
    words = ["hardware.num_nodes=2", f"launcher={launcher}"]
    config = resolve_auto(compose("qwen3b_zero2", words).config, H100S).config
    monkeypatch.setattr(module, "detect_machine", lambda: H100S)
    assert [problem for problem in node_problems(config) if problem.startswith("hardware.generation: hopper is")] == []
    monkeypatch.setattr(module, "detect_machine", lambda: A100S)
    (problem,) = node_problems(config)
    assert problem == (
        "hardware.generation: hopper is set, and this machine has NVIDIA A100-SXM4-80GB (ampere) (fix: run on nodes "
        "with GPUs of one generation, under Slurm by launcher.partition or "
        "'launcher.extra_args=[\"--constraint=FEATURE\"]'; "
        "where all of them have ampere, hardware=ampere)"
    )


def test_the_first_address_that_answers_is_taken():
    said = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert find_launcher(f"no-such-host.invalid,127.0.0.1:{port}", 5, said.append) == ("127.0.0.1", "127.0.0.1")
    assert said == []


def test_nobody_there_is_said_at_once_and_given_up_in_time(monkeypatch):
    monkeypatch.setattr(rendezvous, "_CONNECT_EVERY_S", 0.05)
    said = []
    port = free_port()
    with pytest.raises(
        TunebookError, match=rf"no launcher answers at 127.0.0.1:{port} within 0.2 s .*refused"
    ) as caught:
        find_launcher(f"127.0.0.1:{port}", 0.2, said.append)
    assert caught.value.exit_code == 1
    assert said == [f"connecting to 127.0.0.1:{port}, up to 0.2 s (127.0.0.1: Connection refused)"]


def test_a_name_that_nobody_knows_is_not_waited_for_to_the_end(monkeypatch):
    monkeypatch.setattr(rendezvous, "_CONNECT_EVERY_S", 0.05)
    monkeypatch.setattr(rendezvous, "_NAME_WITHIN_S", 0.1)
    with pytest.raises(RequestError, match=r"name node 0 with launcher\.master_address"):
        find_launcher("no-such-host.invalid:29400", 600, lambda text: None)


def test_a_request_to_stop_ends_the_calling():
    with pytest.raises(StoppedError, match="stopped by SIGTERM before the start"):
        find_launcher(f"127.0.0.1:{free_port()}", 600, lambda text: None, [signal.SIGTERM])


def no_route(*_):
    raise OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))


def refused(*_):
    raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def answers(monkeypatch, by_name):
    """Let calls end as said, by the name that is called, until the time is up."""
    monkeypatch.setattr(rendezvous, "_CONNECT_EVERY_S", 0.01)
    monkeypatch.setattr(rendezvous.socket, "create_connection", lambda place, timeout: by_name[place[0]]())


@pytest.mark.parametrize("other", [no_route, refused])
def test_a_launcher_that_refuses_for_long_has_ended_where_it_listened_before_anybody_called(monkeypatch, other):
    """A container outlives a job that is cancelled while it starts."""
    answers(monkeypatch, {"10.0.0.1": refused, "127.0.0.1": other})
    with pytest.raises(
        TunebookError, match=r"the launcher at .*:29400 has ended: connections are refused since 0.1 s"
    ) as caught:
        find_launcher("10.0.0.1,127.0.0.1:29400", 600, lambda text: None, refused_for_s=0.1)
    assert caught.value.problem_id == "launcher-lost"


def test_loopback_that_refuses_may_be_another_machines(monkeypatch):
    answers(monkeypatch, {"10.0.0.1": no_route, "127.0.0.1": refused})
    with pytest.raises(TunebookError, match=r"no launcher answers at .* within 0.2 s"):
        find_launcher("10.0.0.1,127.0.0.1:29400", 0.2, lambda text: None, refused_for_s=0.05)


def test_a_folder_that_is_not_shared_is_named(tmp_path):
    assert "outputs=/a/shared/folder" in folder_problem(tmp_path)
    (tmp_path / "run.yaml").touch()
    (tmp_path / "prepared.json").write_text(json.dumps({"folder": str(tmp_path / "gone")}))
    assert f"the prepared data {tmp_path / 'gone'} is not there; set TUNEBOOK_CACHE" in folder_problem(tmp_path)
    (tmp_path / "gone").mkdir()
    assert folder_problem(tmp_path) is None


def test_the_code_is_told_apart_by_its_content_and_by_nothing_else(tmp_path, monkeypatch):
    found = []
    for name, line in (("here", "SEED = 0"), ("elsewhere", "SEED = 0"), ("changed", "SEED = 1")):
        package = tmp_path / name / "tunebook"
        (package / "data" / "__pycache__").mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "data" / "sampler.py").write_text(line)
        (package / "data" / "__pycache__" / "sampler.pyc").write_text(name)
        (package / "data" / ".#sampler.py").symlink_to("somebody@somewhere")  # as editors leave them
        monkeypatch.setattr(module.tunebook, "__file__", str(package / "__init__.py"))
        found.append(code_hash())
    here, elsewhere, changed = found
    assert here == elsewhere != changed
    (package / "_book" / "recipes").mkdir(parents=True)  # as an installed package has it
    (package / "_book" / "recipes" / "make_data.py").touch()
    assert code_hash() == changed
    (package / "data" / "sampler.py").rename(package / "data" / "other.py")
    assert code_hash() != changed


def test_a_node_reports_its_software_and_code():
    """Else two checkouts of one version could train together on different data."""
    facts = node_facts(resolve_auto(compose("quickstart", []).config, H100S).config, checks_machine=False)
    assert facts["code"] == code_hash()
    assert len(facts["code"]) == 64
    assert facts["versions"].startswith("tunebook ")
    assert facts["host"] == socket.gethostname()


def test_one_of_several_nodes_says_which_weights_it_has(tmp_path, monkeypatch):
    """Else each could have a copy of its own under the same path, and an adapter be trained on some of both."""
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))
    config = resolve_auto(compose("quickstart", []).config, H100S).config
    config.model = ModelConfig(path=str(tmp_path / "base"))
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "pytorch_model.bin").write_bytes(b"weights")
    assert node_facts(config)["weights"] is None  # there is no other node to differ from
    config.hardware.num_nodes = 2
    weights = node_facts(config)["weights"]
    assert weights is not None
    assert weights == weights_fingerprint(config.model)
    assert "weights" not in node_facts(config, checks_machine=False)
    (tmp_path / "base" / "model.safetensors").write_bytes(b"cut off")
    assert node_facts(config)["weights"] is None, "the rank that reads it says why it cannot"


def test_loopback_is_no_interface_between_nodes():
    assert socket_interface("127.0.0.1") is None
    assert socket_interface("192.0.2.99") is None
