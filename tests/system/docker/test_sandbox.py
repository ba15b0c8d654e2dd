"""The `sandbox` service of compose.yaml, attacked: real programs in a real container, handed over by another one."""

from __future__ import annotations

import json
import runpy
import subprocess
import time

import pytest

CLIENT = """
import json, runpy, sys
from tunebook.evaluate.sandbox.start import Program, open_sandbox, run_programs

attacks = runpy.run_path("/checkout/tests/evaluate/sandbox/attack_list.py")
programs = []
for attack in attacks["load_attacks"]():
    limit_s = attack.time_limit_s
    programs.append(Program(id=attack.name, source=attack.source, test=attacks["TEST"], time_limit_s=limit_s))
    right = f"after {attack.name}"
    programs.append(Program(id=right, source=attacks["RIGHT"], test=attacks["TEST"], time_limit_s=20.0))
sandbox = open_sandbox()
outcomes = list(run_programs(programs, sandbox))
json.dump({"name": sandbox.name, "outcomes": {o.id: [o.status, o.message] for o in outcomes}}, sys.stdout)
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
def attacks(project_root):
    return {
        a.name: a for a in runpy.run_path(f"{project_root}/tests/evaluate/sandbox/attack_list.py")["load_attacks"]()
    }


@pytest.fixture(scope="module")
def client(container, checkout):
    """Run Python in another container that shares the hand-over folder, as `eval` does; returns what it printed."""
    [volume] = [mount["Name"] for mount in container["Mounts"]]
    rights = ["--user", HOST_USER, "--group-add", "7711", "--network", "none", "--read-only", "--cap-drop", "ALL"]
    mounts = [
        "--volume",
        f"{volume}:/handover",
        "--volume",
        f"{checkout}:/checkout:ro",
        "--tmpfs",
        "/tmp",
        "--workdir",
        "/tmp",
    ]
    rights_and_mounts = [*rights, *mounts, "--env", "PYTHONPATH=/checkout/src", "--entrypoint", "python3", IMAGE, "-c"]

    def call(code):
        words = ["docker", "run", "--rm", *rights_and_mounts, code]
        done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    return call


@pytest.fixture(scope="module")
def outcomes(client):
    """What became of every attack, and of the right program after it."""
    result = json.loads(client(CLIENT))
    assert result["name"] == "service"
    return result["outcomes"]


def test_the_container_has_nothing_but_what_the_runner_needs(container):
    host = container["HostConfig"]
    assert host["NetworkMode"] == host["IpcMode"] == "none"
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]
    assert not host["CapAdd"]
    assert container["Config"]["User"] == "7711:7711"
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert not host["Privileged"]
    assert host["PidsLimit"] > 0
    assert host["Memory"] > 0
    assert not host["DeviceRequests"]
    assert [mount["Destination"] for mount in container["Mounts"]] == ["/closed/handover"]
    assert not [name for name in container["Config"]["Env"] if "TOKEN" in name or "KEY" in name]


def test_every_attack_is_stopped(outcomes, attacks):
    assert len(attacks) >= 20
    came_through = {name: outcomes[name] for name in attacks if outcomes[name][0] not in attacks[name].stopped_as}
    assert not came_through


def test_the_program_after_each_attack_is_judged(outcomes, attacks):
    hit = {name: outcomes[f"after {name}"] for name in attacks if outcomes[f"after {name}"][0] != "passed"}
    assert not hit


def test_nothing_of_them_is_left(outcomes, container):
    """Only the container's root may look into the folder that is closed to the programs."""
    look = "find /work /dev/shm /dev/mqueue -mindepth 1 2> /dev/null; ls -A /closed/handover; cat /proc/1/comm"
    words = ["docker", "exec", "--user", "0", "--privileged", container["Id"], "sh", "-c", look]
    found = subprocess.check_output(words, text=True)
    assert found.split() == ["runner.sock", "python3"]


def test_a_user_of_the_service_cannot_enter_the_hand_over_folder(container):
    words = ["docker", "exec", "--workdir", "/", container["Id"], "ls", "/closed/handover"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "Permission denied" in done.stderr


def test_clients_that_leave_or_send_something_else_stop_nobody(client):
    code = """
import json, socket
from tunebook.evaluate.sandbox.start import open_sandbox
program = json.dumps({"source": "import time; time.sleep(1)", "test": "pass", "time_limit_s": 5.0}) + "\\n"
for text in (program * 3, "?\\n", "[]\\n", ""):
    with socket.socket(socket.AF_UNIX) as leaving:
        leaving.connect("/handover/runner.sock")
        leaving.sendall(text.encode())
print(open_sandbox().name)
"""
    assert client(code).strip() == "service"


def test_it_comes_back_after_it_was_killed(outcomes, compose, client):
    compose("kill", "sandbox")
    compose("up", "--detach", "sandbox")
    code = "from tunebook.evaluate.sandbox.start import open_sandbox; print(open_sandbox().name)"
    assert client(code).strip() == "service"


def test_it_stops_at_once(outcomes, compose, container):
    started = time.monotonic()
    compose("stop", "sandbox")
    assert time.monotonic() - started < 10
