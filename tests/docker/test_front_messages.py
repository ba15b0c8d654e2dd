"""What the front door says where something is missing, wrong or full: each message with what to type next.

The texts of docker, nvidia-smi and BuildKit are their own, as they were printed on real machines.
"""

from __future__ import annotations

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


def test_daemon_down(machine, refused):
    machine.tell("docker-info", NO_INFO % DOWN)  # exit code 0
    refused(
        machine.front(*TRAIN, GPU="cpu"), "its daemon does not answer at unix:///var/run/docker.sock",
        "sudo systemctl start docker", "WHERE=local",
    )  # fmt: skip
    machine.tell("docker-info", "\n", err=DOWN, code=1)
    remote = machine.front(*TRAIN, GPU="cpu", DOCKER_HOST="tcp://build:2375")
    refused(remote, "DOCKER_HOST=tcp://build:2375 says where it is", "unset DOCKER_HOST")


def test_daemon_that_hangs(machine, refused):
    machine.act("docker-info", "sleep 20")
    done = machine.front(*TRAIN, GPU="cpu", TUNEBOOK_ENGINE_TIMEOUT_S="0.3")
    refused(done, "did not answer within 0.3 s", "sudo systemctl restart docker")


def test_podman_under_dockers_name(machine, refused):
    emulated = "Emulate Docker CLI using podman. Create /etc/containers/nodocker to quiet msg.\n"
    machine.tell("docker-info", '{"host":{"arch":"amd64"}}', err=emulated)
    refused(machine.front(*TRAIN, GPU="cpu"), "The command docker is Podman here", "engine/install")


def test_no_permission_on_the_socket(machine, refused):
    machine.tell("docker-info", NO_INFO % DENIED)
    refused(
        machine.front(*TRAIN, GPU="cpu"), "no permission on its socket /var/run/docker.sock",
        "sudo usermod -aG docker someone", "log in again",
    )  # fmt: skip


def test_with_a_gpu_such_a_docker_is_passed_over_with_the_reason(machine):
    machine.gpus(A100)
    machine.tell("docker-info", NO_INFO % DENIED)
    machine.venv("ampere")
    done = machine.front(*TRAIN)
    assert done.returncode == 0
    assert "no container: You may not use Docker" in done.stderr


def test_compose_v1_only_or_none(machine, refused):
    machine.tell("docker-compose-version", err="unknown flag: --short\nSee 'docker --help'.\n", code=125)
    refused(machine.front("image", GPU="cpu"), "Compose v2, its plugin, is not", "apt install docker-compose-plugin")
    machine.install("docker-compose", "#!/bin/sh\necho 1.29.2\n")
    refused(machine.front("image", GPU="cpu"), "Only Compose v1 is here", "docker-compose-plugin", "docker-compose-v2")


@pytest.mark.parametrize("version", ["2.18.1", "v2.3.3", "2.0.0-rc.1"])
def test_compose_too_old(machine, refused, version):
    machine.tell("docker-compose-version", f"{version}\n")
    refused(machine.front("image", GPU="cpu"), f"Compose {version.removeprefix('v')} is too old", "--only-upgrade")


@pytest.mark.parametrize("version", ["2.19.0", "v2.26.1", "2.26.1-4", "5.0.1", "2.100.0+ds1"])
def test_compose_new_enough(machine, version):
    machine.tell("docker-compose-version", f"{version}\n")
    assert machine.front("image", GPU="cpu").returncode == 0


def test_buildx_missing_matters_only_to_a_build(machine, refused):
    text = "docker: 'buildx' is not a docker command.\nSee 'docker --help'\n"
    machine.images("tunebook:cpu")
    machine.tell("docker-buildx-version", err=text, code=1)
    assert machine.front(*TRAIN, GPU="cpu").returncode == 0
    refused(machine.front("image", GPU="cpu"), "buildx", "apt install docker-buildx-plugin")


# --- GPUs


