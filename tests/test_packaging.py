"""The Makefile, the locks, the package's metadata and the wheel agree with each other and with the code."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
CPU = ROOT / "docker" / "cpu"
PAIRS = ["requirements", "requirements-dev", "requirements-build"]
LOCKS = sorted(path.name for path in CPU.glob("*.lock"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# What a package is imported as, where that is not its own name.
IMPORT_NAMES = {
    "hydra-core": "hydra",
    "nvidia-ml-py": "pynvml",
    "pyyaml": "yaml",
}


def read_requirements(path: Path) -> dict[str, Requirement]:
    """The requirements of an `.in` or lock file by canonical name, hashes and comments left out."""
    lines = [line for line in path.read_text().splitlines() if re.match(r"\w", line)]
    requirements = [Requirement(re.split(r"\s+(?:\\|#|--hash)", line)[0]) for line in lines]
    return {canonicalize_name(requirement.name): requirement for requirement in requirements}


def pinned(requirement: Requirement) -> str:
    """The one version that is asked for."""
    (specifier,) = requirement.specifier
    assert specifier.operator == "==", f"{requirement} is not pinned"
    return specifier.version


def make(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run make without the variables that an outer make hands down."""
    environment = {name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MAKELEVEL", "ARGS"}}
    return subprocess.run(
        ["make", *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def makefile_targets() -> list[str]:
    """The targets with a plain name, in the Makefile's order."""
    return re.findall(r"^([a-z][a-z-]*):(?!=)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


@pytest.fixture(scope="module")
def make_locks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_locks", ROOT / "docker" / "make_locks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- locks


@pytest.mark.parametrize("stem", PAIRS)
def test_every_pin_of_an_in_file_is_what_its_lock_installs(stem: str) -> None:
    asked = read_requirements(CPU / f"{stem}.in")
    locked = read_requirements(CPU / f"{stem}.lock")
    assert asked
    assert {name: pinned(requirement) for name, requirement in asked.items()} == {
        name: pinned(locked[name]) for name in asked if name in locked
    }


@pytest.mark.parametrize("name", LOCKS)
def test_every_locked_package_has_one_version_and_a_hash(name: str, make_locks: ModuleType) -> None:
    blocks = make_locks.split_blocks((CPU / name).read_text())
    assert len(blocks) >= 1
    without = [package for package, block in blocks.items() if not re.search(r"--hash=sha256:[0-9a-f]{64}\b", block)]
    assert without == []
    for requirement in read_requirements(CPU / name).values():
        pinned(requirement)


@pytest.mark.parametrize("name", LOCKS)
def test_no_lock_names_an_address(name: str) -> None:
    assert re.findall(r"\w+://\S*|--(?:index|extra|find|trusted)\S*| @ |(?<=\s)/\w\S*", (CPU / name).read_text()) == []


def test_the_locks_do_not_contradict_each_other() -> None:
    versions: dict[str, set[str]] = {}
    for name in set(LOCKS) - {"requirements-torch-cpu.lock"}:
        for package, requirement in read_requirements(CPU / name).items():
            versions.setdefault(package, set()).add(pinned(requirement))
    assert {package: found for package, found in versions.items() if len(found) > 1} == {}


def test_cuda_libraries_are_only_in_the_cuda_lock() -> None:
    runs = read_requirements(CPU / "requirements.lock")
    assert [name for name in runs if name.startswith(("nvidia-", "cuda-", "triton"))] == ["nvidia-ml-py"]
    assert {"nvidia-nccl-cu13", "nvidia-cudnn-cu13", "triton"} <= set(read_requirements(CPU / "requirements-cuda.lock"))


def test_torch_may_be_the_cpu_build_or_the_registrys(make_locks: ModuleType) -> None:
    block = make_locks.split_blocks((CPU / "requirements.lock").read_text())["torch"]
    cpu_build = make_locks.split_blocks((CPU / "requirements-torch-cpu.lock").read_text())["torch"]
    cpu_hashes = re.findall(r"sha256:\w+", cpu_build)
    assert cpu_hashes
    assert make_locks.pinned_version(cpu_build) == make_locks.pinned_version(block) + "+cpu"
    hashes = re.findall(r"sha256:\w+", block)
    assert set(cpu_hashes) < set(hashes)
    assert len(hashes) == len(set(hashes))


def test_a_cpu_build_of_another_version_is_refused(make_locks: ModuleType) -> None:
    message = r"pins torch 2\.1\.0\+cpu but requirements\.in pins 2\.2\.0.*write torch==2\.2\.0\+cpu"
    with pytest.raises(SystemExit, match=message):
        make_locks.allow_cpu_build("torch==2.2.0 \\\n    --hash=sha256:aa\n", "torch==2.1.0+cpu --hash=sha256:bb\n")


def test_cpu_hashes_are_added_once(make_locks: ModuleType) -> None:
    torch = "torch==2.2.0 ; sys_platform == 'linux' \\\n    --hash=sha256:aa\n    # via x\n"
    once = make_locks.allow_cpu_build(torch, "torch==2.2.0+cpu \\\n    --hash=sha256:bb\n")
    assert once == torch.replace("    --hash=sha256:aa", "    --hash=sha256:bb \\\n    --hash=sha256:aa")
    assert make_locks.allow_cpu_build(once, "torch==2.2.0+cpu \\\n    --hash=sha256:bb\n") == once


# --- the package


def test_what_the_package_asks_for_is_what_is_locked() -> None:
    asked = {canonicalize_name(Requirement(text).name): Requirement(text) for text in PROJECT["dependencies"]}
    direct = read_requirements(CPU / "requirements.in")
    assert set(asked) == set(direct)
    outside = {name: str(asked[name]) for name in asked if not asked[name].specifier.contains(pinned(direct[name]))}
    assert outside == {}
    unbounded = [name for name, requirement in asked.items() if "<" not in str(requirement.specifier)]
    assert unbounded == []


def imported_packages(folder: Path) -> set[str]:
    """The top-level names that any module of `folder` imports, at its top or inside a function."""
    names: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - {"tunebook"}


def test_what_src_imports_is_what_the_package_asks_for() -> None:
    names = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    importable = {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in names}
    assert imported_packages(ROOT / "src") == importable


def test_the_version_is_said_once_and_the_same() -> None:
    import tunebook

    assert tunebook.__version__ == PROJECT["version"]


def is_shipped(path: Path) -> bool:
    """Whether a path is a file of the project and not what Python or a tool left beside it."""
    parts = path.relative_to(ROOT).parts
    return path.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in parts)


def test_the_wheel_carries_the_book(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("hydra_configs", "recipes"):
        shipped = {path for path in (ROOT / folder).rglob("*") if is_shipped(path)}
        assert {f"tunebook/_book/{path.relative_to(ROOT)}" for path in shipped} <= names
    sources = {path for path in (ROOT / "src").rglob("*") if is_shipped(path)}
    assert {str(path.relative_to(ROOT / "src")) for path in sources} <= names
    assert "tunebook-0.1.0.dist-info/licenses/LICENSE" in names
    assert [name for name in names if "__pycache__" in name] == []


# --- the Makefile


def test_help_lists_every_target_once_and_is_the_default() -> None:
    shown = make("--no-print-directory")
    assert shown.returncode == 0
    assert shown.stdout == make("--no-print-directory", "help").stdout
    listed = re.findall(r"^  ([a-z-]+) +\S", shown.stdout, flags=re.MULTILINE)
    assert listed == makefile_targets()
    assert {"train", "data", "eval", "sweep", "report", "list", "explain", "check", "test-system"} <= set(listed)


def test_every_target_is_phony() -> None:
    phony = re.search(r"^\.PHONY:((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert phony is not None
    assert sorted(phony[1].replace("\\", " ").split()) == sorted(makefile_targets())


def test_arguments_reach_the_command_as_they_were_typed(tmp_path: Path) -> None:
    """Brackets, commas, quoted blanks and dollars: neither make nor the shell may change them."""
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    for name in ("run", "dev"):
        ready = tmp_path / ".venv" / f".ready-{name}"
        ready.parent.mkdir(exist_ok=True)
        ready.touch()
    for lock in [*LOCKS, "setup_venv.sh"]:
        path = tmp_path / "docker" / "cpu" / lock
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (0, 0))
    (tmp_path / "pyproject.toml").touch()
    os.utime(tmp_path / "pyproject.toml", (0, 0))
    command = tmp_path / ".venv" / "bin" / "tunebook"
    command.parent.mkdir()
    command.write_text("#!/bin/sh\nprintf '<%s>\\n' \"$@\"\n")
    command.chmod(0o755)
    arguments = "optimizer.learning_rate=1e-5,2e-5 'a.b=[1,2]' 'm=x y' 'path=${oc.env:HOME}'"
    said = make("--silent", "train", "RECIPE=some_recipe", f"ARGS={arguments}", folder=tmp_path).stdout.splitlines()
    assert said == [
        "<train>", "<some_recipe>", "<optimizer.learning_rate=1e-5,2e-5>", "<a.b=[1,2]>", "<m=x y>",
        "<path=${oc.env:HOME}>",
    ]  # fmt: skip


# --- setting up


def run_setup(folder: Path, python: str) -> subprocess.CompletedProcess[str]:
    """Run the set-up script in an empty folder with another Python."""
    return subprocess.run(
        [str(CPU / "setup_venv.sh"), "run"], cwd=folder, env={**os.environ, "PYTHON": python},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def fake_python(folder: Path, script: str) -> str:
    """An executable that stands in for a machine's Python."""
    path = folder / "fake-python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_setup_names_what_to_install_where_there_is_no_python(tmp_path: Path) -> None:
    done = run_setup(tmp_path, "no-such-python")
    assert done.returncode == 1
    assert "No 'no-such-python' here: Tunebook needs Python 3.11 or newer." in done.stderr
    assert "apt install python3 python3-venv" in done.stderr


def test_setup_refuses_an_old_python(tmp_path: Path) -> None:
    old = fake_python(tmp_path, 'if [ "$1" = --version ]; then echo Python 3.9.2; else exit 1; fi')
    done = run_setup(tmp_path, old)
    assert done.returncode == 1
    assert "is Python 3.9.2: Tunebook needs Python 3.11 or newer" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_setup_without_ensurepip_names_the_package_and_leaves_no_folder(tmp_path: Path) -> None:
    """Debian's Python without python3-venv makes .venv/bin/python and only then says that it cannot go on."""
    fails = "mkdir -p .venv/bin && ln -s /bin/true .venv/bin/python3 && echo 'ensurepip is not available' && exit 1"
    half = fake_python(tmp_path, f'case "$1" in -m) {fails} ;; --version) echo Python 3.11.2 ;; esac')
    done = run_setup(tmp_path, half)
    assert done.returncode == 1
    assert "ensurepip is not available" in done.stderr
    assert "apt install python3-venv" in done.stderr
    assert not (tmp_path / ".venv").exists()
    assert not (tmp_path / ".venv.log").exists()
