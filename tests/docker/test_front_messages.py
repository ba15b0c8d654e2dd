"""The errors of docker/front.sh, each with what to type next.

The texts of docker, nvidia-smi, BuildKit and registries were printed on real machines.
"""

from __future__ import annotations

import os
import subprocess

import pytest

TRAIN = ("run", "train", "quickstart")
ONE_GPU = "0, GPU-5f3c7a10-0000-1111-2222-333344445555, {}, {}, {}\n"
A100 = ONE_GPU.format("8.0", "580.95.05", "NVIDIA A100-SXM4-80GB")
DOWN = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"
DENIED = (
    "permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock: Get "
    '\\"http://%2Fvar%2Frun%2Fdocker.sock/v1.45/info\\": dial unix /var/run/docker.sock: connect: permission denied'
)
NO_INFO = '{"ID":"","DockerRootDir":"","Runtimes":null,"ServerErrors":["%s"],"ClientInfo":{}}'


# --- Docker


def test_docker_missing(machine, refused):
    machine.remove("docker")
    refused(machine.front(*TRAIN, GPU="cpu"), "Docker is not installed", "engine/install", "WHERE=local")


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        ({"out": NO_INFO % DOWN}, "Cannot connect to the Docker daemon"),  # with exit code 0
        ({"out": NO_INFO % DENIED}, "permission denied"),
        ({"err": "unknown error\n", "code": 1}, "unknown error"),
    ],
    ids=["down", "denied", "unknown"],
)
def test_a_daemon_that_cannot_be_used(machine, refused, answer, part):
    machine.tell("docker-info", **answer)
    refused(machine.front(*TRAIN, GPU="cpu"), "docker info fails: ", part, "WHERE=local")


def test_a_daemon_that_hangs(machine, refused):
    machine.act("docker-info", "sleep 20")
    done = machine.front(*TRAIN, GPU="cpu", TUNEBOOK_ENGINE_TIMEOUT_S="0.3")
    refused(done, "no answer within 0.3 s")


def test_with_a_gpu_a_docker_that_cannot_be_used_is_passed_over_with_the_reason(machine):
    machine.gpus(A100)
    machine.tell("docker-info", NO_INFO % DENIED)
    machine.venv("ampere")
    done = machine.front(*TRAIN)
    assert done.returncode == 0
    assert "no container: docker info fails" in done.stderr


def test_the_version_of_compose(machine, refused):
    machine.image("tunebook:cpu")
    machine.tell("docker-compose-version", err="unknown flag: --short\nSee 'docker --help'.\n", code=125)
    refused(machine.front("image", GPU="cpu"), "Compose 2.24.4 or newer is needed, and here it is: none")
    for version in ("2.18.1", "v2.3.3", "2.0.0-rc.1"):
        machine.tell("docker-compose-version", f"{version}\n")
        refused(machine.front(*TRAIN, GPU="cpu"), f"Compose 2.24.4 or newer is needed, and here it is: {version}")
    for version in ("2.24.4", "v2.26.1", "2.26.1-4", "5.0.1", "2.100.0+ds1"):
        machine.tell("docker-compose-version", f"{version}\n")
        assert machine.front(*TRAIN, GPU="cpu").returncode == 0


def test_buildx_missing_matters_only_to_a_build(machine, refused):
    text = "docker: 'buildx' is not a docker command.\nSee 'docker --help'\n"
    machine.image("tunebook:cpu")
    machine.tell("docker-buildx-version", err=text, code=1)
    assert machine.front(*TRAIN, GPU="cpu").returncode == 0
    refused(machine.front("image", GPU="cpu"), "buildx, the plugin that builds images, is not")


# --- GPUs


def test_no_nvidia_runtime(machine, refused):
    machine.gpus(A100, has_runtime=False)
    refused(
        machine.front(*TRAIN), "finds 1 x NVIDIA A100-SXM4-80GB, driver 580.95.05, but Docker cannot give GPUs",
        "sudo nvidia-ctk runtime configure --runtime=docker", "sudo systemctl restart docker", "WHERE=local",
    )  # fmt: skip
    assert machine.calls("compose build") == []


def test_the_hook_serves_like_a_runtime(machine):
    machine.image("tunebook:ampere")
    machine.gpus(A100, has_runtime=False)
    machine.install("nvidia-container-runtime-hook", "#!/bin/sh\n")
    assert machine.front(*TRAIN).returncode == 0
    assert machine.setting("COMPOSE_FILE") == "compose.yaml"


