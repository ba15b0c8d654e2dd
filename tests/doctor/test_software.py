"""The findings about the driver, the image, torch and NCCL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tunebook.doctor import software
from tunebook.doctor.findings import Finding, Level
from tunebook.doctor.probes import Probe
from tunebook.doctor.software import check_software
from tunebook.hardware.detect import Machine
from tunebook.train import requirements as environment

from .conftest import CPU_ONLY, h200, machine_with, only, resolved

TWO = machine_with(h200(0), h200(1))
IMAGE = {
    "generation": "hopper", "torch": "2.13.0", "cuda": "13.0", "min_driver": 580, "compute_capabilities": ["9.0"],
    "arch_list": ["sm_80", "sm_90"], "attention": "flash-attn-2", "lock_sha256": "1" * 64, "sources_sha256": "2" * 64,
    "git_commit": None, "git_diff_sha256": None, "base_image": "debian:12.12-slim",
}  # fmt: skip


def torch(**changes: Any) -> Probe:
    device = {"problem": None, "name": "NVIDIA H200", "capability": [9, 0], "free_gib": 139.0, "total_gib": 140.0}
    facts = {
        "version": "2.13.0", "cuda": "13.0", "architectures": ["sm_80", "sm_90", "compute_120"], "nccl": "2.27.5",
        "cuda_problem": None, "devices": [device | {"index": 0}, device | {"index": 1}],
    }  # fmt: skip
    return Probe(facts=facts | changes)


CPU_BUILD = torch(version="2.13.0+cpu", cuda=None, architectures=[], nccl=None, devices=[])


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The version of torch that the rules see, on a machine without Docker."""
    versions = {"torch": "2.13.0"}
    monkeypatch.setattr(software.shutil, "which", lambda name: None)
    monkeypatch.setattr(environment, "installed_version", lambda name: versions.get(name, "1.0"))
    return versions


