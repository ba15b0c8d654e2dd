"""GPUs by CDI, on a real engine: a CDI file of the tests stands in for one of GPUs, its device for a GPU."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

# The last one is for an engine that may not raise limits, as docker/cpu/compose.yaml is.
COMPOSE = ("docker", "compose", "-f", "compose.yaml", "-f", "docker/cdi/compose.yaml", "-f", ".cache/limits.yaml")
OWN_ENGINE = "/run/tunebook-ci-engine/"
DEVICE = "/dev/stand-in-for-a-gpu"


@pytest.fixture
def cdi_file(environment: dict[str, str]) -> Iterator[Path]:
    """A CDI file in the folder of the engine that .ci/engine starts. Other engines may know real GPUs: skipped."""
    words = ["docker", "info", "--format", "{{json .CDISpecDirs}}"]
    folders = json.loads(subprocess.check_output(words, env=environment, text=True)) or []
    if not folders or not folders[0].startswith(OWN_ENGINE):
        if Path(OWN_ENGINE, "pid").exists():
            pytest.fail(f"the engine of .ci/engine has no folder for CDI files: {folders}")
        pytest.skip("needs the engine of .ci/engine, which has CDI switched on and a folder for the tests")
    folder = Path(folders[0])
    edits = {
        "env": ["STAND_IN=by-cdi"],
        "deviceNodes": [{"path": DEVICE, "hostPath": "/dev/zero"}],
        "mounts": [
            {"hostPath": "/proc/version", "containerPath": "/usr/lib/libstandin.so.1", "options": ["ro", "bind"]}
        ],
    }
    file = folder / "nvidia.json"
    devices = [{"name": "all", "containerEdits": edits}]
    file.write_text(json.dumps({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices}))
    yield file
    file.unlink()


def test_a_container_gets_what_the_cdi_file_says_and_sees_the_chosen_gpus(cpu_image, cdi_file, in_checkout, checkout):
    """The image is the cpu one, which starts everywhere; what is tested is how it gets devices."""
    (checkout / ".cache" / "limits.yaml").write_text("services:\n  train:\n    ulimits: !reset null\n")
    assert in_checkout("make", "env", "GPU=cpu").returncode == 0
    shown = f"head -c 3 {DEVICE} | od -An -tx1; head -c 5 /usr/lib/libstandin.so.1; echo; "
    shown += "echo $STAND_IN ${CUDA_VISIBLE_DEVICES-all}"
    words = (*COMPOSE, "run", "--rm", "--entrypoint", "/opt/tunebook/entrypoint.sh bash", "train", "-c", shown)
    done = in_checkout(*words, CUDA_VISIBLE_DEVICES="0,1")
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-3:] == [" 00 00 00", "Linux", "by-cdi 0,1"]
    assert in_checkout(*words).stdout.splitlines()[-1] == "by-cdi all"
