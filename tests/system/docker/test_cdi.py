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
FAKE_NVIDIA_SMI = """#!/bin/sh
echo "0, GPU-5f0c, 9.0, 580.95.05, NVIDIA H100"
echo "1, GPU-7a1d, 9.0, 580.95.05, NVIDIA H100"
"""


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


def test_make_env_picks_it_where_there_is_no_runtime(cdi_file, in_checkout, checkout, tmp_path, environment):
    (tmp_path / "nvidia-smi").write_text(FAKE_NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    settings = {"PATH": f"{tmp_path}:{environment['PATH']}"}
    written = in_checkout("make", "env", **settings)
    assert "GPUs in containers: by cdi" in written.stdout
    assert "COMPOSE_FILE='compose.yaml:docker/cdi/compose.yaml'\n" in (checkout / ".env").read_text()
    cdi_file.rename(cdi_file.with_suffix(".json.old"))
    try:
        refused = in_checkout("make", "train", "WHERE=container", **settings)
    finally:
        cdi_file.with_suffix(".json.old").rename(cdi_file)
    assert refused.returncode == 2
    assert "Docker has neither NVIDIA's runtime nor a CDI file of GPUs" in " ".join(refused.stdout.split())
    assert in_checkout("make", "env", "GPU=cpu").returncode == 0
