"""A machine for docker/front.sh: a small checkout, and fakes of docker and nvidia-smi.

PATH holds only what docker/front.sh says it needs, so a test also fails if the script calls Python.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = (
    "awk", "bash", "cat", "chown", "cut", "date", "dirname", "env", "find", "flock", "git", "grep", "id", "make",
    "mkdir", "printf", "realpath", "rm", "sed", "seq", "setsid", "sh", "sha256sum", "sleep", "sort", "tail", "timeout",
    "touch", "tr", "uniq", "xargs",
)  # fmt: skip

# Output of `docker info --format '{{json .}}'` (Docker 26.1), shortened to what the script reads.
INFO = '{"ID":"fb9c5572","DockerRootDir":"%s","Runtimes":{"runc":{"path":"runc"}%s},"SecurityOptions":["name=seccomp"]}'
NVIDIA_RUNTIME = ',"nvidia":{"path":"nvidia-container-runtime"}'
# Output of nvidia-smi on a machine with two H200; the others have the same form.
H200 = """\
0, GPU-a7c27df2-65ec-f664-608d-90a3b6b32cae, 9.0, 580.159.04, NVIDIA H200
1, GPU-3e876337-490f-1321-336c-fb639725a93c, 9.0, 580.159.04, NVIDIA H200
"""

FAKE_DOCKER = r"""#!/usr/bin/env bash
# Logs its arguments. `docker ONE TWO` sources $FAKE/docker-ONE-TWO.sh or $FAKE/docker-ONE.sh if there is one; then, if
# there is a .code, it prints .out and .err and exits with .code. Images are files in $FAKE/images.
printf '%s\n' "$*" >> "$FAKE/calls"
last=${!#}
for name in "docker-$1-$2" "docker-$1"; do
  if [ -f "$FAKE/$name.sh" ]; then . "$FAKE/$name.sh"; fi
  if [ -f "$FAKE/$name.code" ]; then
    if [ -f "$FAKE/$name.out" ]; then cat "$FAKE/$name.out"; fi
    if [ -f "$FAKE/$name.err" ]; then cat "$FAKE/$name.err" >&2; fi
    exit "$(cat "$FAKE/$name.code")"
  fi
done
case "$1 $2" in
  "image inspect")
    if [ ! -f "$FAKE/images/${last//\//_}" ]; then echo "Error: No such image: $last" >&2; exit 1; fi
    if [ "$4" = "{{.Id}}" ]; then echo "sha256:of-$last"; exit; fi
    cat "$FAKE/images/${last//\//_}" ;;
  "compose build")
    echo "#5 [train venv 1/1] RUN --mount=type=cache,id=tunebook-pip     --mount=type=secret,id=ca     install"
    . ./.env
    printf '%s ' "$TUNEBOOK_LOCK_SHA256" "$TUNEBOOK_ATTENTION" > "$FAKE/images/${TUNEBOOK_IMAGE//\//_}"
    echo "$TUNEBOOK_SOURCES_SHA256" >> "$FAKE/images/${TUNEBOOK_IMAGE//\//_}" ;;
  "compose run" | "compose -f") printf '<%s>\n' "${@:3}" ;;
  "wait "*) exit 1 ;;
