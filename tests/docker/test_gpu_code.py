"""docker/gpu_code.py, on handmade fat binaries."""

from __future__ import annotations

import importlib.util
import struct
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCKER = Path(__file__).resolve().parents[2] / "docker"
SPEC = importlib.util.spec_from_file_location("gpu_code", DOCKER / "gpu_code.py")
gpu_code = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(gpu_code)

PTX, CODE, LINKER_CODE = 1, 2, 8
ZSTD, ONLY_THIS, FAMILY = 0x8011, 0x100011, 0x200011
VOLTA = {"COMPUTE_CAPABILITIES": "7.0 7.5", "CUDA": "12.8"}
LIBRARIES = (
    "libtorch_cuda.so", "libcublas.so.12", "libcublasLt.so.12", "libcudnn_ops.so.9", "libnccl.so.2",
    "libbitsandbytes_cuda128.so",
)  # fmt: skip


def container(*entries: tuple[int, int] | tuple[int, int, int]) -> bytes:
    """A fat binary as nvcc writes it, with entries of a kind, an architecture and flags; the code is left blank."""
    body = b""
    for kind, architecture, *flags in entries:
        body += struct.pack("<HHIQIIIIQQ16x", kind, 0x101, 64, 16, 0, 0, 0, architecture, 0, *flags or [0x11])
        body += bytes(16)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def elf(sections: dict[bytes, bytes]) -> bytes:
    """An ELF file of 64 bits with these sections."""
    names = b"\0" + b"".join(name + b"\0" for name in sections)
    headers, content = b"", b""
    for name, data in {**sections, b"": names}.items():
        at = names.index(name + b"\0")
        headers += struct.pack("<I20xQQ24x", at, 64 + len(content), len(data))
        content += data
    numbers = struct.pack("<HHH", 64, len(sections) + 1, len(sections))
    return (
        b"\x7fELF".ljust(0x28, b"\0") + struct.pack("<Q", 64 + len(content)) + bytes(10) + numbers + content + headers
    )


# --- one library


def test_the_architectures_of_a_library_are_counted(tmp_path: Path) -> None:
    library = tmp_path / "kernels.so"
    first = container((CODE, 70), (CODE, 80, ZSTD), (PTX, 120, ZSTD))
    second = container((CODE, 70), (CODE, 90, ONLY_THIS), (CODE, 100, FAMILY), (LINKER_CODE, 50))
    library.write_bytes(b"\x7fELF" + bytes(100) + first + bytes(33) + second)
    assert gpu_code.gpu_code(library) == {"sm_70": 2, "sm_80": 1, "compute_120": 1, "sm_90a": 1, "sm_100f": 1}


def test_relocatable_objects_do_not_count(tmp_path: Path) -> None:
    library = tmp_path / "kernels.so"
    objects, linked = container((CODE, 70), (PTX, 70)), container((CODE, 80))
    library.write_bytes(elf({b"__nv_relfatbin": objects, b".nv_fatbin": linked}))
    assert gpu_code.gpu_code(library) == {"sm_80": 1}
    library.write_bytes(elf({b".text": objects, b".nv_fatbin": linked}))
    assert gpu_code.gpu_code(library) == {"sm_70": 1, "compute_70": 1, "sm_80": 1}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        bytes(64),
        struct.pack("<I", 0xBA55ED50),  # the file ends after it
        struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 1 << 60) + bytes(100),  # longer than the file
        struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 80) + b"\xff" * 100,  # machine code of a compiler
        container((CODE, 90))[:60] + b"\xff" * 200,
        b"\x7fELF" + b"\xff" * 100,
    ],
)
def test_what_only_looks_like_a_fat_binary_is_ignored(tmp_path: Path, content: bytes) -> None:
    library = tmp_path / "kernels.so"
    library.write_bytes(content)
    assert set(gpu_code.gpu_code(library)) <= {"sm_90"}
    library.write_bytes(content + container((CODE, 70)))
    assert gpu_code.gpu_code(library)["sm_70"] == 1


# --- which code runs where


@pytest.mark.parametrize(
    ("name", "runs", "does_not_run"),
    [
        ("sm_70", ["7.0", "7.5"], ["6.0", "8.0", "9.0"]),
        ("sm_75", ["7.5"], ["7.0", "8.0"]),
        ("sm_80", ["8.0", "8.6", "8.9"], ["7.5", "9.0"]),
        ("sm_86", ["8.6", "8.9"], ["8.0"]),
        ("sm_72", ["7.2"], ["7.0", "7.5"]),
        ("sm_90a", ["9.0"], ["10.0"]),
        ("sm_100", ["10.0", "10.3"], ["12.0"]),
        ("sm_100a", ["10.0"], ["10.3"]),
        ("sm_100f", ["10.0", "10.3"], ["12.0"]),
        ("compute_70", ["7.0", "7.5", "8.0", "12.0"], ["6.1"]),
        ("compute_90a", ["9.0"], ["10.0"]),
        ("compute_100f", ["10.0", "10.3"], ["12.0"]),
        ("lto_70", [], ["7.0"]),
    ],
)
def test_the_gpus_that_code_runs_on(name: str, runs: list[str], does_not_run: list[str]) -> None:
    assert [gpu for gpu in runs + does_not_run if gpu_code.runs_on(name, gpu)] == runs


