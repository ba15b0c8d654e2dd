"""What the front door says where a folder, the disk, a build or a registry fails, with what to type next."""

from __future__ import annotations

import os
import subprocess

import pytest

TRAIN = ("run", "train", "quickstart")


# --- folders and disk


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make what belongs to root")
@pytest.mark.parametrize("closed", ["outputs", "outputs/quickstart"])
def test_outputs_that_belong_to_root(machine, refused, closed):
    machine.images("tunebook:cpu")
    for folder in ("outputs", "outputs/quickstart"):
        (machine.checkout / folder).mkdir(exist_ok=True)
    subprocess.run(["chown", "-R", "4321:4321", machine.folder], check=True)
    os.chown(machine.checkout / closed, 0, 0)
    for folder in [machine.folder, *machine.folder.parents][:4]:  # pytest closes them to other users
        folder.chmod(folder.stat().st_mode | 0o055)
    advice = f"sudo chown -R 4321:4321 {machine.checkout}/outputs"
    for who in ({"SUDO_UID": "4321", "SUDO_GID": "4321"}, {"uid": 4321}):
        done = machine.front(*TRAIN, GPU="cpu", **who)
        refused(done, f"{machine.checkout}/{closed} belongs to root", advice)


def test_too_little_disk_for_a_build(machine, refused):
    machine.install("df", "#!/bin/sh\nprintf 'Filesystem 1024-blocks Used Available\\n/dev/vda 9 9 3145728\\n'\n")
    done = machine.front("image", GPU="cpu")
    refused(done, "Building tunebook:cpu takes", f"3 GiB are left in {machine.folder}, where Docker keeps all",
            "docker system df", "docker builder prune", code=3)  # fmt: skip
    assert machine.calls("compose build") == []


# What failed builds said, the exit code, and what is to be read.
BUILDS = {
    "disk": (
        "#14 12.3 ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
        3, ("the disk is full; Docker keeps everything under", "docker builder prune"),
    ),
    "no network for apt": (
        "#9 0.4 E: Failed to fetch http://deb.debian.org/debian/dists  Temporary failure resolving 'deb.debian.org'",
        2, ("no network inside the build", "NETWORK=host", "make pull"),
    ),
    "no network for pip": (
        "WARNING: Retrying after connection broken by 'NewConnectionError: Temporary failure in name resolution'",
        2, ("no network inside the build", "PIP_CONF=FILE"),
    ),
    "no base image": (
        "failed to solve: debian:12.12-slim: failed to resolve source metadata for docker.io/library/debian:12.12-slim",
        2, ("the base image cannot be had", "BASE_IMAGE="),
    ),
    "certificates": (
        "SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed'",
        2, ("make image GPU=cpu CA=/etc/ssl/certs/ca-certificates.crt",),
    ),
    "hashes": (
        "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.", 1, ("PIP_CONF=FILE", "make lock"),
    ),
    "missing package": ("ERROR: No matching distribution found for torch==2.13.0", 2, ("WHEELS=DIR",)),
    "memory": (
        "flash-attn: nvcc error: 'cicc' died due to signal 9 (Kill signal)", 1, ("memory ran out", "what was compiled"),
    ),
    "unknown": ("error: attention package does not import", 1, ("see above", ".cache/build-cpu.log")),
}  # fmt: skip


@pytest.mark.parametrize("kind", BUILDS)
def test_a_build_that_fails_shows_its_last_lines_and_the_reason(machine, refused, kind):
    text, code, parts = BUILDS[kind]
    lines = "".join(f"#14 {number} working\n" for number in range(40))
    machine.tell("docker-compose-build", lines, err=f"{text}\nfailed to solve: exit code: 1\n", code=17)
    done = machine.front(*TRAIN, GPU="cpu")
    refused(done, "error: building tunebook:cpu failed", text[:60], *parts, code=code)
    assert "#14 2 working" not in done.stderr
    assert text in (machine.checkout / ".cache" / "build-cpu.log").read_text()
    assert machine.calls("compose run") == []