@pytest.fixture
def image(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def install(**changes: Any) -> None:
        file = tmp_path / "image.json"
        file.write_text(json.dumps(IMAGE | changes))
        monkeypatch.setenv("TUNEBOOK_IMAGE_FILE", str(file))

    return install


def look(machine: Machine = TWO, probe: Probe | None = None) -> list[Finding]:
    return check_software(machine, None, probe or torch())


def wrong(findings: list[Finding]) -> dict[str, Level]:
    return {finding.id: finding.level for finding in findings if finding.level is not Level.ok}


def test_everything_fits() -> None:
    findings = look()
    assert wrong(findings) == {}
    assert [finding.id for finding in findings] == [
        "container", "driver", "torch-import", "torch-architectures", "cuda-works", "nccl",
    ]  # fmt: skip
    assert only(findings, "nccl").what == "NCCL 2.27.5"
    assert only(findings, "cuda-works").what == "GPU 0-1: a small product on each is right"


def test_without_a_gpu_there_is_less_to_say() -> None:
    findings = look(CPU_ONLY, CPU_BUILD)
    assert wrong(findings) == {}
    assert [finding.id for finding in findings] == ["container", "torch-import"]


def test_a_driver_older_than_the_installed_torch_needs() -> None:
    machine = machine_with(h200(0), driver="535.104.05")
    findings = look(machine)
    assert wrong(findings) == {"driver-too-old": Level.error}
    assert "535.104.05 is older than the 580" in only(findings, "driver-too-old").what
    assert "driver" not in {finding.id for finding in findings}


def test_the_image_of_another_generation(image) -> None:
    image(generation="ampere", compute_capabilities=["8.0"], arch_list=["sm_80"])
    findings = look()
    assert "wrong-image" in wrong(findings)
    assert only(findings, "wrong-image").fix == "make env GPU=hopper and the same again"
    assert only(findings, "container").data["image"]["generation"] == "ampere"


def test_the_driver_against_the_image(image) -> None:
    image()
    assert wrong(look(machine_with(h200(0), driver="570.1"))) == {"driver-too-old": Level.error}


def test_an_image_for_gpus_that_got_none(image) -> None:
    image()
    assert wrong(look(CPU_ONLY)) == {"no-gpu-in-image": Level.error}


def test_damaged_image_description_does_not_hide_torch_findings(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TUNEBOOK_IMAGE_FILE", str(tmp_path / "missing"))
    findings = look()
    assert wrong(findings) == {"image-file-broken": Level.error}
    assert only(findings, "torch-import").level is Level.ok


def test_torch_without_code_for_the_gpu() -> None:
    found = only(look(probe=torch(architectures=["sm_75", "sm_80"])), "torch-architectures")
    assert found.level is Level.error
    assert found.what == "torch has no code for compute capability 9.0; it is compiled for: sm_75 sm_80"


def test_a_cpu_build_where_gpus_are(installed) -> None:
    installed["torch"] = "2.13.0+cpu"
    findings = look(probe=CPU_BUILD)
    assert wrong(findings) == {
        "torch-without-gpu-code": Level.error, "cuda-works": Level.error, "nccl": Level.error,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cuda_problem": "CUDA unknown error", "devices": []}, "CUDA unknown error"),
        (
            {"devices": [{"index": 0, "problem": None}, {"index": 1, "problem": "out of memory"}]},
            "GPU 1: out of memory",
        ),
        ({"devices": [{"index": 0, "problem": None}]}, "torch sees 1 of 2 GPUs"),
    ],
)
def test_cuda_that_does_not_really_work(changes: dict[str, Any], said: str) -> None:
    found = only(look(probe=torch(**changes)), "cuda-works")
    assert found.level is Level.error
    assert said in found.what


def test_a_torch_that_cannot_be_loaded() -> None:
    problem = "it ended with exit code 1: ImportError: libcudnn.so.9: cannot open shared object file"
    findings = look(probe=Probe(facts=None, problem=problem))
    assert wrong(findings) == {"torch-import": Level.error}
    assert "libcudnn.so.9" in only(findings, "torch-import").what


def test_variables_of_nccl_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    found = only(look(), "nccl")
    assert "NCCL_P2P_DISABLE=1" in found.what
    assert found.data["variables"]["NCCL_P2P_DISABLE"] == "1"


def test_rules_of_a_recipe_are_checked() -> None:
    config = resolved("qwen3b_zero2")
    findings = check_software(CPU_ONLY, config, CPU_BUILD)
    found = only(findings, "no-gpu-here")
    assert found.level is Level.error
    assert "8 x volta needed" in found.what


def test_a_run_that_starts_elsewhere_is_not_judged_by_this_machine() -> None:
    config = resolved("llama2_70b_fsdp")
    assert wrong(check_software(CPU_ONLY, config, CPU_BUILD)) == {}


# --- how Docker gives GPUs to containers


@pytest.fixture
def docker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A docker whose daemon answers with these facts, first in PATH; without facts, one whose daemon is not there."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setattr(software.shutil, "which", lambda name: next(map(str, folder.glob(name)), None))
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(software, "_CONTAINER_FILES", {})
    for name in software._CONTAINER_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def install(facts: dict[str, Any] | None, *others: str) -> None:
        text = "Cannot connect to the Docker daemon" if facts is None else json.dumps({"DockerRootDir": "/d"} | facts)
        (tmp_path / "answer").write_text(text)
        for name in ("docker", *others):
            (folder / name).write_text(f"#!/bin/sh\ncat {tmp_path / 'answer'}\nexit {int(facts is None)}\n")
            (folder / name).chmod(0o755)

    return install


def cdi_file(folder: Path, *paths: Path) -> Path:
    folder.mkdir()
    device, *libraries = map(str, paths)
    edits = {
        "mounts": [{"hostPath": each, "containerPath": each} for each in libraries],
        "hooks": [{"hookName": "createContainer", "path": "/bin/sh"}],
    }
    node = {"path": "/dev/nvidia0", "hostPath": device}
    spec = {"kind": "nvidia.com/gpu", "devices": [{"name": "0", "containerEdits": {"deviceNodes": [node]}}]}
    file = folder / "nvidia.yaml"
    file.write_text(yaml.safe_dump(spec | {"containerEdits": edits}))
    return file


@pytest.mark.parametrize(
    ("facts", "others"), [({"Runtimes": {"runc": {}, "nvidia": {}}}, ()), ({}, ("nvidia-container-runtime-hook",))]
)
def test_nvidias_runtime_gives_gpus_to_containers(docker, facts: dict[str, Any], others: tuple[str, ...]) -> None:
    docker(facts, *others)
    assert only(look(), "container-gpus").data == {"access": "runtime"}


def test_a_cdi_file_does_too_until_the_driver_is_another(docker, tmp_path: Path) -> None:
    device, library = tmp_path / "nvidia0", tmp_path / "libcuda.so.580"
    device.touch()
    file = cdi_file(tmp_path / "cdi", device, library)
    docker({"Runtimes": {}, "CDISpecDirs": ["/nonexistent", str(file.parent)]})
    (file.parent / "broken.yaml").write_text("kind: [")
    stale = only(look(), "container-gpus")
    assert stale.level is Level.error
    assert f"names 1 files that are not here, such as {library}: it was made for another driver" in stale.what
    assert stale.fix == f"sudo nvidia-ctk cdi generate --output={file}"
    library.touch()
    fine = only(look(), "container-gpus")
    assert (fine.level, fine.data) == (Level.ok, {"access": "cdi", "files": [str(file)]})


def test_devices_that_docker_has_found_count_as_cdi(docker) -> None:
    docker({"DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=all"}]})
    assert only(look(), "container-gpus").data["access"] == "cdi"


def test_a_docker_without_a_way_to_the_gpus_or_without_a_daemon_is_a_warning(docker) -> None:
    docker({"Runtimes": {"runc": {}}, "CDISpecDirs": None})
    found = only(look(), "container-gpus")
    assert (found.level, found.data) == (Level.warning, {"access": None})
    assert "nvidia-ctk runtime configure" in found.fix and "nvidia-ctk cdi generate" in found.fix
    docker(None)
    found = only(look(), "container-gpus")
    assert found.level is Level.warning
    assert "its daemon does not answer" in found.what and "Cannot connect to the Docker daemon" in found.what


def test_docker_matters_only_to_gpus_and_outside_of_containers(docker, monkeypatch: pytest.MonkeyPatch) -> None:
    docker({})
    assert "container-gpus" not in {finding.id for finding in look(CPU_ONLY, CPU_BUILD)}
    monkeypatch.setattr(software, "_CONTAINER_FILES", {Path("/"): "Docker"})
    assert "container-gpus" not in {finding.id for finding in look()}