esac
"""

FAKE_NVIDIA_SMI = """#!/usr/bin/env bash
cat "$FAKE/nvidia-smi.out"
exit "$(cat "$FAKE/nvidia-smi.code")"
"""

FAKE_TUNEBOOK = """#!/bin/sh
printf '<%s>\\n' "$@"
echo "sees ${CUDA_VISIBLE_DEVICES-all}"
"""


@dataclass
class Machine:
    """A host with a checkout in `checkout`; `tell` and `gpus` set the answers of its docker and nvidia-smi."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def checkout(self) -> Path:
        return self.folder / "tunebook"

    @property
    def fake(self) -> Path:
        return self.folder / "fake"

    def install(self, name: str, script: str) -> None:
        """Put a command into PATH."""
        path = self.folder / "bin" / name
        path.unlink(missing_ok=True)
        path.write_text(script)
        path.chmod(0o755)

    def tell(self, command: str, out: str = "", err: str = "", code: int = 0) -> None:
        """Set the answer of a command: `docker-info`, `docker-compose-run`, `nvidia-smi`."""
        for ending, text in (("out", out), ("err", err), ("code", str(code))):
            (self.fake / f"{command}.{ending}").write_text(text)

    def act(self, command: str, script: str) -> None:
        """Let a command run a script first."""
        (self.fake / f"{command}.sh").write_text(script)

    def gpus(self, lines: str = H200, *, code: int = 0, has_runtime: bool = True) -> None:
        """Give it GPUs, or another answer of nvidia-smi's."""
        self.install("nvidia-smi", FAKE_NVIDIA_SMI)
        self.tell("nvidia-smi", lines, code=code)
        self.tell("docker-info", INFO % (self.folder, NVIDIA_RUNTIME if has_runtime else ""))

    def image(self, name: str, generation: str | None = None) -> None:
        """Have an image whose labels match the checkout."""
        folder = self.checkout / "docker" / (generation or name.partition(":")[2])
        own = re.search(r"^ATTENTION=(.*)$", (folder / "generation.env").read_text(), flags=re.MULTILINE)
        sources = self.command("docker/sources_hash.sh", ".").stdout
        lock = hashlib.sha256((folder / "requirements.lock").read_bytes()).hexdigest()
        labels = f"{lock} {own[1] if own else ''} {sources}"
        (self.fake / "images" / name.replace("/", "_")).write_text(labels)

    def venv(self, generation: str = "cpu") -> None:
        """Have a .venv that is set up."""
        tunebook = self.checkout / ".venv" / "bin" / "tunebook"
        tunebook.parent.mkdir(parents=True)
        tunebook.write_text(FAKE_TUNEBOOK)
        tunebook.chmod(0o755)
        (self.checkout / ".venv" / ".generation").write_text(f"{generation}\n")
        (self.checkout / ".venv" / ".ready-run").touch()

    def command(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the checkout."""
        return subprocess.run(
            words, cwd=self.checkout, env=self.environment | variables, capture_output=True, text=True, check=False,
            timeout=60, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def front(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Call docker/front.sh as make does."""
        return self.command("docker/front.sh", *words, **variables)

    def start(self, *words: str, until: str, **variables: str) -> subprocess.Popen[str]:
        """Start docker/front.sh in a process group of its own, as a terminal does, and wait for a file in `fake`."""
        process = subprocess.Popen(
            ["docker/front.sh", *words], cwd=self.checkout, env=self.environment | variables, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self.wait_until((self.fake / until).exists)
        return process

    @staticmethod
    def wait_until(condition: Callable[[], object]) -> None:
        """Wait for a condition."""
        end = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.02)

    def setting(self, name: str) -> str | None:
        """The value of a setting in .env."""
        match = re.search(rf"^{name}=(.*)$", (self.checkout / ".env").read_text(), flags=re.MULTILINE)
        return None if match is None else match[1].strip("'")

    def calls(self, start: str) -> list[str]:
        """The calls of docker whose arguments start so."""
        file = self.fake / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in lines if line.startswith(start)]


def copy_checkout(target: Path) -> None:
    """Copy what docker/front.sh needs of a checkout; the locks and sources are short stand-ins."""
    files = [ROOT / "Makefile", ROOT / "compose.yaml", *ROOT.glob("docker/*/compose.yaml")]
    for pattern in ("*.sh", "front/*.sh", "*/generation.env"):
        files += (ROOT / "docker").glob(pattern)
    for file in files:
        copy = target / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    for env in (target / "docker").glob("*/generation.env"):
        (env.parent / "requirements.lock").write_text(f"# {env.parent.name}\n")
    for name in ("requirements-build.lock", "requirements-dev.lock"):
        (target / "docker" / name).touch()
    for name in ("src/tunebook.py", "hydra_configs/config.yaml", "recipes/quickstart.yaml", "pyproject.toml"):
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text(f"# {name}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with Docker and without a GPU."""
    for folder in ("bin", "fake/images", "home", "tmp"):
        (tmp_path / folder).mkdir(parents=True)
    for tool in TOOLS:
        program = shutil.which(tool)
        assert program, f"these tests need {tool}"
        (tmp_path / "bin" / tool).symlink_to(program)
    copy_checkout(tmp_path / "tunebook")
    environment = {
        "PATH": str(tmp_path / "bin"), "HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp"),
        "FAKE": str(tmp_path / "fake"), "LC_ALL": "C.UTF-8", "USER": "someone",
    }  # fmt: skip
    host = Machine(tmp_path, environment)
    host.install("docker", FAKE_DOCKER)
    host.tell("docker-info", INFO % (tmp_path, ""))
    host.tell("docker-compose-version", "2.26.1-4\n")
    host.tell("docker-buildx-version", "github.com/docker/buildx 0.13.1+ds1 0.13.1+ds1-3\n")
    return host


@pytest.fixture
def refused() -> Callable[..., None]:
    """Check an error: its exit code, and that it is no mistake of the script."""

    def check(done: subprocess.CompletedProcess[str], code: int = 2) -> None:
        assert done.returncode == code, done.stderr
        assert done.stderr and "unbound variable" not in done.stderr

    return check
