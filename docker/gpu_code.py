"""Find the GPU code in an image's libraries, without a GPU: which of it runs on a generation's GPUs.

    gpu_code.py LIBRARY_OR_FOLDER...     prints the number of entries for each architecture

check_image.py uses this module while the image is built. Names are those of nvcc: `sm_70` is machine code, `compute_70`
is PTX, which the driver compiles.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import re
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path

_MAGIC = struct.pack("<I", 0xBA55ED50)
_CONTAINER = struct.Struct("<IHHQ")  # magic, version, header length, length of the rest
_ENTRY = struct.Struct("<HHIQ12xI8xQ")  # kind, version, header length, code length, architecture, flags
_ENTRY_VERSION = 0x101
_KINDS = {1: "compute", 2: "sm"}  # others are intermediate code for NVIDIA's linker, which runs nowhere by itself
_SUFFIXES = {0x100000: "a", 0x200000: "f"}  # flags: for this architecture only, for its family
_ELF_CUDA = 190  # e_machine

# The systems on a chip: their machine code runs on no other GPU (CUDA C++ Programming Guide, Binary Compatibility).
_TEGRA = {(5, 3), (6, 2), (7, 2), (8, 7), (10, 1), (11, 0)}

# Every image with GPUs must have these, so that a check that finds no library fails.
_REQUIRED = ("libtorch_cuda.so", "libcublas.so.*", "libcublasLt.so.*", "libcudnn_ops.so.*", "libnccl.so.*")
# Libraries that may lack code for the GPUs of an image, with the reason.
KNOWN_GAPS = {
    "libcufftw.so.*": "has no kernels; it passes FFTW calls on to libcufft",
    "_C_cutlass_90a.*": "torchao's fp8 kernels for 2:4 sparse weights, which exist only for 9.0; no run uses them",
    "_C_mxfp8.*": "torchao calls these kernels only on 10.0 and newer",
}


def gpu_code(library: Path) -> Counter[str]:
    """The number of entries for each architecture in the CUDA fat binaries that a library can load.

    A fat binary is a container with entries, whose headers name the architecture even where the code is compressed.
    The whole file is searched, because libcufft and libcusparse keep theirs outside the section for it. Relocatable
    objects are left out: the linked image next to them is what a program loads.
    Source: compared with `cuobjdump --list-elf` and `--list-ptx`. CUDA 12.8 (Triton 3.6.0) counts the same in
    libtorch_cuda of torch 2.10.0, libbitsandbytes_cuda128, libcudnn_adv, libcurand, libcusolver and libnvshmem_host; in
    libcublasLt and libnccl up to 9.0, because it does not know `f` and leaves out some of `a`. CUDA 13.1 (Triton 3.7.1)
    counts the same in libtorch_cuda of torch 2.13.0, libbitsandbytes_cuda130 and libcublas, but prints no `f`.
    """
    found: Counter[str] = Counter()
    if library.stat().st_size == 0:
        return found
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        relocatable = _section(data, b"__nv_relfatbin")
        start = data.find(_MAGIC)
        while start >= 0:
            end = _container_end(data, start)
            if end is not None and start not in relocatable:
                found.update(_entries(data, start, end))
            start = data.find(_MAGIC, end or start + len(_MAGIC))
    return found


def _container_end(data: mmap.mmap, start: int) -> int | None:
    """The end of the container at `start`; None if the bytes there only look like one, as in a compiler's code."""
    if start + _CONTAINER.size + _ENTRY.size > len(data):
        return None
    _, version, header, size = _CONTAINER.unpack_from(data, start)
    _, entry_version, *_ = _ENTRY.unpack_from(data, start + _CONTAINER.size)
    end: int = start + header + size
    is_container = (version, header, entry_version) == (1, _CONTAINER.size, _ENTRY_VERSION) and end <= len(data)
    return end if is_container else None


def _entries(data: mmap.mmap, start: int, end: int) -> Iterator[str]:
    """The names of a container's entries."""
    entry = start + _CONTAINER.size
    while entry + _ENTRY.size <= end:
        kind, _, header, code, architecture, flags = _ENTRY.unpack_from(data, entry)
        if kind in _KINDS:
            suffix = "".join(letter for bit, letter in _SUFFIXES.items() if flags & bit)
            yield f"{_KINDS[kind]}_{architecture}{suffix}"
        entry += max(header + code, 1)


def _section(data: mmap.mmap, name: bytes) -> range:
    """Where a section of an ELF file is; empty if there is none."""
    if data[:4] != b"\x7fELF" or len(data) < 64:
        return range(0)
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, number, names_index = struct.unpack_from("<HHH", data, 0x3A)
    if number == 0 or table + size * number > len(data):
        return range(0)
    headers = [struct.unpack_from("<I20xQQ", data, table + size * index) for index in range(number)]
    names = headers[names_index][1]
    for name_offset, offset, length in headers:
        at = names + name_offset
        if data[at : at + len(name) + 1] == name + b"\0":
            return range(offset, offset + length)
    return range(0)