def test_files_that_are_not_there(machine, refused):
    refused(machine.front("image", GPU="cpu", CA="/no/x.pem"), "CA=/no/x.pem: there is no such file", "forget it: CA=")
    refused(machine.front("image", GPU="cpu", DATA="pyproject.toml"), "DATA=pyproject.toml is no folder")
    refused(machine.front("image", GPU="cpu", PIP_CONF="src"), "PIP_CONF=src is no file")


def test_names_that_compose_cannot_read(machine, refused):
    (machine.folder / "it's").mkdir()
    refused(machine.front("env", GPU="cpu", DATA="../it's"), "TUNEBOOK_DATA: compose cannot read a name with a quote")


# --- registries


def test_push_and_pull_say_what_they_need(machine, refused):
    refused(machine.front("push"), "Name it: make push REGISTRY=host/path")
    refused(machine.front("push", REGISTRY="https://host/path"), "Type REGISTRY=host/path")
    refused(machine.front("push", REGISTRY="host/path"), "No image of this checkout is built here", "make image")
    refused(machine.front("push", REGISTRY="x", GPU="volta"), "tunebook:volta is not built", "make image GPU=volta")
    refused(machine.front("pull", GPU="cpu"), "There is no docker/cpu/image.digest", "make pull REGISTRY=host/path")
    (machine.checkout / "docker" / "cpu" / "image.digest").write_text("tunebook:latest\n")
    refused(machine.front("pull", GPU="cpu"), "holds no image with its digest", "rm docker/cpu/image.digest")


@pytest.mark.parametrize(
    ("said", "parts"),
    [
        ("denied: requested access to the resource is denied", ("docker login host",)),
        ('Error response from daemon: Get "https://host/v2/": http: server gave HTTP response to HTTPS client',
         ('{"insecure-registries": ["host"]}',)),
        ('Error response from daemon: Get "http://host/v2/": dial tcp 127.0.0.1:5000: connect: connection refused',
         ("the registry host cannot be reached",)),
        ("Error response from daemon: manifest for host/path/tunebook:cpu not found: manifest unknown",
         ("does not have host/path/tunebook:cpu", "make push REGISTRY=host/path")),
        ("write /var/lib/docker/tmp/GetImageBlob1: no space left on device",
         ("the disk is full", "docker system prune")),
    ],
)  # fmt: skip
def test_what_a_registry_says_is_explained(machine, refused, said, parts):
    machine.tell("docker-pull", err=f"{said}\n", code=1)
    code = 3 if "no space" in said else 2
    refused(machine.front("pull", GPU="cpu", REGISTRY="host/path/"), said, *parts, code=code)


def test_a_digest_that_cannot_be_fetched_is_said_and_the_image_built(machine):
    name = "registry.example/path/tunebook@sha256:" + "a" * 64
    (machine.checkout / "docker" / "cpu" / "image.digest").write_text(f"{name}\n")
    machine.tell("docker-buildx-imagetools", err="ERROR: failed to do request: no such host\n", code=1)
    done = machine.front(*TRAIN, GPU="cpu")
    assert done.returncode == 0
    assert f"image.digest is not used: the registry does not show {name} (ERROR: failed to do request" in done.stderr
    assert len(machine.calls("compose build")) == 1


def test_the_steps_are_shown_although_a_build_before_was_killed(machine):
    (machine.checkout / ".cache").mkdir(exist_ok=True)
    (machine.checkout / ".cache" / "build-cpu.log.end").touch()
    machine.act("docker-compose-build", "sleep 1")  # a follower that takes the old build's end for this one's is gone
    done = machine.front("image", GPU="cpu")
    assert done.returncode == 0
    assert " [train venv 1/1] RUN install\n" in done.stderr
    assert not (machine.checkout / ".cache" / "build-cpu.log.end").exists()
