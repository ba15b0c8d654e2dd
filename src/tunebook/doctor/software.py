"""Driver, image, container, torch's build, a CUDA test and NCCL."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from tunebook.config.schema import HardwareConfig, RunConfig, starts_elsewhere
from tunebook.doctor.findings import Finding, Kind, finding_of, finding_of_error, listed
from tunebook.doctor.probes import Probe
from tunebook.errors import Problem, RequestError
from tunebook.facts.generations import capability_text
from tunebook.hardware.detect import Gpu, Machine
from tunebook.hardware.image import IMAGE_FILE_VARIABLE, Image, read_image, runs_on_any
from tunebook.processes import ask
from tunebook.train.image import image_problem
from tunebook.train.requirements import check_environment, torch_problems

_IMAGE_DIGEST_VARIABLE = "TUNEBOOK_IMAGE_DIGEST"
# Docker and Podman create a file each. Slurm and Kubernetes set variables.
_CONTAINER_FILES = {Path("/.dockerenv"): "Docker", Path("/run/.containerenv"): "Podman"}
_CONTAINER_VARIABLES = {
    "KUBERNETES_SERVICE_HOST": "Kubernetes",
    "SINGULARITY_NAME": "Apptainer",
    "container": "a container",
}
_DOCKER_TIMEOUT_S = 30.0
_HOOKS = ("nvidia-container-runtime-hook", "nvidia-container-toolkit")  # which `docker info` does not show
_CDI_KIND = "nvidia.com/gpu"
_SHORT = 200  # characters of a message


def check_software(machine: Machine, config: RunConfig | None, torch: Probe) -> list[Finding]:
    """The findings. `torch` is the answer of `probes.torch_build`."""
    try:
        image = read_image()
    except RequestError as error:
        return [finding_of_error(error, Kind.software, otherwise="image-file-broken"), *_torch(machine, torch)]
    problems = _problems(machine, config, image)
    return [
        *_container(image, os.environ),
        *_docker(machine, os.environ),
        *(finding_of(problem, Kind.software) for problem in problems),
        *_driver(machine, problems),
        *_torch(machine, torch),
    ]


def _problems(machine: Machine, config: RunConfig | None, image: Image | None) -> list[Problem]:
    """Check this machine: all rules for a recipe, else the rules for any run on its GPUs."""
    if config is not None and not starts_elsewhere(config):
        return check_environment(config, machine)
    hardware = HardwareConfig(gpus_per_node=len(machine.gpus))
    recipe = config.recipe if config is not None else None
    if image is not None:
        problem = image_problem(hardware, recipe, machine, image)
        return [problem] if problem is not None else []
    return [*torch_problems(machine.gpus[0].generation, machine)] if machine.gpus else []


def _container(image: Image | None, environment: Mapping[str, str]) -> Iterator[Finding]:
    runtime = _container_runtime(environment)
    data: dict[str, Any] = {
        "runtime": runtime,
        "digest": environment.get(_IMAGE_DIGEST_VARIABLE) or None,
        "image": None,
    }
    if image is None:
        where = f"in a container of {runtime}, but" if runtime else "not in a container:"
        what = f"{where} none of Tunebook's images ({IMAGE_FILE_VARIABLE} is not set)"
        yield Kind.software.ok(id="container", what=what, data=data)
        return
    data["image"] = {
        "generation": image.generation,
        "torch": image.torch,
        "cuda": image.cuda,
        "min_driver": image.min_driver,
        "attention": image.attention,
        "git_commit": image.git_commit,
    }
    cuda = f"CUDA {image.cuda}, driver {image.min_driver} or newer" if image.cuda else "no CUDA"
    what = f"the {image.generation} image (torch {image.torch}, {cuda}, attention: {image.attention or 'sdpa'})"
    yield Kind.software.ok(id="container", what=what + (f" in {runtime}" if runtime else ""), data=data)


def _container_runtime(environment: Mapping[str, str]) -> str | None:
    """What runs the container that this process is in; None outside of one."""
    return next((name for file, name in _CONTAINER_FILES.items() if file.exists()), None) or next(
        (name for variable, name in _CONTAINER_VARIABLES.items() if environment.get(variable)), None
    )


def _docker(machine: Machine, environment: Mapping[str, str]) -> Iterator[Finding]:
    """How Docker gives this machine's GPUs to containers: by NVIDIA's runtime or by CDI, as docker/front chooses."""
    if not machine.gpus or shutil.which("docker") is None or _container_runtime(environment) is not None:
        return
    answer = ask(["docker", "info", "--format", "{{json .}}"], timeout_s=_DOCKER_TIMEOUT_S)
    info: Any = None
    with suppress(ValueError):
        info = json.loads(answer.text)
    if answer.problem is not None or not isinstance(info, dict) or not info.get("DockerRootDir"):
        what = f"Docker is here, but its daemon does not answer: {answer.failure or answer.last_words[:_SHORT]}"
        yield Kind.software.warning(
            id="container-gpus", what=what, fix="docker info shows all of it; without Docker: WHERE=local"
        )
        return
    if "nvidia" in (info.get("Runtimes") or {}) or any(map(shutil.which, _HOOKS)):
        what = "Docker gives GPUs to containers by NVIDIA's runtime"
        yield Kind.software.ok(id="container-gpus", what=what, data={"access": "runtime"})
        return
    files = _cdi_files(info.get("CDISpecDirs") or [])
    listed_devices = [str(each.get("ID")) for each in info.get("DiscoveredDevices") or []]
    if not files and not any(device.startswith(f"{_CDI_KIND}=") for device in listed_devices):
        yield Kind.software.warning(
            id="container-gpus",
            what="Docker cannot give GPUs to containers: it has no NVIDIA runtime, and no CDI file of GPUs",
            fix="install the NVIDIA Container Toolkit, then sudo nvidia-ctk runtime configure --runtime=docker, or "
            "sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml; without Docker: WHERE=local",
            data={"access": None},
        )
        return
    data = {"access": "cdi", "files": [str(file) for file in files]}
    missing = [path for file, spec in files.items() for path in _host_paths(spec) if not Path(path).exists()]
    if missing:
        yield Kind.software.error(
            id="container-gpus",
            what=f"a CDI file names {len(missing)} files that are not here, such as {missing[0]}: it was made for "
            "another driver, so no container with GPUs will start",
            fix=f"sudo nvidia-ctk cdi generate --output={next(iter(files))}",
            data=data | {"missing": missing},
        )
        return
    yield Kind.software.ok(id="container-gpus", what="Docker gives GPUs to containers by CDI", data=data)


def _cdi_files(folders: Iterable[str]) -> dict[Path, dict[str, Any]]:
    """The CDI files of NVIDIA's GPUs in these folders, with their content."""
    found: dict[Path, dict[str, Any]] = {}
    for path in sorted(path for folder in folders for path in Path(folder).glob("*.*")):
        if path.suffix in (".yaml", ".json"):
            with suppress(OSError, ValueError, yaml.YAMLError):
                spec = yaml.safe_load(path.read_text(encoding="utf-8"))  # which reads JSON, too
                if isinstance(spec, dict) and spec.get("kind") == _CDI_KIND:
                    found[path] = spec
    return found


