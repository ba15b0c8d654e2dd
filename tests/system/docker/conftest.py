"""The containers as their users run them, on a real Docker Engine: a copy of the checkout, its own .env and outputs.

What a site's network needs is handed to `make` by the environment, as a user would: BASE_IMAGE, CA, WHEELS.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# What would reach the copy's make or compose from the checkout or an outer make.
NOT_INHERITED = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "ARGS", "RECIPE", "WHERE", "GPU", "GPUS")
USER, GROUP = 12345, 12346  # nobody's on any machine, and neither is the other

Docker = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def engine() -> str:
    """The version of the engine that answers. Without one its tests are skipped, except in CI."""
    for words in (["docker", "compose", "version"], ["docker", "buildx", "version"], ["docker", "info"]):
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        except FileNotFoundError:
            done = None
        if done is None or done.returncode != 0:
            reason = f"`{' '.join(words)}` fails: a Docker Engine with Compose v2 and buildx is needed"
            if os.environ.get("CI"):
                pytest.fail(reason)
            pytest.skip(reason)
    return subprocess.check_output(["docker", "version", "--format", "{{.Server.Version}}"], text=True).strip()


@pytest.fixture(scope="session")
def markers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Lines that are nowhere else, each with the file that brings it into a build; `environment` names the files."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "pip.conf").write_text("[global]\n# marker-of-the-pip-conf-6d1f0c\n")
    (folder / "apt.conf").write_text("// marker-of-the-apt-conf-a93be2\n")
    bundle = Path(os.environ.get("CA") or "/etc/ssl/certs/ca-certificates.crt").read_text()
    (folder / "ca.crt").write_text(f"{bundle}\n# marker-of-the-ca-51c7d8\n")
    return {
        "marker-of-the-pip-conf-6d1f0c": folder / "pip.conf",
        "marker-of-the-apt-conf-a93be2": folder / "apt.conf",
        "marker-of-the-ca-51c7d8": folder / "ca.crt",
    }


@pytest.fixture(scope="session")
def environment(engine: str, markers: dict[str, Path]) -> dict[str, str]:
    """What commands run with: nothing of an outer make, and a Compose project of the tests' own."""
    inherited = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
    pip_conf, apt_conf, ca = (str(path) for path in markers.values())
    site = {"PIP_CONF": pip_conf, "APT_CONF": apt_conf, "CA": ca}
    return inherited | site | {"COMPOSE_PROJECT_NAME": f"tunebook-tests-{os.getpid()}", "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture(scope="session")
def checkout(project_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that git knows or would add, with its history: nothing is written into the real one."""
    copy = tmp_path_factory.mktemp("checkout") / "tunebook"
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.check_output(words, cwd=project_root, text=True).split("\0")
    for name in filter(None, listed):
        if (project_root / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(project_root / name, copy / name, follow_symlinks=False)
    shutil.copytree(project_root / ".git", copy / ".git", symlinks=True)
    # pytest's folders, one more of them under xdist, are closed to the other users that the tests run as.
    for folder in copy.parents:
        if Path(tempfile.gettempdir()) in folder.parents:
            folder.chmod(folder.stat().st_mode | 0o055)
    return copy


@pytest.fixture(scope="session")
def in_checkout(checkout: Path, environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command in the copy; its two streams come back as one text in `stdout`."""

    def call(*words: str, timeout_s: float = 400, **settings: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, cwd=checkout, env=environment | settings, text=True, check=False, timeout=timeout_s,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    return call


@pytest.fixture(scope="session")
def cpu_image(in_checkout: Docker) -> Iterator[str]:
    """The cpu image, built through make; its name. The tests' networks and volumes are removed at the end."""
    built = in_checkout("make", "image", "GPU=cpu", timeout_s=2400)
    assert built.returncode == 0, built.stdout[-6000:]
    yield "tunebook:cpu"
    in_checkout("docker", "compose", "down", "--volumes", "--remove-orphans")


@pytest.fixture(scope="session")
def inspect(environment: dict[str, str]) -> Callable[[str], dict[str, object]]:
    """What the engine knows about an image."""

    def read(image: str) -> dict[str, object]:
        text = subprocess.check_output(["docker", "image", "inspect", image], env=environment, text=True)
        facts: dict[str, object] = json.loads(text)[0]
        return facts

    return read