def test_no_nvidia_runtime(machine, refused):
    machine.gpus(A100, has_runtime=False)
    refused(
        machine.front(*TRAIN), "finds 1 x NVIDIA A100-SXM4-80GB, but Docker cannot hand GPUs to containers",
        "sudo nvidia-ctk runtime configure --runtime=docker", "sudo systemctl restart docker", "WHERE=local",
    )  # fmt: skip
    assert machine.calls("compose build") == []


def test_a_cdi_device_or_the_hook_are_as_good_as_a_runtime(machine):
    machine.images("tunebook:ampere")
    machine.gpus(A100, has_runtime=False)
    machine.install("nvidia-container-runtime-hook", "#!/bin/sh\n")
    assert machine.front(*TRAIN).returncode == 0
    machine.remove("nvidia-container-runtime-hook")
    cdi = '{"Source":"cdi","ID":"nvidia.com/gpu=all"}'
    machine.tell("docker-info", f'{{"DockerRootDir":"/x","Runtimes":{{"runc":{{}}}},"DiscoveredDevices":[{cdi}]}}')
    assert machine.front(*TRAIN).returncode == 0


@pytest.mark.parametrize(
    ("said", "parts"),
    [
        (
            'Error response from daemon: could not select device driver "nvidia" with capabilities: [[gpu]]',
            ("it has no NVIDIA runtime", "sudo nvidia-ctk runtime configure --runtime=docker"),
        ),
        (
            "Error response from daemon: failed to create task for container: failed to create shim task: OCI runtime "
            "create failed: runc create failed: unable to start container process: error during container init: error "
            "running hook #0: exit status 1, stdout: , stderr: nvidia-container-cli: initialization error: nvml error: "
            "driver/library version mismatch: unknown",
            ("could not hand the GPUs over", "sudo systemctl restart docker"),
        ),
    ],
)
def test_dockers_own_words_about_gpus_are_explained(machine, refused, said, parts):
    machine.images("tunebook:ampere")
    machine.gpus(A100)
    machine.tell("docker-compose-run", err=f"{said}\n", code=1)
    refused(machine.front(*TRAIN), *parts)


def test_more_gpus_than_there_are(machine, refused):
    machine.gpus()
    refused(machine.front(*TRAIN, GPUS="3"), "GPUS=3, but there are 2 here: 2 x NVIDIA H200", "GPUS=2 or fewer")
    machine.remove("nvidia-smi")
    refused(machine.front(*TRAIN, GPUS="3"), "GPUS=3, but there is no GPU here")
    refused(machine.front(*TRAIN, GPUS="3", GPU="cpu"), "GPU=cpu uses none", "hardware.gpus_per_node=3")


@pytest.mark.parametrize("number", ["0", "-1", "two", "1.5"])
def test_a_number_of_gpus_that_is_none(machine, refused, number):
    refused(machine.front(*TRAIN, GPUS=number), f"GPUS={number} is no number of GPUs")


def test_a_count_beside_visible_devices(machine, refused):
    machine.gpus()
    refused(machine.front("env", GPUS="1", CUDA_VISIBLE_DEVICES="1,0"), "both say which GPUs", "Leave GPUS out")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("hoper", "hopper"), ("Amper", "ampere"), ("H200", "hopper"), ("v100", "volta"), ("b200", "blackwell"),
     ("toring", "turing"), ("gpu", "cpu"), ("xyzxyz", None)],
)  # fmt: skip
def test_an_unknown_generation(machine, refused, typed, meant):
    done = machine.front(*TRAIN, GPU=typed)
    refused(done, f"GPU={typed} is unknown.", "Choose one of: auto ampere blackwell cpu hopper volta")
    assert ("Did you mean" in done.stderr) == (meant is not None)
    if meant is not None:
        assert f"Did you mean GPU={meant}?" in done.stderr


def test_an_unknown_place(machine, refused):
    refused(machine.front(*TRAIN, WHERE="lokal"), "WHERE=lokal is unknown. Did you mean WHERE=local?", "auto container")
    refused(machine.front(*TRAIN, WHERE="on my laptop"), "Choose one of: auto container local")