WITHOUT_RUNTIME = '{"DockerRootDir":"/x","Runtimes":{"runc":{}},%s}'
WITH_CDI = "compose.yaml:docker/cdi/compose.yaml"


def test_a_cdi_device_is_used_where_there_is_no_runtime(machine):
    machine.image("tunebook:ampere")
    machine.gpus(A100, has_runtime=False)
    device = '"DiscoveredDevices":[{"Source":"cdi","ID":"nvidia.com/gpu=all"}]'
    machine.tell("docker-info", WITHOUT_RUNTIME % device)
    written = machine.front("env")
    assert "tunebook: GPUs in containers: by CDI, docker/cdi/compose.yaml" in written.stderr
    assert machine.setting("COMPOSE_FILE") == WITH_CDI
    assert machine.front(*TRAIN).returncode == 0
    machine.gpus(A100)
    assert "tunebook: GPUs in containers: by NVIDIA's runtime" in machine.front("env").stderr
    assert machine.setting("COMPOSE_FILE") == "compose.yaml"


@pytest.mark.parametrize(
    ("name", "content", "is_found"),
    [
        ("nvidia.yaml", "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\n", True),
        ("nvidia.yaml", '---\nkind: "nvidia.com/gpu"\n', True),
        ("nvidia.json", '{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": []}', True),
        ("amd.yaml", "kind: amd.com/gpu\n", False),
        ("nvidia.yaml.old", "kind: nvidia.com/gpu\n", False),
    ],
)
def test_docker_before_28_names_the_folders_of_cdi_files(machine, refused, name, content, is_found):
    machine.image("tunebook:ampere")
    machine.gpus(A100, has_runtime=False)
    folder = machine.folder / "cdi"
    folder.mkdir()
    (folder / name).write_text(content)
    machine.tell("docker-info", WITHOUT_RUNTIME % f'"CDISpecDirs":["/nonexistent","{folder}"]')
    done = machine.front(*TRAIN)
    if is_found:
        assert done.returncode == 0, done.stderr
        assert machine.setting("COMPOSE_FILE") == WITH_CDI
    else:
        refused(done, "no NVIDIA runtime, and no CDI file of GPUs", "sudo nvidia-ctk cdi generate")
        assert "GPUs in containers: not yet" in machine.front("env").stderr


def test_a_count_of_gpus_that_cannot_be_met(machine, refused):
    refused(machine.front(*TRAIN, GPUS="3"), "GPUS=3, but there is no GPU here")
    refused(machine.front(*TRAIN, GPUS="3", GPU="cpu"), "GPU=cpu uses none", "hardware.gpus_per_node=3")
    machine.gpus()
    refused(machine.front(*TRAIN, GPUS="3"), "GPUS=3, but there are 2 here: 2 x NVIDIA H200", "GPUS=2 or fewer")
    refused(machine.front("env", GPUS="1", CUDA_VISIBLE_DEVICES="1,0"), "both say which GPUs", "Leave GPUS out")
    for number in ("0", "-1", "two", "1.5"):
        refused(machine.front(*TRAIN, GPUS=number), f"GPUS={number} is no number of GPUs")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("H200", "hopper"), ("v100", "volta"), ("b200", "blackwell"), ("hoper", None), (".*", None)],
)
def test_an_unknown_generation(machine, refused, typed, meant):
    done = machine.front(*TRAIN, GPU=typed)
    question = f" Did you mean GPU={meant}?" if meant else ""
    choices = "auto ampere ada blackwell cpu hopper volta turing"
    refused(done, f"GPU={typed} is unknown.{question} Choose one of: {choices}")


def test_an_unknown_place(machine, refused):
    refused(machine.front(*TRAIN, WHERE="lokal"), "WHERE=lokal is unknown. Choose one of: auto container local")


def test_a_named_generation_without_such_gpus_may_be_built_but_not_run(machine, refused):
    assert machine.front("image", GPU="hopper").returncode == 0
    for variables in ({}, {"WHERE": "local"}):
        refused(
            machine.front(*TRAIN, GPU="hopper", **variables), "GPU=hopper needs such GPUs, and there is no GPU here",
            "make image GPU=hopper", "GPU=cpu",
        )  # fmt: skip


DRIVER = "580.95.05"
MIXED = A100 + f"1, GPU-77aa0000, 7.0, {DRIVER}, Tesla V100\n"


