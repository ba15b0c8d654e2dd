"""Detection against NVML's functions replaced at the boundary, and the real call on whatever machine this is."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pynvml
import pytest

from tunebook.config.choices import Generation
from tunebook.hardware import detect
from tunebook.hardware.detect import detect_machine

GIB = 2**30


@dataclass
class Card:
    name: str
    capability: tuple[int, int] = (9, 0)
    gib: float = 140.0
    uuid: str = "GPU-0"
    mig: bool | None = None  # None: a model that does not know MIG
    slices: list[Card] = field(default_factory=list)
    is_lost: bool = False


@pytest.fixture
def nvml(monkeypatch):
    """`nvml(card, ...)` makes NVML answer for these cards."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(*cards: Card, driver: str = "580.65.06"):
        def by_index(index):
            if cards[index].is_lost:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
            return cards[index]

        def mig_mode(card):
            if card.mig is None:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return [int(card.mig), int(card.mig)]

        def mig_slice(card, place):
            if place >= len(card.slices):
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
            return card.slices[place]

        answers = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: driver,
            "nvmlDeviceGetCount": lambda: len(cards),
            "nvmlDeviceGetHandleByIndex": by_index,
            "nvmlDeviceGetName": lambda card: card.name,
            "nvmlDeviceGetUUID": lambda card: card.uuid,
            "nvmlDeviceGetMemoryInfo": lambda card: SimpleNamespace(total=int(card.gib * GIB)),
            "nvmlDeviceGetCudaComputeCapability": lambda card: list(card.capability),
            "nvmlDeviceGetMigMode": mig_mode,
            "nvmlDeviceGetMaxMigDeviceCount": lambda card: 7,
            "nvmlDeviceGetMigDeviceHandleByIndex": mig_slice,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(pynvml, name, answer)

    return install


def test_the_real_call_never_fails_and_a_containers_memory_limit_counts(monkeypatch, tmp_path):
    machine = detect_machine()
    assert machine.num_cpus >= 1
    assert machine.gpus or machine.notes  # a machine without GPUs says why
    for limit, memory in (("max", None), (str(2 * GIB), 2.0)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        monkeypatch.setattr(detect, "CGROUP_MEMORY_LIMIT", tmp_path / "memory.max")
        limited = detect_machine().host_memory_gib
        assert limited == memory if memory else limited > 0 and limited != 2.0


def test_what_nvml_says_of_gpus(nvml):
    nvml(Card("NVIDIA H200", uuid="GPU-a"), Card("NVIDIA Next", capability=(13, 1)), driver="580.65.06")
    machine = detect_machine()
    assert machine.driver == "580.65.06"
    assert [(gpu.index, gpu.memory_gib, gpu.generation) for gpu in machine.gpus] == [
        (0, 140.0, Generation.hopper),
        (1, 140.0, Generation.blackwell),
    ]
    assert len(machine.notes) == 1 and "13.1" in machine.notes[0]  # an unknown capability


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("1", ["b"]),
        ("2,0", ["c", "a"]),  # CUDA's order is the variable's
        ("0,7,1", ["a"]),  # everything after the first that does not exist is ignored, as CUDA does
        ("GPU-1b", ["b"]),
        ("", []),
        ("nonsense", []),
    ],
)
def test_cuda_visible_devices(nvml, monkeypatch, visible, names):
    nvml(Card("a", uuid="GPU-1a"), Card("b", uuid="GPU-1b"), Card("c", uuid="GPU-1c"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.name for gpu in detect_machine().gpus] == names


def test_a_process_sees_one_mig_slice(nvml, monkeypatch):
    slices = [Card("MIG 1g.10gb", gib=10, uuid="MIG-x"), Card("MIG 2g.20gb", gib=20, uuid="MIG-y")]
    nvml(Card("NVIDIA H100", mig=True, slices=slices))
    machine = detect_machine()
    assert [(gpu.name, gpu.memory_gib, gpu.is_mig) for gpu in machine.gpus] == [("MIG 1g.10gb", 10.0, True)]
    assert "split into 2 MIG slices" in machine.notes[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-y")
    assert [gpu.memory_gib for gpu in detect_machine().gpus] == [20.0]


def test_one_broken_gpu_does_not_hide_the_others(nvml):
    nvml(Card("a"), Card("b", is_lost=True), Card("c"))
    machine = detect_machine()
    assert [gpu.name for gpu in machine.gpus] == ["a", "c"]
    assert "GPU 1 does not answer" in machine.notes[0]


@pytest.mark.parametrize(
    ("compilers", "variable", "has_headers", "has_triton", "missing"),
    [
        ({"gcc"}, None, True, True, None),
        (set(), "/opt/bin/cc", True, True, None),
        (set(), None, True, True, "apt install gcc"),
        ({"gcc"}, None, False, True, "apt install python3-dev"),
        ({"gcc"}, None, True, False, "pip install triton"),
    ],
    ids=["gcc", "named", "no_compiler", "no_headers", "no_triton"],
)
def test_what_triton_lacks_to_build_its_launchers(
    monkeypatch, tmp_path, compilers, variable, has_headers, has_triton, missing
):
    monkeypatch.setattr(detect, "find_spec", lambda name: object() if has_triton and name == "triton" else None)
    monkeypatch.setattr(detect.shutil, "which", lambda name: name if name in compilers else None)
    monkeypatch.setattr(detect.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    monkeypatch.delenv("CC", raising=False)
    if variable is not None:
        monkeypatch.setenv("CC", variable)
    if has_headers:
        (tmp_path / "Python.h").touch()
    lacking = detect_machine(no_gpu_because="not looked for").missing_for_triton
    assert lacking is None if missing is None else missing in lacking


def test_no_gpus_and_no_driver(monkeypatch, nvml):
    nvml()
    machine = detect_machine()
    assert (machine.gpus, machine.driver, len(machine.notes)) == ([], "580.65.06", 1)
    nvml(Card("NVIDIA H100", mig=True))  # without a slice
    assert detect_machine().gpus == []

    def fail():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    machine = detect_machine()
    assert (machine.gpus, machine.driver, len(machine.notes)) == ([], None, 1)
