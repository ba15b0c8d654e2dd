"""Detect the hardware: GPUs through NVML (not torch, which takes seconds to import), CPUs and host memory.

Nothing here fails: with a missing library, driver or GPU the result is a machine without GPUs, and `Machine.notes` says
why, for `plan`, `doctor` and error messages.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from tunebook.config.choices import Generation
from tunebook.facts.generations import OLDEST_SUPPORTED, ComputeCapability, generation_of
from tunebook.processes import own_cores

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
MIXED_NOTE = "different GPUs in one machine"
CGROUP_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU, or one MIG slice, as a rank would use it."""

    name: str
    memory_gib: float  # all of it, used or not
    compute_capability: ComputeCapability
    generation: Generation
    index: int = 0  # NVML's, in the order of the PCI bus
    uuid: str = ""
    is_mig: bool = False


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The hardware for a run on this machine. `gpus` are those that CUDA_VISIBLE_DEVICES leaves visible."""

    gpus: list[Gpu]
    driver: str | None  # None: no NVIDIA driver answered
    num_cpus: int  # that this process may use
    host_memory_gib: float  # that this process may use
    notes: list[str] = field(default_factory=list)  # what is unusual, or why there is no GPU
    missing_for_triton: str | None = None  # what Triton needs to build a kernel's launcher and lacks
    missing_for_cpu_kernels: str | None = None  # what torch needs to compile kernels for the CPU and lacks


@dataclass(frozen=True, kw_only=True)
class _Card:
    """A physical GPU, and what programs can run on: the GPU itself, or its MIG slices, of which there may be none."""

    index: int
    uuid: str
    usable: list[Gpu]

    @property
    def seen(self) -> Gpu | None:
        """What a program sees of it: the card, its first slice, or nothing."""
        return next(iter(self.usable), None)


def detect_machine(no_gpu_because: str | None = None) -> Machine:
    """Detect this machine. Never raises; see `Machine.notes`. With `no_gpu_because`, NVML is not asked."""
    notes: list[str] = [] if no_gpu_because is None else [no_gpu_because]
    cards, driver = _read_cards(notes) if no_gpu_because is None else ([], None)
    gpus = _visible(cards, os.environ.get(VISIBLE_VARIABLE), notes)
    kinds = sorted({gpu.name for gpu in gpus})
    if len(kinds) > 1:
        counts = ", ".join(f"{sum(gpu.name == kind for gpu in gpus)} x {kind}" for kind in kinds)
        notes.append(f"{MIXED_NOTE}: {counts}; {VISIBLE_VARIABLE} can restrict a run to one kind")
    return Machine(
        gpus=gpus,
        driver=driver,
        num_cpus=len(own_cores()),
        host_memory_gib=_host_memory_gib(),
        notes=notes,
        missing_for_triton=_missing_for_triton(),
        missing_for_cpu_kernels=_missing_for_cpu_kernels(),
    )


def _read_cards(notes: list[str]) -> tuple[list[_Card], str | None]:
    """Every GPU that NVML lists, and the driver's version."""
    try:
        import pynvml
    except ImportError:
        notes.append("the package nvidia-ml-py is not installed, so no GPU can be found; pip install nvidia-ml-py")
        return [], None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        notes.append(f"no NVIDIA driver answers here ({error})")
        return [], None
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        cards = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                cards.append(_read_card(pynvml, index, notes))
            except pynvml.NVMLError as error:  # a broken GPU must not hide the others
                notes.append(f"GPU {index} does not answer ({error}) and is left out")
        if not cards:
            notes.append(f"the NVIDIA driver {driver} is here but lists no GPU")
        return cards, driver
    except pynvml.NVMLError as error:
        notes.append(f"the NVIDIA driver does not answer ({error})")
        return [], None
    finally:
        pynvml.nvmlShutdown()


def _read_card(nvml: ModuleType, index: int, notes: list[str]) -> _Card:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    capability = (int(major), int(minor))
    match = generation_of(capability)
    if match.note is not None:
        notes.append(f"GPU {index}: {match.note}")

    def describe(device: Any, is_mig: bool) -> Gpu:
        return Gpu(
            name=_text(nvml.nvmlDeviceGetName(device)),
            memory_gib=round(nvml.nvmlDeviceGetMemoryInfo(device).total / GIB, 2),
            compute_capability=capability,
            generation=match.generation,
            index=index,
            uuid=_text(nvml.nvmlDeviceGetUUID(device)),
            is_mig=is_mig,
        )

    uuid = _text(nvml.nvmlDeviceGetUUID(handle))
    if not _is_split(nvml, handle):
        return _Card(index=index, uuid=uuid, usable=[describe(handle, False)])
    # Nothing else is asked of the card itself: a container with a slice may not see the card's memory.
    return _Card(index=index, uuid=uuid, usable=[describe(device, True) for device in _mig_handles(nvml, handle)])


