"""The `sandbox` service of compose.yaml, attacked: real programs in a real container, handed over by another one."""

from __future__ import annotations

import json
import runpy
import subprocess
import time

import pytest

CLIENT = """
import json, runpy, sys
from tunebook.evaluate.sandbox.client import open_backend, run_programs
from tunebook.evaluate.sandbox.protocol import Program

attacks = runpy.run_path("/checkout/tests/evaluate/sandbox/attack_list.py")
programs = []
for attack in attacks["load_attacks"]():
    limit_s = attack.time_limit_s
    programs.append(Program(id=attack.name, source=attack.source, test=attacks["TEST"], time_limit_s=limit_s))
    right = f"after {attack.name}"
    programs.append(Program(id=right, source=attacks["RIGHT"], test=attacks["TEST"], time_limit_s=20.0))
with open_backend() as backend:
    outcomes = run_programs(programs, backend)
    json.dump({"record": backend.record(), "outcomes": {o.id: [o.status, o.message] for o in outcomes}}, sys.stdout)
"""
IMAGE = "tunebook-tests:sandbox"
HOST_USER = "12345:12346"  # whoever evaluates; the hand-over folder's group comes on top, as in compose.yaml


@pytest.fixture(scope="module")
def compose(in_checkout):
    """Run `docker compose` with an image and volumes of this module's own."""

    def call(*words, timeout_s=400):
        settings = {"TUNEBOOK_SANDBOX_IMAGE": IMAGE, "COMPOSE_PROJECT_NAME": "tunebook-tests-sandbox"}
        done = in_checkout("docker", "compose", *words, timeout_s=timeout_s, **settings)
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout

    return call


@pytest.fixture(scope="module")
def container(compose, in_checkout):
    """The service's container, up and alive; its facts as the engine tells them."""
    made = in_checkout("make", "env", "GPU=cpu", timeout_s=400)
    assert made.returncode == 0, made.stdout[-2000:]
    compose("build", "sandbox", timeout_s=1500)
    compose("up", "--detach", "sandbox")
    yield json.loads(subprocess.check_output(["docker", "inspect", compose("ps", "--quiet", "sandbox").strip()]))[0]
    print(compose("logs", "sandbox"))
    compose("down", "--volumes", "--timeout", "5")
    subprocess.run(["docker", "image", "rm", IMAGE], check=False, capture_output=True)


@pytest.fixture(scope="module")
def in_service(container):
    """Run a command in the service's container as its own user."""

    def call(*words):
        return subprocess.check_output(["docker", "exec", container["Id"], *words], text=True)

    return call


@pytest.fixture(scope="module")
def attacks(project_root):
    return {
        a.name: a for a in runpy.run_path(f"{project_root}/tests/evaluate/sandbox/attack_list.py")["load_attacks"]()
    }


@pytest.fixture(scope="module")
def outcomes(container, checkout):
    """What became of every attack, and of the right program after it, handed over as `eval` does it."""
    [volume] = [mount["Name"] for mount in container["Mounts"] if mount["Destination"] == "/handover"]
    rights = ["--user", HOST_USER, "--group-add", "7711", "--network", "none", "--read-only", "--cap-drop", "ALL"]
    mounts = ["--volume", f"{volume}:/handover", "--volume", f"{checkout}:/checkout:ro", "--tmpfs", "/tmp"]
    words = [*rights, *mounts, "--env", "PYTHONPATH=/checkout/src", "--entrypoint", "python3", IMAGE, "-c", CLIENT]
    done = subprocess.run(["docker", "run", "--rm", *words], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    assert (result["record"]["backend"], result["record"]["wall"]) == ("service", "users")
    return result["outcomes"]


def test_the_container_has_nothing_but_what_the_runner_needs(container):
    host = container["HostConfig"]
    assert host["NetworkMode"] == host["IpcMode"] == "none"
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]
    assert sorted(cap.removeprefix("CAP_") for cap in host["CapAdd"]) == ["KILL", "SETGID", "SETUID"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert not host["Privileged"]
    assert host["PidsLimit"] > 0
    assert host["Memory"] > 0
    assert not host["DeviceRequests"]
    assert [mount["Destination"] for mount in container["Mounts"]] == ["/handover"]
    assert not [name for name in container["Config"]["Env"] if "TOKEN" in name or "KEY" in name]


def test_every_attack_is_stopped(outcomes, attacks):
    assert len(attacks) >= 20
    came_through = {name: outcomes[name] for name in attacks if outcomes[name][0] not in attacks[name].stopped_as}
    assert not came_through


def test_the_program_after_each_attack_is_judged(outcomes, attacks):
    hit = {name: outcomes[f"after {name}"] for name in attacks if outcomes[f"after {name}"][0] != "passed"}
    assert not hit


def test_nothing_of_them_is_left(outcomes, in_service, container):
    assert in_service("find", *container["HostConfig"]["Tmpfs"], "-mindepth", "1").split() == []
    assert in_service("sh", "-c", "find /dev/shm /dev/mqueue -mindepth 1 2> /dev/null || true").split() == []
    users = in_service("sh", "-c", "cat /proc/[0-9]*/status 2>/dev/null | grep ^Uid: || true").split("\n")
    assert {line.split()[1] for line in users if line} == {"0"}
    assert in_service("ls", "-A", "/handover").split() == ["runner.sock"]


def test_it_comes_back_after_it_was_killed(outcomes, compose, container, in_service):
    compose("kill", "sandbox")
    compose("up", "--detach", "sandbox")
    end = time.monotonic() + 120
    ask = "import socket; s = socket.socket(socket.AF_UNIX); s.connect('/handover/runner.sock'); s.send(b'{}\\n')"
    while '"wall": "users"' not in in_service(
        "sh", "-c", f'python3 -c "{ask}; print(s.recv(999).decode())" 2>&1 || true'
    ):
        assert time.monotonic() < end, compose("logs", "sandbox")
        time.sleep(0.2)


def test_it_stops_when_asked_and_is_not_killed(outcomes, compose, container):
    compose("stop", "--timeout", "60", "sandbox")
    assert "sandbox: stopped" in compose("logs", "sandbox")
    state = json.loads(subprocess.check_output(["docker", "inspect", container["Id"]]))[0]["State"]
    assert (state["Running"], state["ExitCode"]) == (False, 0)