def test_a_named_generation_where_no_gpu_is_may_be_built_but_not_run(machine, refused):
    assert machine.front("image", GPU="hopper").returncode == 0
    for variables in ({}, {"WHERE": "local"}):
        refused(
            machine.front(*TRAIN, GPU="hopper", **variables), "GPU=hopper needs such GPUs, and there is no GPU here",
            "make image GPU=hopper", "GPU=cpu",
        )  # fmt: skip


def test_the_image_of_other_gpus(machine, refused):
    machine.gpus(ONE_GPU.format("7.0", "580.95.05", "Tesla V100-SXM2-32GB"))
    refused(
        machine.front(*TRAIN, GPU="ampere"), "GPU=ampere is for compute capability 8.0, 8.6, 8.9",
        "Tesla V100-SXM2-32GB has 7.0", "Type GPU=volta",
    )  # fmt: skip


def test_a_driver_too_old(machine, refused):
    machine.gpus(ONE_GPU.format("8.0", "535.183.01", "NVIDIA A100-SXM4-80GB"))
    refused(machine.front(*TRAIN, GPU="ampere"), "is too old for GPU=ampere, which needs 580", "leave GPU out")
    machine.gpus(ONE_GPU.format("8.0", "470.256.02", "NVIDIA A100-SXM4-80GB"))
    refused(machine.front(*TRAIN), "470.256.02 is too old", "needs 580", "runs on is 525", "GPU=cpu")
    machine.gpus('Field "compute_cap" is not a valid field to query.\n\n', code=2)
    refused(machine.front(*TRAIN), "older than any image can use", "580 or newer")


def test_a_gpu_too_old(machine, refused):
    machine.gpus(ONE_GPU.format("6.1", "580.95.05", "NVIDIA GeForce GTX 1080"))
    refused(machine.front("env"), "GTX 1080 (compute capability 6.1) is older than any", "GPU=cpu")


def test_gpus_of_different_generations(machine, refused):
    machine.gpus(A100 + "1, GPU-77aa0000, 7.0, 580.95.05, Tesla V100-SXM2-32GB\n")
    refused(machine.front("env"), "different generations", "CUDA_VISIBLE_DEVICES=GPU-77aa0000 # Tesla V100")


@pytest.mark.parametrize(
    ("said", "code", "parts"),
    [
        ("Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 535.183\n", 18,
         ("the old one is still loaded", "sudo reboot")),
        ("Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error\n", 15,
         ("fails, so it is not known which GPUs", "GPU0000:3B:00.0", "nvidia-smi")),
        ("0, GPU-1, [N/A], 580.95.05, [Unknown Error]\n", 0,
         ("GPU 0, but the GPU does not answer", "CUDA_VISIBLE_DEVICES")),
    ],
)  # fmt: skip
def test_gpus_that_do_not_answer_are_not_taken_for_none(machine, refused, said, code, parts):
    machine.venv()
    machine.gpus(said, code=code)
    refused(machine.front(*TRAIN), *parts, "GPU=cpu")
    assert machine.front(*TRAIN, GPU="cpu", WHERE="local").returncode == 0


def test_nvidia_smi_that_hangs_even_when_killed(machine, refused):
    machine.gpus()
    machine.act("nvidia-smi", "trap '' TERM\nfor wait in 1 2 3 4 5 6 7 8 9 10; do sleep 0.3; done")
    done = machine.front("env", TUNEBOOK_NVIDIA_SMI_TIMEOUT_S="0.5")
    refused(done, "no answer within 0.5 s", "GPU=cpu")


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("No devices were found\n", 6),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
         "NVIDIA driver is installed and running.\n\n", 9),
        ("", 0),
    ],
)  # fmt: skip
def test_a_driver_package_without_a_gpu_is_no_gpu(machine, said, code):
    machine.venv()
    machine.gpus(said, code=code)
    done = machine.front(*TRAIN)
    assert (done.returncode, "in .venv with the packages of docker/cpu: no GPU here" in done.stderr) == (0, True)
