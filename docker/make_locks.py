"""Write the lock files of the CPU environment again from their `.in` files; `make lock` runs this.

Each lock names every package with the hashes of all its files, so one lock serves every Python, processor and
registry, and no registry's address is in it. What is already locked stays as it is unless an `.in` file says otherwise;
`--upgrade` takes the newest of everything that is not pinned there.

torch needs two things that the resolver cannot know. Registries carry its CUDA build, whose libraries (several GB) must
not be installed beside a CPU build, so they go to a lock of their own. And a CPU build of the same version is allowed
in its place: its hashes come from `requirements-torch-cpu.lock`, which is written by hand.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / ".cache" / "locks"  # a virtual environment of its own, so the resolver never meets what it resolves
RESOLVER = "uv==0.13.8"
OLDEST_PYTHON = "3.11"
CUDA_PACKAGE = re.compile(r"(nvidia-(?!ml-py)|cuda-|triton$)")  # nvidia-ml-py only talks to the driver

Blocks = dict[str, str]  # package name -> its pin, hashes and who wants it, as text


def split_blocks(lock_text: str) -> Blocks:
    """The lock's text by package; a block starts at an unindented line that is not a comment."""
    blocks: Blocks = {}
    name = ""
    for line in lock_text.splitlines(keepends=True):
        if line.strip() and not line.startswith(("#", " ")):
            name = re.split(r"[=\s\[;]", line, maxsplit=1)[0].lower()
            blocks[name] = ""
        if name:
            blocks[name] += line
    return blocks


def pinned_version(block: str) -> str:
    """The version a block pins."""
    return re.split(r"[\s;]", block.split("==", 1)[1], maxsplit=1)[0]


def allow_cpu_build(torch: str, cpu_build: str) -> str:
    """torch's block with the hashes of its CPU build added. Raises: SystemExit where the two versions differ."""
    version, cpu_version = pinned_version(torch), pinned_version(cpu_build)
    if cpu_version != f"{version}+cpu":
        raise SystemExit(
            f"requirements-torch-cpu.lock pins torch {cpu_version} but requirements.in pins {version}: the set-up "
            f"would install the wrong one; write torch=={version}+cpu and its wheels' hashes there"
        )
    pin, rest = torch.split("\n", 1)
    added = [f"    --hash={value} \\" for value in re.findall(r"--hash=(sha256:\w+)", cpu_build) if value not in rest]
    return "\n".join([pin, *added, rest])


def resolve(requirements: Path, known: list[Path], constraints: list[Path], upgrade: bool) -> Blocks:
    """Resolve one `.in` file for every platform; versions in the `known` locks are kept where they still fit."""
    output = TOOLS / f"{requirements.stem}.lock"
    output.write_text("".join(path.read_text() for path in known if path.exists()))
    command = [
        str(TOOLS / "bin" / "uv"), "pip", "compile", "--quiet", "--universal", "--fork-strategy=fewest",
        f"--python-version={OLDEST_PYTHON}", "--generate-hashes", "--no-header", "--no-emit-index-url",
        "--no-emit-find-links", str(requirements.relative_to(ROOT)), "--output-file", str(output),
    ]  # fmt: skip
    command += [f"--constraint={path.relative_to(ROOT)}" for path in constraints]
    command += ["--upgrade"] if upgrade else []
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return split_blocks(output.read_text())


def write(path: Path, purpose: str, blocks: Blocks) -> None:
    """Write one lock, sorted as the resolver sorts it, and say so."""
    path.write_text(f"# {purpose}\n# Written by `make lock`; edit the .in file instead.\n" + "".join(blocks.values()))
    print(f"{path.relative_to(ROOT)}: {len(blocks)} packages")


def make_cpu_locks(folder: Path, upgrade: bool) -> None:
    """The four locks of one folder: what runs, torch's CUDA libraries, what builds, what checks."""
    run, cuda = folder / "requirements.lock", folder / "requirements-cuda.lock"
    every = resolve(folder / "requirements.in", [run, cuda], [], upgrade)
    cpu_build = split_blocks((folder / "requirements-torch-cpu.lock").read_text())["torch"]
    every["torch"] = allow_cpu_build(every["torch"], cpu_build)
    needed = {name: block for name, block in every.items() if not CUDA_PACKAGE.match(name)}
    write(run, "What a run needs.", needed)
    libraries = {name: block for name, block in every.items() if name not in needed}
    write(cuda, "What torch needs besides where the registry's build of it is the CUDA build.", libraries)
    build, dev = folder / "requirements-build.lock", folder / "requirements-dev.lock"
    # Installed first and alone, so it repeats setuptools and packaging, at the versions of requirements.lock.
    write(build, "What builds packages.", resolve(folder / "requirements-build.in", [build], [run], upgrade))
    tools = resolve(folder / "requirements-dev.in", [dev], [run, build], upgrade)
    write(dev, "What `make check` needs besides.", {name: tools[name] for name in tools if name not in every})


def main() -> int:
    """Make the resolver's environment where it is missing, then the locks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--upgrade", action="store_true", help="take the newest of everything the .in files leave open")
    arguments = parser.parse_args()
    if not (TOOLS / "bin" / "uv").exists():
        venv.create(TOOLS, with_pip=True, clear=True)
    subprocess.run([str(TOOLS / "bin" / "python"), "-m", "pip", "install", "--quiet", RESOLVER], check=True)
    make_cpu_locks(ROOT / "docker" / "cpu", arguments.upgrade)
    return 0


if __name__ == "__main__":
    sys.exit(main())