@pytest.mark.parametrize(
    ("gpus", "variables", "parts"),
    [
        (ONE_GPU.format("7.0", DRIVER, "Tesla V100"), {"GPU": "ampere"},
         ("GPU=ampere is for compute capability 8.0, 8.6, 8.9", "Tesla V100 has 7.0", "Type GPU=volta")),
        (ONE_GPU.format("8.0", "535.183.01", "A100"), {"GPU": "ampere"},
         ("is too old for GPU=ampere, which needs 580", "leave GPU out")),
        (ONE_GPU.format("8.0", "470.256.02", "A100"), {},
         ("470.256.02 is too old", "needs 580", "driver of any image is 525", "GPU=cpu")),
        (ONE_GPU.format("6.1", DRIVER, "NVIDIA GeForce GTX 1080"), {},
         ("GTX 1080 (compute capability 6.1) is older than any", "GPU=cpu")),
        (MIXED, {}, ("different generations", "CUDA_VISIBLE_DEVICES=GPU-77aa0000 # Tesla V100: volta")),
    ],
    ids=["wrong image", "driver too old for the image", "driver too old for any", "gpu too old", "two generations"],
)  # fmt: skip
def test_gpus_that_do_not_fit(machine, refused, gpus, variables, parts):
    machine.gpus(gpus)
    refused(machine.front(*TRAIN, **variables), *parts)


@pytest.mark.parametrize(
    ("text", "code", "parts"),
    [
        ("Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 535.183\n", 18,
         ("Driver/library version mismatch", "a restart may help")),
        ("Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error\n", 15,
         ("fails, so it is not known which GPUs", "GPU0000:3B:00.0", "nvidia-smi")),
        ("0, GPU-1, [N/A], 580.95.05, [Unknown Error]\n", 0,
         ("GPU 0, but the GPU does not answer", "CUDA_VISIBLE_DEVICES")),
    ],
)  # fmt: skip
def test_gpus_that_do_not_answer_are_not_taken_for_none(machine, refused, text, code, parts):
    machine.venv()
    machine.gpus(text, code=code)
    refused(machine.front(*TRAIN), *parts, "GPU=cpu")
    assert machine.front(*TRAIN, GPU="cpu", WHERE="local").returncode == 0


def test_a_gpu_that_does_not_answer_can_be_left_out(machine):
    machine.gpus("0, GPU-1, [N/A], 580.95.05, [Unknown Error]\n" + A100.replace("0, ", "1, ", 1))
    assert machine.front("env", CUDA_VISIBLE_DEVICES="1").returncode == 0
    assert machine.setting("TUNEBOOK_GENERATION") == "ampere"


def test_nvidia_smi_that_hangs_even_when_killed(machine, refused):
    machine.gpus()
    machine.act("nvidia-smi", "trap '' TERM\nfor wait in 1 2 3 4 5 6 7 8 9 10; do sleep 0.3; done")
    done = machine.front("env", TUNEBOOK_NVIDIA_SMI_TIMEOUT_S="0.5")
    refused(done, "no answer within 0.5 s", "GPU=cpu")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("No devices were found\n", 6),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
         "NVIDIA driver is installed and running.\n\n", 9),
        ("", 0),
    ],
)  # fmt: skip
def test_a_driver_package_without_a_gpu_is_no_gpu(machine, text, code):
    machine.venv()
    machine.gpus(text, code=code)
    done = machine.front(*TRAIN)
    assert (done.returncode, "in .venv with the packages of docker/cpu: no GPU here" in done.stderr) == (0, True)


# --- folders and disk


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make what belongs to root")
@pytest.mark.parametrize("closed", ["outputs", "outputs/quickstart"])
def test_outputs_that_belong_to_root(machine, refused, closed):
    machine.image("tunebook:cpu")
    (machine.checkout / "outputs" / "quickstart").mkdir(parents=True)
    subprocess.run(["chown", "-R", "4321:4321", machine.folder], check=True)
    os.chown(machine.checkout / closed, 0, 0)
    for folder in [machine.folder, *machine.folder.parents][:4]:  # pytest closes them to other users
        folder.chmod(folder.stat().st_mode | 0o055)
    advice = f"sudo chown -R 4321:4321 {machine.checkout}/outputs"
    for who in ({"SUDO_UID": "4321", "SUDO_GID": "4321"}, {"uid": 4321}):
        done = machine.front(*TRAIN, GPU="cpu", **who)
        refused(done, f"{machine.checkout}/{closed} is closed to you", "it belongs to root", advice)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make what belongs to root")
