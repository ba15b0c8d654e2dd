"""Write the lock files again from their `.in` files, and each generation.env from the facts; `make lock` runs this.

Each lock names every package with the hashes of all its files and without the address of a registry, so one lock serves
every Python, processor and registry. Locked versions stay unless an `.in` file says otherwise; `--upgrade` takes the
newest version of everything that is not pinned there. `--check` writes nothing: it resolves every `.in` file again and
names the differences from its lock.

The generations share one set of versions: each is resolved under the versions of those before it, so only torch and its
CUDA libraries can differ. The resolver cannot know two facts about torch. Registries have its CUDA build, whose
libraries (several GB) must not be installed with a CPU build, so for the CPU they go to a lock of their own. And a CPU
build of the same version may replace it: its hashes come from `requirements-torch-cpu.lock`, which is written by hand.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))  # whatever Python runs this: the facts need the standard library alone

from tunebook.facts.generations import GENERATIONS, ImagePins, capability_text  # noqa: E402

DOCKER = ROOT / "docker"
TOOLS = ROOT / ".cache" / "locks"  # a virtual environment of its own, so the resolver never meets what it resolves
RESOLVER = "uv==0.13.8"
OLDEST_PYTHON = "3.11"
GPU_GENERATIONS = ("ampere", "hopper", "blackwell", "volta")  # in the order in which they are resolved
CUDA_PACKAGE = re.compile(r"(nvidia-(?!ml-py)|cuda-|triton$)")  # nvidia-ml-py only talks to the driver

Blocks = dict[str, str]  # package name -> its pin, hashes and who wants it, as text


class Lock(NamedTuple):
    """One lock file and what belongs in it."""

    path: Path
    source: Path  # the `.in` file
    purpose: str
    blocks: Blocks


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


def pin_line(block: str) -> str:
    """A block's first line without what continues it: name, version, and where it is wanted."""
    return block.split("\n", 1)[0].removesuffix("\\").strip()


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


def resolve(source: Path, known: list[Path], constraints: list[Path], upgrade: bool) -> Blocks:
    """Resolve one `.in` file for every platform; versions in the `known` locks are kept where they still fit."""
    output = TOOLS / "resolved.lock"
    output.write_text("".join(path.read_text() for path in known if path.exists()))
    command = [
        str(TOOLS / "bin" / "uv"), "pip", "compile", "--quiet", "--universal", "--fork-strategy=fewest",
        f"--python-version={OLDEST_PYTHON}", "--generate-hashes", "--no-header", "--no-emit-index-url",
        "--no-emit-find-links", str(source.relative_to(ROOT)), "--output-file", str(output),
    ]  # fmt: skip
    command += [f"--constraint={path.relative_to(ROOT)}" for path in constraints]
    command += ["--upgrade"] if upgrade else []
    environment = {**os.environ, "DS_BUILD_OPS": "0"}  # DeepSpeed is asked what it needs without its operators
    if subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=False).returncode != 0:
        raise SystemExit(f"{source.relative_to(ROOT)} cannot be resolved (above): change the pins that disagree there")
    text = re.sub(r"^ +#   -c .*\n| +# via -c .*\n", "", output.read_text(), flags=re.MULTILINE)
    return split_blocks(re.sub(r"docker/\w+/\.\./", "docker/", text))


def cpu_locks(upgrade: bool) -> Iterator[Lock]:
    """What a run on a CPU needs, and torch's CUDA libraries apart from it."""
    folder = DOCKER / "cpu"
    run, cuda, source = folder / "requirements.lock", folder / "requirements-cuda.lock", folder / "requirements.in"
    every = resolve(source, [run, cuda], [], upgrade)
    cpu_build = split_blocks((folder / "requirements-torch-cpu.lock").read_text())["torch"]
    every["torch"] = allow_cpu_build(every["torch"], cpu_build)
    needed = {name: block for name, block in every.items() if not CUDA_PACKAGE.match(name)}
    yield Lock(path=run, source=source, purpose="What a run needs.", blocks=needed)
    libraries = {name: block for name, block in every.items() if name not in needed}
    purpose = "What torch needs besides where the registry's build of it is the CUDA build."
    yield Lock(path=cuda, source=source, purpose=purpose, blocks=libraries)