def _host_paths(spec: Mapping[str, Any]) -> list[str]:
    """What a CDI file takes from the host: devices, libraries, hooks."""
    paths = []
    for edits in (spec, *(spec.get("devices") or [])):
        edits = edits.get("containerEdits") or {}
        paths += [node.get("hostPath") or node["path"] for node in edits.get("deviceNodes") or []]
        paths += [mount["hostPath"] for mount in edits.get("mounts") or []]
        paths += [hook["path"] for hook in edits.get("hooks") or []]
    return paths


def _driver(machine: Machine, problems: list[Problem]) -> Iterator[Finding]:
    if machine.driver is not None and not any(problem.id == "driver-too-old" for problem in problems):
        what = f"driver {machine.driver} is new enough for what is installed here"
        yield Kind.software.ok(id="driver", what=what, data={"driver": machine.driver})


def _torch(machine: Machine, torch: Probe) -> Iterator[Finding]:
    facts = torch.facts
    if facts is None:
        yield Kind.software.error(
            id="torch-import",
            what=f"torch cannot be loaded here: {torch.problem}",
            fix="python -c 'import torch' shows all of it; install the lock again: make setup",
        )
        return
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else "a CPU build"
    yield Kind.software.ok(id="torch-import", what=f"torch {facts['version']}, {build}", data=facts)
    if not machine.gpus:
        return
    if facts["cuda"] is not None:
        yield from _architectures(machine.gpus, facts["architectures"])
    yield from _cuda(machine.gpus, facts)
    yield from _nccl(machine.gpus, facts)


