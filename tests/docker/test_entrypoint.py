"""docker/entrypoint.sh: what a container refuses before Python starts, and what it runs otherwise.

`tunebook` is replaced by a script that prints its arguments.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

DOCKER = Path(__file__).resolve().parents[2] / "docker"

Run = Callable[..., subprocess.CompletedProcess[str]]


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Enough of a checkout to be hashed."""
    folder = tmp_path / "checkout"
    for name in ("src", "hydra_configs", "recipes", "docker"):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text(name)
    (folder / "pyproject.toml").write_text("[project]\n")
    (folder / "outputs").mkdir()
    return folder


@pytest.fixture
def image(tmp_path: Path, checkout: Path) -> Path:
    """The image's folder, as built from the checkout."""
    folder = tmp_path / "opt"
    folder.mkdir()
    for name in ("entrypoint.sh", "sources_hash.sh"):
        shutil.copy(DOCKER / name, folder)
    (folder / "image.json").write_text("{}")
    sources_hash = subprocess.check_output([str(DOCKER / "sources_hash.sh"), str(checkout)], text=True)
    (folder / "sources.sha256").write_text(sources_hash)
    return folder


@pytest.fixture
def run(tmp_path: Path, image: Path, checkout: Path) -> Run:
    """Run the entry point as compose would; keywords are environment variables, None takes one away."""
    programs = tmp_path / "programs"
    script(
        programs / "tunebook", 'printf "tunebook:%s" "$*"; printf " home=%s ca=%s" "$TUNEBOOK_HOME" "$SSL_CERT_FILE"'
    )
    cache = tmp_path / "cache"
    usual: dict[str, str | None] = {
        "PATH": f"{programs}:/usr/bin:/bin", "HOME": str(cache / "home"), "HF_HOME": str(cache / "huggingface"),
        "TUNEBOOK_CACHE": str(cache / "tunebook"), "TUNEBOOK_CHECKOUT": str(checkout), "TUNEBOOK_HOME": str(checkout),
        "TUNEBOOK_SITE_CA": str(tmp_path / "ca"),
    }  # fmt: skip

    def call(*words: str, **changed: str | None) -> subprocess.CompletedProcess[str]:
        environment = {key: value for key, value in (usual | changed).items() if value is not None}
        return subprocess.run(
            ["bash", str(image / "entrypoint.sh"), *words], cwd=checkout, env=environment, text=True, check=False,
            capture_output=True, timeout=30,
        )  # fmt: skip

    return call


def test_it_runs_tunebook_with_the_arguments_as_they_are(run: Run, checkout: Path, tmp_path: Path) -> None:
    done = run("train", "quickstart", "a.b=[1,2]", "m=x y")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"tunebook:train quickstart a.b=[1,2] m=x y home={checkout} ca="
    for words in ((), ("train", "-h")):  # help is printed whatever is wrong
        done = run(*words, HF_HOME="/proc/none", TUNEBOOK_CHECKOUT="/proc/none")
        assert (done.returncode, done.stdout.startswith(f"tunebook:{' '.join(words)}")) == (0, True)
    script(tmp_path / "programs" / "tunebook", "exit 6")
    assert run("train").returncode == 6


def test_ctrl_c_while_the_script_waits_for_a_program_is_not_lost(run: Run, image: Path, tmp_path: Path) -> None:
    """tini forwards a signal to the script only, and bash continues if the program that it waits for did not get it."""
    script(tmp_path / "programs" / "mkdir", 'touch "$STARTED"; sleep 0.5; exec /bin/mkdir "$@"')
    started = tmp_path / "started"
    process = subprocess.Popen(
        ["bash", str(image / "entrypoint.sh"), "plan"],
        env={"PATH": f"{tmp_path / 'programs'}:/usr/bin:/bin", "HOME": str(tmp_path / "home"), "STARTED": str(started)},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    end = time.monotonic() + 30
    while not started.exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=30)
    assert (process.returncode, said) == (128 + signal.SIGINT, "")


def test_on_request_the_images_own_sources_are_used_and_a_sites_certificates_are_trusted(
    run: Run, checkout: Path, tmp_path: Path
) -> None:
    (tmp_path / "ca").write_text("-----BEGIN CERTIFICATE-----")
    (checkout / "src" / "file").write_text("changed")
    assert run("plan").returncode == 2
    done = run("plan", TUNEBOOK_USE_IMAGE_SOURCES="1")
    assert (done.returncode, done.stdout) == (0, f"tunebook:plan home= ca={tmp_path / 'ca'}"), done.stderr


def test_caches_that_are_not_writable_are_refused(run: Run) -> None:
    for name in ("HOME", "TUNEBOOK_CACHE", "HF_HOME"):
        done = run("train", **{name: "/proc/none"})
        assert (done.returncode, done.stdout) == (2, "")
        assert "/proc/none" in done.stderr
    # Without downloads the models may be read-only.
    assert run("train", HF_HOME="/proc/none", HF_HUB_OFFLINE="1").returncode == 0


def test_a_build_gets_a_sites_secrets_for_one_command_and_leaves_no_file(tmp_path: Path) -> None:
    for name in ("ca", "pip_conf"):
        (tmp_path / name).write_text("x")
    (tmp_path / "apt_conf").write_text('Acquire::Retries "3";\n')
    before = set(Path("/dev/shm").iterdir())
    program = 'echo "$PIP_CERT|$SSL_CERT_FILE|$PIP_CONFIG_FILE"; cat "$APT_CONFIG"'
    printed = subprocess.check_output(
        [str(DOCKER / "with_site.sh"), "bash", "-c", program], text=True, timeout=30,
        env={"PATH": "/usr/bin:/bin", "TUNEBOOK_SECRETS": str(tmp_path)},
    )  # fmt: skip
    assert printed.splitlines() == [
        f"{tmp_path / 'ca'}|{tmp_path / 'ca'}|{tmp_path / 'pip_conf'}",
        f'Acquire::https::CAInfo "{tmp_path}/ca";',
        'Acquire::Retries "3";',
    ]
    assert not {path for path in Path("/dev/shm").iterdir() if path.name.startswith("tmp.")} - before
