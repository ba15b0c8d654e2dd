"""Write the lock files again from their `.in` files, and each generation.env from the facts; `make lock` runs this.

Each lock names every package with the hashes of all its files and without the address of a registry, so one lock serves
every Python, processor and registry. Locked versions stay unless an `.in` file says otherwise; `--upgrade` takes the
newest version of everything that is not pinned there. A second run changes nothing: `git diff docker` shows a lock that
was not what its `.in` file resolves to.

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


def write_cpu_locks(upgrade: bool) -> None:
    """What a run on a CPU needs, and torch's CUDA libraries apart from it."""
    folder = DOCKER / "cpu"
    run, cuda = folder / "requirements.lock", folder / "requirements-cuda.lock"
    every = resolve(folder / "requirements.in", [run, cuda], [], upgrade)
    cpu_build = split_blocks((folder / "requirements-torch-cpu.lock").read_text())["torch"]
    every["torch"] = allow_cpu_build(every["torch"], cpu_build)
    write(run, "What a run needs.", {name: block for name, block in every.items() if not CUDA_PACKAGE.match(name)})
    libraries = {name: block for name, block in every.items() if CUDA_PACKAGE.match(name)}
    write(cuda, "What torch needs besides where the registry's build of it is the CUDA build.", libraries)


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


def write_gpu_locks(generation: str, upgrade: bool) -> None:
    """What a run on one GPU generation needs, and flash-attn apart from it where the generation has it."""
    run = DOCKER / generation / "requirements.lock"
    blocks = resolve(run.with_suffix(".in"), [run], [shared_versions(generation)], upgrade)
    write(run, f"What a run on {generation} needs.", blocks)
    attention = run.with_name("requirements-attention.lock")
    if attention.with_suffix(".in").exists():
        built = resolve(attention.with_suffix(".in"), [attention], [run], upgrade)
        write(attention, "What the image compiles.", {name: built[name] for name in built if name not in blocks})


def write_tool_locks(upgrade: bool) -> None:
    """What builds packages, checks the project, runs Ray, compiles for GPUs, builds the documentation site."""
    run = DOCKER / "cpu" / "requirements.lock"
    tools = ("build", "dev", "ray", "nvcc", "docs")
    build, dev, ray, nvcc, docs = (DOCKER / f"requirements-{name}.lock" for name in tools)
    # Installed first and alone, so it repeats setuptools and packaging, at the versions of requirements.lock.
    write(build, "What builds packages.", resolve(build.with_suffix(".in"), [build], [run], upgrade))
    there = split_blocks(run.read_text())
    for besides, purpose in ((dev, "What `make check` needs besides."), (ray, "What launcher=ray needs besides.")):
        every = resolve(besides.with_suffix(".in"), [besides], [run, build], upgrade)
        write(besides, purpose, {name: block for name, block in every.items() if name not in there})
    ampere = DOCKER / "ampere" / "requirements.lock"
    write(nvcc, "What compiles for GPUs.", resolve(nvcc.with_suffix(".in"), [nvcc], [ampere], upgrade))
    # Installed into an environment of its own, so it repeats packages of requirements.lock, at the same versions.
    write(docs, "What `make docs` needs.", resolve(docs.with_suffix(".in"), [docs], [run], upgrade))


def generation_settings() -> Iterator[tuple[Path, str]]:
    """Each generation.env with its text: one KEY=VALUE a line, for bash, Python and build arguments."""
    images: dict[str, ImagePins] = {facts.image.name: facts.image for facts in GENERATIONS.values()}
    for image in images.values():
        served = {generation.name: facts for generation, facts in GENERATIONS.items() if facts.image == image}
        capabilities = sorted(one for facts in served.values() for one in facts.compute_capabilities)
        settings = {
            "GENERATION": image.name,
            "SERVES": " ".join(served),
            "TORCH": image.torch,
            "CUDA": image.cuda or "",
            "MIN_DRIVER": str(image.min_driver or ""),
            "OLDER_DRIVER_IMAGE": image.older_driver_image or "",
            "COMPUTE_CAPABILITIES": " ".join(map(capability_text, capabilities)),
            "TORCH_CUDA_ARCH_LIST": " ".join(image.torch_architectures),
            "ATTENTION": image.attention,
            "FLASH_ATTN_CUDA_ARCHS": ";".join(image.flash_attn_architectures),
        }
        lines = [f"{key}={shlex.quote(value) if value else ''}\n" for key, value in settings.items()]
        note = "# Written by `make lock`; edit src/tunebook/facts/generations.py instead.\n"
        yield DOCKER / image.name / "generation.env", note + "".join(lines)


def write(path: Path, purpose: str, blocks: Blocks) -> None:
    """Write one lock, sorted as the resolver sorts it, and say so."""
    text = "".join(blocks.values())
    path.write_text(f"# {purpose}\n# Written by `make lock`; edit the .in file instead.\n{text}")
    print(f"{path.relative_to(ROOT)}: {len(blocks)} packages")


def main() -> None:
    """Write generation.env and the locks; each lock is made under the versions of the ones before it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--upgrade", action="store_true", help="take the newest of everything the .in files leave open")
    upgrade = parser.parse_args().upgrade
    if not (TOOLS / "bin" / "uv").exists():
        venv.create(TOOLS.resolve(), with_pip=True, clear=True)  # it refuses a link
    subprocess.run([str(TOOLS / "bin" / "python"), "-m", "pip", "install", "--quiet", RESOLVER], check=True)
    for path, text in generation_settings():
        path.write_text(text)
    write_cpu_locks(upgrade)
    for generation in GPU_GENERATIONS:
        write_gpu_locks(generation, upgrade)
    write_tool_locks(upgrade)


if __name__ == "__main__":
    main()