def _is_split(nvml: ModuleType, handle: Any) -> bool:
    """True if the GPU is in MIG mode. Most models do not support the question."""
    try:
        current, _pending = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:
        return False
    return bool(current)


def _mig_handles(nvml: ModuleType, handle: Any) -> list[Any]:
    """The MIG slices. NVML answers "not found" for unused places between them."""
    found = []
    for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place))
        except nvml.NVMLError:
            continue
    return found


def _visible(cards: list[_Card], restriction: str | None, notes: list[str]) -> list[Gpu]:
    """The GPUs that a CUDA program sees, in its order."""
    for card in cards:
        if not card.usable:
            notes.append(f"GPU {card.index} is in MIG mode without a slice; make one with nvidia-smi mig -cgi")
        elif len(card.usable) > 1:
            notes.append(
                f"GPU {card.index} is split into {len(card.usable)} MIG slices; a process sees one of them, "
                f"the first unless {VISIBLE_VARIABLE} names another by its MIG-... id"
            )
    if restriction is None:
        return [gpu for card in cards if (gpu := card.seen) is not None]
    gpus = []
    for word in (part.strip() for part in restriction.split(",")):
        gpu = _named(cards, word)
        if gpu is None:
            break  # CUDA ignores everything from the first invalid word on
        gpus.append(gpu)
    if len(gpus) < len(cards):
        notes.append(f"{VISIBLE_VARIABLE}={restriction!r} leaves {len(gpus)} of {len(cards)} GPUs visible")
    return gpus


def _named(cards: list[_Card], word: str) -> Gpu | None:
    """The GPU for one word of CUDA_VISIBLE_DEVICES: an index, or the start of a GPU-... or MIG-... id."""
    if word.isdecimal():
        return cards[int(word)].seen if int(word) < len(cards) else None
    if word.startswith("GPU-"):
        return next((card.seen for card in cards if card.uuid.startswith(word)), None)
    if word.startswith("MIG-"):
        return next((part for card in cards for part in card.usable if part.uuid.startswith(word)), None)
    return None


def _text(value: str | bytes) -> str:
    """NVML's bindings answered in bytes before version 11.5."""
    return value.decode() if isinstance(value, bytes) else value


def _missing_for_triton() -> str | None:
    """Triton itself, a C compiler or Python's headers. Source: triton 3.6, `triton.runtime.build`."""
    if find_spec("triton") is None:
        return "the package triton is not installed here (pip install triton)"
    if not os.environ.get("CC") and shutil.which("gcc") is None and shutil.which("clang") is None:
        return "no C compiler is found here (apt install gcc)"
    return _missing_headers()


def _missing_for_cpu_kernels() -> str | None:
    """A C++ compiler or Python's headers. Source: torch 2.13, `torch._inductor.cpp_builder` and `codecache`."""
    if shutil.which(os.environ.get("CXX") or "g++") is None:
        return "no C++ compiler is found here (apt install g++)"
    return _missing_headers()


def _missing_headers() -> str | None:
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # Debian's Python outside of venvs
    if not (Path(sysconfig.get_paths(scheme)["include"]) / "Python.h").is_file():
        return "Python's headers are not installed here (apt install python3-dev)"
    return None


def _host_memory_gib() -> float:
    """The machine's memory, or the container's limit."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = CGROUP_MEMORY_LIMIT.read_text().strip()
    except OSError:
        limit = "max"
    return round(min(total, int(limit)) / GIB if limit.isdecimal() else total / GIB, 2)


def equal_gpus(gpus: Sequence[Gpu]) -> list[Gpu]:
    """The largest group of GPUs of one kind; of equally large groups the newest, then the one with most memory.

    A group that torch supports comes before all others.
    """

    def rank(group: list[Gpu]) -> tuple[bool, int, ComputeCapability, float]:
        capability = min(gpu.compute_capability for gpu in group)
        return capability >= OLDEST_SUPPORTED, len(group), capability, min(gpu.memory_gib for gpu in group)

    groups: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        groups.setdefault(gpu.name, []).append(gpu)
    return max(groups.values(), key=rank, default=[])


def visible_only(gpus: Sequence[Gpu]) -> str:
    """The variable in front of a command that makes only these GPUs visible, in this order.

    A number names a GPU in CUDA's order, the fastest first, while NVML uses the order of the PCI bus. With GPUs of
    different kinds these differ, so ids are used if they are known.
    """
    has_ids = all(gpu.uuid for gpu in gpus)
    return f"{VISIBLE_VARIABLE}={','.join(gpu.uuid if has_ids else str(gpu.index) for gpu in gpus)}"