def runs_on(name: str, capability: str) -> bool:
    """Whether code for an architecture runs on a GPU of a compute capability.

    Machine code runs on its major version from its minor version on, PTX on everything newer. With `a` both run only on
    that very capability, with `f` only in its family. Source: CUDA C++ Programming Guide, Compute Capabilities.
    """
    parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name)
    if parts is None:
        return False
    kind, suffix = parts[1], parts[4]
    code, gpu = (int(parts[2]), int(parts[3])), tuple(int(number) for number in capability.split("."))
    if suffix == "a" or (kind == "sm" and code in _TEGRA):
        return code == gpu
    if kind == "compute" and not suffix:
        return code <= gpu
    return code[0] == gpu[0] and code <= gpu


def best_code(names: Mapping[str, int], capability: str) -> str | None:
    """What a GPU uses of a library's code: the newest machine code that runs on it, else the newest PTX, else None."""
    running = [name for name in names if runs_on(name, capability)]
    return max(running, key=lambda name: (name.startswith("sm_"), int(re.sub(r"\D", "", name))), default=None)


def library_files(folder: Path) -> list[Path]:
    """The shared libraries below a folder, without links to them."""
    return sorted(file for file in folder.rglob("*.so*") if file.is_file() and not file.is_symlink())


def check_libraries(folder: Path, settings: Mapping[str, str]) -> tuple[dict[str, dict[str, str]], list[str]]:
    """The code that each library has for the GPUs of generation.env; the libraries that have none or are missing."""
    capabilities = settings["COMPUTE_CAPABILITIES"].split()
    if not capabilities:
        return {}, []
    # It has one library for each CUDA version, and loads that of torch's version.
    bitsandbytes = f"libbitsandbytes_cuda{settings['CUDA'].replace('.', '')}.so"
    missing = {*_REQUIRED, bitsandbytes}
    facts, problems = {}, []
    for file in library_files(folder):
        missing -= {pattern for pattern in missing if fnmatch(file.name, pattern)}
        if fnmatch(file.name, "libbitsandbytes_cuda*.so") and file.name != bitsandbytes:
            continue
        names = gpu_code(file)
        if not names or any(fnmatch(file.name, pattern) for pattern in KNOWN_GAPS):
            continue
        best = {capability: best_code(names, capability) for capability in capabilities}
        facts[str(file.relative_to(folder))] = {capability: code for capability, code in best.items() if code}
        if lacking := [capability for capability, code in best.items() if code is None]:
            has = " ".join(sorted(names))
            problems.append(f"{file.relative_to(folder)} has no code for {' '.join(lacking)}; it has {has}")
    return facts, problems + [f"no library {name} was found in {folder}" for name in sorted(missing)]


def ptx_only(facts: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The libraries that some GPU of the image can use only after the driver has compiled their PTX."""
    return [library for library, best in facts.items() if any(code.startswith("compute_") for code in best.values())]


def cubin_architecture(cubin: bytes) -> int | None:
    """The architecture that a file of machine code is for, such as 70; None if it is no such file.

    Source: compared with `nvdisasm` of CUDA 12.8. CUDA 13 and all code from 10.0 on use version 8 of the format.
    """
    if len(cubin) < 64 or cubin[:4] != b"\x7fELF" or struct.unpack_from("<H", cubin, 0x12) != (_ELF_CUDA,):
        return None
    (flags,) = struct.unpack_from("<I", cubin, 0x30)
    architecture: int = flags & 0xFF if cubin[8] < 8 else flags >> 8 & 0xFF
    return architecture


def triton_problems(settings: Mapping[str, str]) -> list[str]:
    """Whether the installed Triton compiles a matrix product to machine code for every GPU of generation.env."""
    if importlib.util.find_spec("triton") is None:
        return []
    problems = []
    for capability in settings["COMPUTE_CAPABILITIES"].split():
        expected = int(capability.replace(".", ""))
        try:
            found = cubin_architecture(_compile_with_triton(expected))
        except Exception as error:  # of any kind: kernels cannot be compiled
            problems.append(f"Triton compiles nothing for {capability}: {type(error).__name__}: {error}")
            continue
        if found != expected:
            problems.append(f"Triton compiled for architecture {found} instead of {expected}")
    return problems


def _compile_with_triton(architecture: int) -> bytes:
    """The machine code of a small matrix product."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def product(left: tl.tensor, right: tl.tensor, out: tl.tensor, size: tl.constexpr) -> None:
        at = tl.arange(0, size)[:, None] * size + tl.arange(0, size)[None, :]
        tl.store(out + at, tl.dot(tl.load(left + at), tl.load(right + at)))

    types = {"left": "*fp16", "right": "*fp16", "out": "*fp32", "size": "constexpr"}
    source = ASTSource(fn=triton.jit(product), signature=types, constexprs={"size": 32})
    before = os.environ.get("TRITON_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:  # nothing of this stays in the image
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
        finally:
            if before is None:
                del os.environ["TRITON_CACHE_DIR"]
            else:
                os.environ["TRITON_CACHE_DIR"] = before
    return bytes(compiled.asm["cubin"])


def main(arguments: list[str]) -> int:
    """Print the entries of the libraries."""
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    for path in map(Path, arguments):
        for file in library_files(path) if path.is_dir() else [path]:
            if names := gpu_code(file):
                print(f"{file}:", " ".join(f"{name}={number}" for name, number in sorted(names.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