def shared_versions(generation: str) -> Path:
    """The pins of the locks that come before a generation's, less those that belong to another torch, as a file."""
    torch = re.search(r"^torch==(\S+)", (DOCKER / generation / "requirements.in").read_text(), flags=re.MULTILINE)
    if torch is None:
        raise SystemExit(f"docker/{generation}/requirements.in pins no torch: add a line torch==VERSION")
    pins: dict[str, str] = {}
    for earlier in ("cpu", *GPU_GENERATIONS[: GPU_GENERATIONS.index(generation)]):
        folder = DOCKER / earlier
        blocks = split_blocks("".join(path.read_text() for path in sorted(folder.glob("requirements*.lock"))))
        own = {name for name in blocks if name == "torch" or CUDA_PACKAGE.match(name)}
        has_same_torch = pinned_version(blocks["torch"]).removesuffix("+cpu") == torch[1]
        for name in blocks:
            if name not in own or has_same_torch:
                pins[name] = pin_line(blocks[name]).replace("+cpu", "")
    path = TOOLS / f"{generation}.constraints"
    path.write_text("\n".join(pins.values()) + "\n")
    return path


def gpu_locks(generation: str, upgrade: bool) -> Iterator[Lock]:
    """What a run on one GPU generation needs, and flash-attn apart from it where the generation has it."""
    run, source = DOCKER / generation / "requirements.lock", DOCKER / generation / "requirements.in"
    blocks = resolve(source, [run], [shared_versions(generation)], upgrade)
    yield Lock(path=run, source=source, purpose=f"What a run on {generation} needs.", blocks=blocks)
    attention, source = run.with_name("requirements-attention.lock"), source.with_name("requirements-attention.in")
    if source.exists():
        built = resolve(source, [attention], [run], upgrade)
        alone = {name: block for name, block in built.items() if name not in blocks}
        yield Lock(path=attention, source=source, purpose="What the image compiles.", blocks=alone)


def tool_locks(upgrade: bool) -> Iterator[Lock]:
    """What builds packages, checks the project, runs Ray, compiles for GPUs, builds the documentation site."""
    run = DOCKER / "cpu" / "requirements.lock"
    tools = ("build", "dev", "ray", "nvcc", "docs")
    build, dev, ray, nvcc, docs = (DOCKER / f"requirements-{name}.lock" for name in tools)
    # Installed first and alone, so it repeats setuptools and packaging, at the versions of requirements.lock.
    source = build.with_suffix(".in")
    blocks = resolve(source, [build], [run], upgrade)
    yield Lock(path=build, source=source, purpose="What builds packages.", blocks=blocks)
    there = split_blocks(run.read_text())
    for besides, purpose in ((dev, "What `make check` needs besides."), (ray, "What launcher=ray needs besides.")):
        source = besides.with_suffix(".in")
        every = resolve(source, [besides], [run, build], upgrade)
        blocks = {name: block for name, block in every.items() if name not in there}
        yield Lock(path=besides, source=source, purpose=purpose, blocks=blocks)
    source = nvcc.with_suffix(".in")
    blocks = resolve(source, [nvcc], [DOCKER / "ampere" / "requirements.lock"], upgrade)
    yield Lock(path=nvcc, source=source, purpose="What compiles for GPUs.", blocks=blocks)
    # Installed into an environment of its own, so it repeats packages of requirements.lock, at the same versions.
    source = docs.with_suffix(".in")
    blocks = resolve(source, [docs], [run], upgrade)
    yield Lock(path=docs, source=source, purpose="What `make docs` needs.", blocks=blocks)


def every_lock(upgrade: bool) -> Iterator[Lock]:
    """All locks; each is made under the versions that the ones before it have on disk."""
    yield from cpu_locks(upgrade)
    for generation in GPU_GENERATIONS:
        yield from gpu_locks(generation, upgrade)
    yield from tool_locks(upgrade)


