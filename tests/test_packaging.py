"""The Makefile, the package's metadata and the wheel agree with each other, with the locks and with the code."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
DOCKER = ROOT / "docker"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = [text for texts in PROJECT["optional-dependencies"].values() for text in texts]
# What a package is imported as, where that is not its own name.
IMPORT_NAMES = {
    "pillow": "PIL",
    "hydra-core": "hydra",
    "nvidia-ml-py": "pynvml",
    "pyyaml": "yaml",
}


def read_pins(path: Path) -> dict[str, str]:
    """The canonical names and versions in an `.in` file, including its `-r` files."""
    found: dict[str, str] = {}
    for line in path.read_text().splitlines():
        if line.startswith("-r "):
            found |= read_pins(path.parent / line.split()[1])
        elif re.match(r"\w", line):
            requirement = Requirement(re.split(r"\s+#", line)[0])
            found[canonicalize_name(requirement.name)] = str(requirement.specifier).removeprefix("==")
    return found


def by_name(requirements: list[str]) -> dict[str, Requirement]:
    """Requirements by canonical name."""
    return {canonicalize_name(Requirement(text).name): Requirement(text) for text in requirements}


def make(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run make without the variables of an outer make."""
    environment = {name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MAKELEVEL", "ARGS"}}
    return subprocess.run(
        ["make", *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def makefile_targets() -> list[str]:
    """The targets with a plain name, in the Makefile's order."""
    return re.findall(r"^([a-z][a-z-]*):(?!=)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


# --- the package


def test_what_the_package_asks_for_is_what_is_pinned() -> None:
    """The dependencies are those of the CPU's `.in` file and DeepSpeed; the extras are those of all other files."""
    asked, chosen = by_name(PROJECT["dependencies"]), by_name(EXTRAS)
    on_cpu = read_pins(DOCKER / "cpu" / "requirements.in")
    everywhere: dict[str, set[str]] = {}
    for path in (*DOCKER.glob("*/requirements*.in"), DOCKER / "requirements-ray.in"):
        for name, version in read_pins(path).items():
            everywhere.setdefault(name, set()).add(version)
    assert set(asked) == set(on_cpu) - {"deepspeed"}
    assert set(chosen) - {"wandb"} == set(everywhere) - set(asked)
    allowed = asked | chosen
    outside = {
        name: (str(allowed[name]), pins)
        for name, pins in everywhere.items()
        if not all(allowed[name].specifier.contains(pin, prereleases=True) for pin in pins)
    }
    assert outside == {}
    assert [name for name, requirement in allowed.items() if "<" not in str(requirement.specifier)] == []


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


def import_names(requirements: list[str]) -> set[str]:
    """The import names of packages."""
    return {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in by_name(requirements)}


def test_what_src_imports_is_what_the_package_asks_for() -> None:
    """Every dependency is imported, and every import is in a dependency or an extra."""
    imported = imported_packages(ROOT / "src")
    assert import_names(PROJECT["dependencies"]) - imported == set()
    assert imported - import_names(PROJECT["dependencies"]) - import_names(EXTRAS) == set()


def test_version_is_defined_once() -> None:
    import tunebook

    assert tunebook.__version__ == PROJECT["version"]


def is_shipped(path: Path) -> bool:
    """True for a file of the project, False for caches of Python and tools."""
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