def _architectures(gpus: list[Gpu], flags: list[str]) -> Iterator[Finding]:
    missing = sorted({gpu.compute_capability for gpu in gpus if not runs_on_any(flags, gpu.compute_capability)})
    compiled = " ".join(flags) or "none"
    if missing:
        yield Kind.software.error(
            id="torch-architectures",
            what=f"torch has no code for compute capability {', '.join(map(capability_text, missing))}; it is compiled "
            f"for: {compiled}",
            fix="make train picks the image of the GPU's generation; outside of one, the torch that tunebook explain "
            "torch-without-gpu-code names",
            data={"architectures": flags},
        )
        return
    what = f"torch has code for these GPUs; it is compiled for: {compiled}"
    yield Kind.software.ok(id="torch-architectures", what=what, data={"architectures": flags})


def _cuda(gpus: list[Gpu], facts: dict[str, Any]) -> Iterator[Finding]:
    """Report whether each GPU computed a small product correctly."""
    if facts["cuda"] is None:
        yield Kind.software.error(
            id="cuda-works",
            what=f"{len(gpus)} GPUs are here, and torch {facts['version']} is a CPU build that cannot use them",
            fix="make train, which runs in the GPUs' image; or install a CUDA build of torch",
        )
        return
    devices = facts["devices"]
    problems = [f"GPU {device['index']}: {device['problem']}" for device in devices if device["problem"]]
    if facts["cuda_problem"]:
        problems.insert(0, str(facts["cuda_problem"]))
    if len(devices) < len(gpus) and not problems:
        problems.append(f"torch sees {len(devices)} of {len(gpus)} GPUs")
    if problems:
        yield Kind.software.error(
            id="cuda-works",
            what=f"the GPUs cannot all be used: {'; '.join(problems)}",
            fix="nvidia-smi shows what else runs there; on NVSwitch machines systemctl status nvidia-fabricmanager "
            "must be active and of the driver's version; sudo dmesg | grep -i xid names hardware errors",
            data={"devices": devices},
        )
        return
    what = f"GPU {listed([device['index'] for device in devices])}: a small product on each is right"
    yield Kind.software.ok(id="cuda-works", what=what, data={"devices": devices})


def _nccl(gpus: list[Gpu], facts: dict[str, Any]) -> Iterator[Finding]:
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")}
    said = f"; set: {' '.join(f'{name}={value}' for name, value in variables.items())}" if variables else ""
    data = {"nccl": facts["nccl"], "variables": variables}
    if facts["nccl"] is not None:
        yield Kind.software.ok(id="nccl", what=f"NCCL {facts['nccl']}{said}", data=data)
    elif len(gpus) > 1:
        yield Kind.software.error(
            id="nccl",
            what=f"torch {facts['version']} has no NCCL, without which several GPUs cannot train together",
            fix="install a CUDA build of torch, or parallelism=single",
            data=data,
        )