def test_machine_code_is_better_than_newer_ptx() -> None:
    names = {"sm_70": 1, "sm_75": 1, "sm_90": 1, "compute_52": 1, "compute_75": 1}
    assert gpu_code.best_code(names, "7.0") == "sm_70"
    assert gpu_code.best_code(names, "7.5") == "sm_75"
    assert gpu_code.best_code(names, "8.0") == "compute_75"
    assert gpu_code.best_code(names, "5.0") is None


# --- the libraries of an image


def install(folder: Path, **changed: bytes) -> None:
    for name in LIBRARIES:
        (folder / name).write_bytes(container((CODE, 70)))
    for name, content in changed.items():
        (folder / f"{name}.so.1").write_bytes(content)


def test_every_library_needs_code_for_every_gpu(tmp_path: Path) -> None:
    install(
        tmp_path, libold=container((CODE, 52), (PTX, 52)), libnew=container((CODE, 75), (PTX, 75)), libhost=bytes(9)
    )
    facts, problems = gpu_code.check_libraries(tmp_path, VOLTA)
    assert problems == ["libnew.so.1 has no code for 7.0; it has compute_75 sm_75"]
    assert facts["libtorch_cuda.so"] == {"7.0": "sm_70", "7.5": "sm_70"}
    assert facts["libnew.so.1"] == {"7.5": "sm_75"}
    assert gpu_code.ptx_only(facts) == ["libold.so.1"]
    assert "libhost.so.1" not in facts


def test_known_gaps_and_libraries_of_another_cuda_version_are_no_problem(tmp_path: Path) -> None:
    install(tmp_path, libcufftw=container((CODE, 52)))
    (tmp_path / "libbitsandbytes_cuda130.so").write_bytes(container((CODE, 75)))
    (tmp_path / "libother.so").symlink_to("libbitsandbytes_cuda130.so")
    facts, problems = gpu_code.check_libraries(tmp_path, VOLTA)
    assert (sorted(facts), problems) == (sorted(LIBRARIES), [])
    _, problems = gpu_code.check_libraries(tmp_path, VOLTA | {"CUDA": "13.0"})
    assert problems == ["libbitsandbytes_cuda130.so has no code for 7.0; it has sm_75"]


def test_a_folder_without_libraries_fails_except_on_a_cpu(tmp_path: Path) -> None:
    _, problems = gpu_code.check_libraries(tmp_path, VOLTA)
    assert len(problems) == 6
    assert f"no library libbitsandbytes_cuda128.so was found in {tmp_path}" in problems
    assert gpu_code.check_libraries(tmp_path, {"COMPUTE_CAPABILITIES": "", "CUDA": ""}) == ({}, [])


def test_the_command_prints_the_entries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(tmp_path, libhost=bytes(9))
    assert gpu_code.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (len(lines), lines[0]) == (6, f"{tmp_path}/libbitsandbytes_cuda128.so: sm_70=1")
    assert gpu_code.main([]) == 2


# --- Triton


def cubin(version: int, flags: int, machine: int = 190) -> bytes:
    """The header of a file of machine code."""
    head = b"\x7fELF\x02\x01\x01\x33" + bytes([version])
    return (head.ljust(0x12, b"\0") + struct.pack("<H", machine)).ljust(0x30, b"\0") + struct.pack("<I12x", flags)


@pytest.mark.parametrize(
    ("file", "architecture"),
    [  # flags as Triton 3.6.0 and 3.7.1 write them
        (cubin(7, 0x460546), 70),
        (cubin(7, 0x4B054B), 75),
        (cubin(7, 0x5A0D5A), 90),
        (cubin(8, 0x900640A), 100),
        (cubin(8, 0x9007802), 120),
        (cubin(7, 0x460546, machine=62), None),  # a program for x86-64
        (b"", None),
    ],
)
def test_the_architecture_of_machine_code_is_in_its_header(file: bytes, architecture: int | None) -> None:
    assert gpu_code.cubin_architecture(file) == architecture


def test_triton_must_compile_for_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"COMPUTE_CAPABILITIES": "7.0 7.5 9.0"}

    def compile_for(architecture: int) -> bytes:
        if architecture == 90:
            raise RuntimeError("ptxas fatal")
        return cubin(7, 0x460546)

    monkeypatch.setitem(sys.modules, "triton", fake_triton())
    monkeypatch.setattr(gpu_code, "_compile_with_triton", compile_for)
    assert gpu_code.triton_problems(settings) == [
        "Triton compiled for architecture 70 instead of 75",
        "Triton compiles nothing for 9.0: RuntimeError: ptxas fatal",
    ]


def test_without_triton_there_is_nothing_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert gpu_code.triton_problems({"COMPUTE_CAPABILITIES": "7.0"}) == []


def fake_triton() -> ModuleType:
    module = ModuleType("triton")
    module.__spec__ = importlib.util.spec_from_loader("triton", None)
    return module
