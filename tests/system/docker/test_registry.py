"""`make push`, `make publish` and `make pull` with a real registry, Debian's docker-registry, on a port of its own."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time

import pytest

GENERATION = "volta"  # whose real image these tests do not need
IMAGE = f"tunebook:{GENERATION}"
CONFIG = """
version: 0.1
storage: {{filesystem: {{rootdirectory: {folder}}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""


def free_port():
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def answers(port):
    """Whether somebody listens on a port."""
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def registry(engine, tmp_path):
    program = shutil.which("docker-registry")
    if program is None:
        message = "there is no docker-registry on this machine: apt install docker-registry"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    port = free_port()
    config = tmp_path / "config.yml"
    config.write_text(CONFIG.format(folder=tmp_path / "storage", port=port))
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([program, "serve", str(config)], stdout=log, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 120
        while not answers(port):
            assert process.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.1)
        yield f"127.0.0.1:{port}/tried"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def small_image(in_checkout, checkout):
    """An image that calls itself this checkout's; what had its name before gets it back."""
    aside = f"{IMAGE}-aside"
    had_one = in_checkout("docker", "tag", IMAGE, aside).returncode == 0
    written = in_checkout("make", "env", f"GPU={GENERATION}")
    assert written.returncode == 0, written.stdout
    found = re.findall(
        r"^TUNEBOOK_(LOCK_SHA256|SOURCES_SHA256|ATTENTION)='(\S+)'$", (checkout / ".env").read_text(), re.MULTILINE
    )
    (checkout / ".cache" / "small").mkdir()
    (checkout / ".cache" / "small" / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /\n")
    words = [
        word for name, value in found for word in ("--label", f"tunebook.{name.lower().replace('_', '-')}={value}")
    ]
    built = in_checkout("docker", "build", *words, "--tag", IMAGE, ".cache/small")
    assert built.returncode == 0, built.stdout
    yield
    shutil.rmtree(checkout / ".cache" / "small")
    (checkout / "docker" / GENERATION / "image.digest").unlink(missing_ok=True)
    in_checkout("docker", "rmi", "--force", IMAGE)
    if had_one:
        in_checkout("docker", "tag", aside, IMAGE)
        in_checkout("docker", "rmi", aside)


def test_what_is_pushed_is_used_elsewhere_until_the_checkout_changes(registry, small_image, checkout, in_checkout):
    make = ("make", f"GPU={GENERATION}")
    pushed = in_checkout(*make, "push", f"REGISTRY={registry}")
    assert pushed.returncode == 0, pushed.stdout
    digest = checkout / "docker" / GENERATION / "image.digest"
    name = digest.read_text().strip()
    assert re.fullmatch(re.escape(registry) + r"/tunebook@sha256:[0-9a-f]{64}", name)
    assert name in pushed.stdout.splitlines()  # printed by itself, so that a script can take it
    # Another machine: it has neither the image nor its name.
    in_checkout("docker", "rmi", "--force", IMAGE, f"{registry}/{IMAGE}", name)
    assert "No such image" in in_checkout("docker", "image", "inspect", name).stdout
    pulled = in_checkout(*make, "pull")
    assert pulled.returncode == 0, pulled.stdout
    assert "it is used from now on" in pulled.stdout
    assert f"TUNEBOOK_IMAGE='{name}'" in (checkout / ".env").read_text().splitlines()
    assert "is here and current: nothing to build" in in_checkout(*make, "image").stdout
    digest.unlink()
    by_tag = in_checkout(*make, "pull", f"REGISTRY={registry}")
    assert by_tag.returncode == 0, by_tag.stdout
    assert digest.read_text().strip() == name
    # After an edit it is not what this checkout describes.
    edited = checkout / "recipes" / "edited.yaml"
    edited.write_text("# edited\n")
    try:
        assert "so it is not used: make image builds one that is" in in_checkout(*make, "pull").stdout
        assert f"TUNEBOOK_IMAGE='{IMAGE}'" in (checkout / ".env").read_text().splitlines()
    finally:
        edited.unlink()
    for image in (name, f"{registry}/{IMAGE}"):
        in_checkout("docker", "rmi", "--force", image)


def test_an_engine_that_holds_no_attestations_publishes_nothing(registry, checkout, in_checkout):
    builder = in_checkout("docker", "buildx", "inspect").stdout
    stores = in_checkout("docker", "info", "--format", "{{.DriverStatus}}").stdout
    if not re.search(r"^Driver: +docker$", builder, re.MULTILINE) or "io.containerd.snapshotter" in stores:
        pytest.skip("this builder makes attestations")
    done = in_checkout("make", "publish", f"GPU={GENERATION}", f"REGISTRY={registry}")
    assert done.returncode == 2, done.stdout
    assert not (checkout / "docker" / GENERATION / "image.digest").exists()
