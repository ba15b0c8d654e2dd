"""Detect the hardware: GPUs through NVML (not torch, which takes seconds to import), CPUs and host memory.

Nothing here fails: with a missing driver or GPU the result is a machine without GPUs, and `Machine.notes` says
why, for `plan`, `doctor` and error messages.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from tunebook.config.choices import Generation
from tunebook.facts.generations import GENERATIONS, ComputeCapability, capability_text, generation_of
from tunebook.processes import own_cores

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
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


def detect_machine(no_gpu_because: str | None = None) -> Machine:
    """Detect this machine. Never raises; see `Machine.notes`. With `no_gpu_because`, NVML is not asked."""
    notes: list[str] = [] if no_gpu_because is None else [no_gpu_because]
    cards, driver = _read_cards(notes) if no_gpu_because is None else ([], None)
    gpus = _visible(cards, os.environ.get(VISIBLE_VARIABLE), notes)
    return Machine(
        gpus=gpus,
        driver=driver,
        num_cpus=len(own_cores()),
        host_memory_gib=_host_memory_gib(),
        notes=notes,
        missing_for_triton=_missing_for_triton(),
    )


def _read_cards(notes: list[str]) -> tuple[list[list[Gpu]], str | None]:
    """What programs can run on of every GPU that NVML lists, and the driver's version."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        notes.append(f"no NVIDIA driver answers here ({error})")
        return [], None
    try:
        driver: str = pynvml.nvmlSystemGetDriverVersion()
        cards = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                cards.append(_read_card(pynvml, index, notes))
            except pynvml.NVMLError as error:  # a broken GPU must not hide the others
                notes.append(f"GPU {index} does not answer ({error}) and is ignored")
        if not cards:
            notes.append(f"the NVIDIA driver {driver} is installed but lists no GPU")
        return cards, driver
    except pynvml.NVMLError as error:
        notes.append(f"the NVIDIA driver does not answer ({error})")
        return [], None
    finally:
        pynvml.nvmlShutdown()


def _read_card(nvml: ModuleType, index: int, notes: list[str]) -> list[Gpu]:
    """A physical GPU, or its MIG slices, of which a program sees one and there may be none."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    capability = (int(major), int(minor))
    generation = generation_of(capability)
    if capability not in GENERATIONS[generation].compute_capabilities:
        notes.append(f"GPU {index} has compute capability {capability_text(capability)}; treated as {generation.name}")
    slices = _mig_handles(nvml, handle)
    if slices is not None and len(slices) != 1:
        notes.append(
            f"GPU {index} is split into {len(slices)} MIG slices; a process sees one of them, the first unless "
            f"{VISIBLE_VARIABLE} names another by its MIG-... id (nvidia-smi mig -cgi makes slices)"
        )
    # Of a split card nothing else is asked: a container with a slice may not see the card's memory.
    return [
        Gpu(
            name=nvml.nvmlDeviceGetName(device),
            memory_gib=round(nvml.nvmlDeviceGetMemoryInfo(device).total / GIB, 2),
            compute_capability=capability,
            generation=generation,
            index=index,
            uuid=nvml.nvmlDeviceGetUUID(device),
            is_mig=slices is not None,
        )
        for device in ([handle] if slices is None else slices)
    ]


def _mig_handles(nvml: ModuleType, handle: Any) -> list[Any] | None:
    """The MIG slices of a GPU; None if it is not in MIG mode, which most models do not have."""
    try:
        if not nvml.nvmlDeviceGetMigMode(handle)[0]:
            return None
    except nvml.NVMLError:
        return None
    slices = []
    for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with suppress(nvml.NVMLError):  # an unused place
            slices.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place))
    return slices


def _visible(cards: list[list[Gpu]], restriction: str | None, notes: list[str]) -> list[Gpu]:
    """The GPUs that a CUDA program sees, in its order."""
    if restriction is None:
        return [card[0] for card in cards if card]
    gpus = []
    for entry in (part.strip() for part in restriction.split(",")):
        if entry.isdecimal():
            named = cards[int(entry)] if int(entry) < len(cards) else []
        else:  # the start of a GPU-... or MIG-... id
            named = [gpu for card in cards for gpu in card if entry and gpu.uuid.startswith(entry)]
        if not named:
            break  # CUDA ignores everything from the first invalid entry on
        gpus.append(named[0])
    if len(gpus) < len(cards):
        notes.append(f"{VISIBLE_VARIABLE}={restriction!r} leaves {len(gpus)} of {len(cards)} GPUs visible")
    return gpus


def _missing_for_triton() -> str | None:
    """Triton itself, a C compiler or Python's headers. Source: triton 3.6, `triton.runtime.build`."""
    if find_spec("triton") is None:
        return "the package triton is not installed here (pip install triton)"
    if not os.environ.get("CC") and shutil.which("gcc") is None and shutil.which("clang") is None:
        return "no C compiler is found here (apt install gcc)"
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