def generation_settings() -> Iterator[tuple[Path, str]]:
    """Each generation.env with its text: one KEY=VALUE a line, for bash, Python and build arguments."""
    images: dict[str, ImagePins] = {facts.image.name: facts.image for facts in GENERATIONS.values()}
    for image in images.values():
        served = {generation.name: facts for generation, facts in GENERATIONS.items() if facts.image == image}
        capabilities = sorted(one for facts in served.values() for one in facts.compute_capabilities)
        settings = {
            "GENERATION": image.name,
            "SERVES": " ".join(served),
            "GPU_MODELS": image.gpu_models,
            "TORCH": image.torch,
            "CUDA": image.cuda or "",
            "MIN_DRIVER": str(image.min_driver or ""),
            "OLDER_DRIVER_IMAGE": image.older_driver_image or "",
            "COMPUTE_CAPABILITIES": " ".join(map(capability_text, capabilities)),
            "TORCH_CUDA_ARCH_LIST": " ".join(image.torch_architectures),
            "ATTENTION": image.attention,
            "FLASH_ATTN_CUDA_ARCHS": ";".join(image.flash_attn_architectures),
            "BUILD_DISK_GIB": str(image.build_disk_gib),
        }
        lines = [f"{key}={shlex.quote(value) if value else ''}\n" for key, value in settings.items()]
        note = "# Written by `make lock`; edit src/tunebook/facts/generations.py instead.\n"
        yield DOCKER / image.name / "generation.env", note + "".join(lines)


def differences(lock: Lock) -> list[str]:
    """Where the file on disk is not what its `.in` file resolves to, one line per package."""
    name, source = lock.path.relative_to(ROOT), lock.source.relative_to(ROOT)
    on_disk = split_blocks(lock.path.read_text()) if lock.path.exists() else {}
    found = []
    for package in sorted(on_disk.keys() | lock.blocks.keys()):
        has = pin_line(on_disk[package]) if package in on_disk else "nothing"
        wants = pin_line(lock.blocks[package]) if package in lock.blocks else "nothing"
        if has != wants:
            found.append(f"{name}: {package}: the lock has {has}, but {source} resolves to {wants}")
    return found


def write(lock: Lock) -> None:
    """Write one lock, sorted as the resolver sorts it, and say so."""
    text = "".join(lock.blocks.values())
    lock.path.write_text(f"# {lock.purpose}\n# Written by `make lock`; edit the .in file instead.\n{text}")
    print(f"{lock.path.relative_to(ROOT)}: {len(lock.blocks)} packages")


def prepare_tools() -> None:
    """Make the resolver's environment if it is missing. Raises: SystemExit if pip cannot install the resolver."""
    if not (TOOLS / "bin" / "uv").exists():
        venv.create(TOOLS.resolve(), with_pip=True, clear=True)  # it refuses a link
    install = [str(TOOLS / "bin" / "python"), "-m", "pip", "install", "--quiet", RESOLVER]
    if subprocess.run(install, check=False).returncode != 0:
        raise SystemExit(f"{RESOLVER} cannot be installed (above). See which package index pip asks: pip config list")


def main() -> int:
    """Write or check the locks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--upgrade", action="store_true", help="take the newest of everything the .in files leave open")
    mode.add_argument("--check", action="store_true", help="change nothing; fail where a lock is not what its .in says")
    arguments = parser.parse_args()
    prepare_tools()
    found: list[str] = []
    for path, text in generation_settings():
        if not arguments.check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            found.append(f"{path.relative_to(ROOT)} is not what src/tunebook/facts/generations.py says")
    for lock in every_lock(arguments.upgrade):
        if arguments.check:
            found += differences(lock)
        else:
            write(lock)
    if found:
        print("\n".join([*found, "files under docker/ do not match their sources: make lock"]), file=sys.stderr)
    elif arguments.check:
        print("every lock and every generation.env matches its source")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