def test_a_checkout_that_belongs_to_root(machine, refused):
    for folder in [machine.folder, *machine.folder.parents][:4]:
        folder.chmod(folder.stat().st_mode | 0o055)
    text = f"{machine.checkout}/outputs cannot be made: {machine.checkout} belongs to root."
    refused(machine.front("env", GPU="cpu", uid=4321), text, f"sudo chown -R 4321:4321 {machine.checkout}")


def test_too_little_disk_for_a_build(machine, refused):
    machine.install("df", "#!/bin/sh\nprintf 'Filesystem 1024-blocks Used Available\\n/dev/vda 9 9 3145728\\n'\n")
    done = machine.front("image", GPU="cpu")
    refused(done, "Building tunebook:cpu takes 12 GiB, and 3 GiB are free in", f"{machine.folder}, where Docker keeps",
            "docker system df", "docker builder prune", code=3)  # fmt: skip
    assert machine.calls("compose build") == []


@pytest.mark.parametrize(
    ("variables", "parts"),
    [
        ({"CA": "/no/x.pem"}, ("CA=/no/x.pem: there is no such file", "forget it: CA=")),
        ({"DATA": "pyproject.toml"}, ("DATA=pyproject.toml is no folder",)),
        ({"PIP_CONF": "src"}, ("PIP_CONF=src is no file",)),
        ({"DATA": "../it's"}, ("TUNEBOOK_DATA: compose cannot read a name with a quote",)),
    ],
    ids=str,
)
def test_paths_that_cannot_be_used(machine, refused, variables, parts):
    (machine.folder / "it's").mkdir()
    refused(machine.front("image", GPU="cpu", **variables), *parts)


# --- builds


def test_a_failed_build_shows_its_output_and_where_to_look(machine, refused):
    text = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    machine.tell("docker-compose-build", err=f"{text}\nfailed to solve: exit code: 1\n", code=17)
    done = machine.front(*TRAIN, GPU="cpu")
    refused(done, text, "error: building tunebook:cpu failed", "docker/README.md", "docker builder prune", code=1)
    assert machine.calls("compose run") == []


# --- registries


def test_push_and_pull_name_what_they_need(machine, refused):
    refused(machine.front("push"), "Name it: make push REGISTRY=host/path")
    refused(machine.front("push", REGISTRY="https://host/path"), "Type REGISTRY=host/path")
    refused(machine.front("push", REGISTRY="host/path"), "No image of this checkout is built here", "make image")
    refused(machine.front("push", REGISTRY="x", GPU="volta"), "tunebook:volta is not built", "make image GPU=volta")
    refused(machine.front("pull", GPU="cpu"), "There is no docker/cpu/image.digest", "make pull REGISTRY=host/path")
    machine.digest("tunebook:latest")
    refused(machine.front("pull", GPU="cpu"), "holds no image with its digest", "rm docker/cpu/image.digest")


def test_an_image_of_other_sources_is_not_pushed(machine, refused):
    machine.image("tunebook:cpu")
    (machine.checkout / "recipes" / "quickstart.yaml").write_text("edited\n")
    done = machine.front("push", REGISTRY="x", GPU="cpu", TUNEBOOK_USE_IMAGE_SOURCES="1")
    refused(done, "leaving out tunebook:cpu: it was built from other sources", "is not built, or not from this")


def test_a_registry_that_refuses(machine, refused):
    text = "denied: requested access to the resource is denied"
    machine.tell("docker-pull", err=f"{text}\n", code=1)
    done = machine.front("pull", GPU="cpu", REGISTRY="host/path/")
    refused(done, text, "docker pull host/path/tunebook:cpu failed", "docker login host", code=1)


def test_a_digest_that_cannot_be_fetched_is_named_and_the_image_built(machine):
    name = "registry.example/path/tunebook@sha256:" + "a" * 64
    machine.digest(name)
    machine.tell("docker-buildx-imagetools", err="ERROR: failed to do request: no such host\n", code=1)
    done = machine.front(*TRAIN, GPU="cpu")
    assert done.returncode == 0
    assert f"image.digest is not used: the registry does not show {name} (ERROR: failed to do request" in done.stderr
    assert len(machine.calls("compose build")) == 1
