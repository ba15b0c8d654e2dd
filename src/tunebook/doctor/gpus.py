"""GPU findings: which GPUs exist, whether they are healthy, and whether other processes use them.

NVML and nvidia-smi cannot distinguish a machine without a GPU from one whose driver does not answer. The PCI bus can:
the kernel lists a card whatever its driver.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunebook.doctor.findings import Finding, Kind, Level, listed
from tunebook.facts.generations import OLDEST_SUPPORTED, capability_text
from tunebook.hardware.detect import MIXED_NOTE, VISIBLE_VARIABLE, Machine, equal_gpus, visible_only
from tunebook.hardware.nvidia_smi import ABSENT, listed_gpus
from tunebook.processes import Answer

Health = list[dict[str, Any]]  # of `probes.nvml`, one per GPU of the machine

# nvidia-smi prints these without a GPU, and also if the driver of a GPU is not loaded.
_WITHOUT_GPU = ("No devices", "couldn't communicate with the NVIDIA driver")
_FREE_GIB = 1.0  # a driver, a display or a monitor uses less of an idle GPU
DEVICES = Path("/sys/bus/pci/devices")
_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # class of display controllers, which includes GPUs without a display
_TO_A_GUEST = "vfio-pci"  # the driver of a card that is passed to a virtual machine


def check_gpus(
    machine: Machine,
    health: Health,
    problem: str | None,
    listing: Answer | None,
    on_bus: Sequence[PciGpu] = (),
) -> list[Finding]:
    """Return the findings, without GPUs hidden from this process. `problem` is why NVML did not answer.

    `listing` is the output of `nvidia-smi -L` if NVML found no driver. `on_bus` are the GPUs that the kernel lists.
    """
    if problem is not None:
        return [_silent(problem)]
    if not machine.gpus:
        elsewhere = list(_listed_elsewhere(machine, listing))
        if on_bus and machine.driver is None and not elsewhere:
            return [without_answer(on_bus, machine.notes, listing)]
        return [_none(machine), *elsewhere]
    visible = {gpu.index for gpu in machine.gpus}
    seen = [gpu for gpu in health if gpu["index"] in visible and gpu["problem"] is None]
    return [
        _found(machine),
        *_too_old(machine),
        *_notes(machine),
        *_memory_in_use(machine, seen),
        *_compute_mode(seen),
        *_split(machine),
        *_memory_errors(machine, seen),
        *_persistence(seen),
        *_pcie_width(seen),
    ]


def _silent(problem: str) -> Finding:
    return Kind.gpus.error(
        id="driver-silent",
        what=f"the NVIDIA driver was asked about its GPUs and did not answer properly: {problem}",
        fix="nvidia-smi; if it hangs too, a GPU has fallen off the bus: sudo dmesg | grep -i nvrm, then sudo reboot",
        data={"problem": problem},
    )


def _none(machine: Machine) -> Finding:
    reasons = "; ".join(machine.notes) or "none is listed"
    data: dict[str, Any] = {"gpus": [], "driver": machine.driver, "notes": machine.notes}
    what = f"no GPU here: {reasons}"
    if machine.driver is None:  # most often a machine without GPUs
        return Kind.gpus.ok(id="gpus-found", what=what, data=data)
    return Kind.gpus.warning(
        id="gpus-found",
        what=what,
        fix=f"nvidia-smi -L lists the GPUs that the driver knows; unset {VISIBLE_VARIABLE} if it hides them",
        data=data,
    )


def _listed_elsewhere(machine: Machine, listing: Answer | None) -> Iterator[Finding]:
    """Report a machine with nvidia-smi on which Python finds no GPUs; such a machine most often has GPUs."""
    if listing is None or listing.problem == ABSENT or machine.driver is not None:
        return
    said = listing.problem or listing.text
    if any(words in said for words in _WITHOUT_GPU):
        return
    gpus = listed_gpus(listing.text)
    if gpus:
        what = f"nvidia-smi lists {len(gpus)} GPUs ({gpus[0]}), and Python finds none: {'; '.join(machine.notes)}"
        fix = "pip install nvidia-ml-py in the environment that tunebook is in; ldconfig -p | grep nvidia-ml"
    else:
        reason = listing.problem or f"it printed {said[:80]!a}"
        what = f"nvidia-smi is here, and it is not known which GPUs there are: {reason}"
        fix = "nvidia-smi by itself; after an update of the driver sudo reboot; sudo dmesg | grep -i nvrm says more"
    level = Level.error if gpus else Level.warning
    yield Finding(id="nvidia-smi", kind=Kind.gpus, level=level, what=what, fix=fix, data={"listed": gpus})


def _found(machine: Machine) -> Finding:
    kinds = sorted({(gpu.name, gpu.memory_gib, gpu.compute_capability) for gpu in machine.gpus})
    parts = []
    for name, memory, capability in kinds:
        count = sum((gpu.name, gpu.memory_gib) == (name, memory) for gpu in machine.gpus)
        parts.append(f"{count} x {name} ({memory:g} GiB, compute capability {capability_text(capability)})")
    gpus = [
        {
            "index": gpu.index,
            "name": gpu.name,
            "memory_gib": gpu.memory_gib,
            "compute_capability": capability_text(gpu.compute_capability),
            "generation": gpu.generation.name,
            "is_mig": gpu.is_mig,
        }
        for gpu in machine.gpus
    ]
    return Kind.gpus.ok(id="gpus-found", what="; ".join(parts), data={"gpus": gpus, "driver": machine.driver})


def _too_old(machine: Machine) -> Iterator[Finding]:
    old = [gpu for gpu in machine.gpus if gpu.compute_capability < OLDEST_SUPPORTED]
    if old:
        yield Kind.gpus.error(
            id="gpu-too-old",
            what=f"{old[0].name} has compute capability {capability_text(old[0].compute_capability)}; torch starts at "
            f"{capability_text(OLDEST_SUPPORTED)}",
            fix="a newer GPU, or hardware.generation=cpu",
            data={"indices": [gpu.index for gpu in old]},
        )


def _notes(machine: Machine) -> Iterator[Finding]:
    """Report the notes of the detection: GPUs that do not answer, are hidden, or differ in kind."""
    for note in machine.notes:
        if note.startswith(VISIBLE_VARIABLE):  # as requested
            yield Kind.gpus.ok(id="gpu-note", what=note)
            continue
        yield Kind.gpus.warning(
            id="gpu-note",
            what=note,
            fix=f"{visible_only(equal_gpus(machine.gpus))} in front of the command takes those of one kind"
            if note.startswith(MIXED_NOTE)
            else "nvidia-smi -L lists all GPUs with their ids; "
            f"{VISIBLE_VARIABLE}=ID,ID,... in front of the command says which to use",
        )


def _memory_in_use(machine: Machine, health: Health) -> Iterator[Finding]:
    used = [gpu for gpu in health if (gpu["used_gib"] or 0) > _FREE_GIB]
    data = {"used_gib": {str(gpu["index"]): gpu["used_gib"] for gpu in health}}
    if not used:
        if health:
            yield Kind.gpus.ok(id="gpu-in-use", what="no other process uses the GPUs", data=data)
        return
    busy = "; ".join(
        f"GPU {gpu['index']}: {gpu['used_gib']:g} of {gpu['total_gib']:g} GiB in use{_process_text(gpu['processes'])}"
        for gpu in used
    )
    yield Kind.gpus.warning(
        id="gpu-in-use",
        what=busy,
        fix=f"end what runs there (nvidia-smi shows it), or take others: {_usable_gpus(machine, health, used)}",
        data=data | {"processes": {str(gpu["index"]): gpu["processes"] for gpu in used}},
    )


def _process_text(processes: list[dict[str, Any]] | None) -> str:
    if not processes:
        return ", by a process that is not seen from here"
    return ", by process " + ", ".join(
        f"{process['pid']}" + (f" ({process['gib']:g} GiB)" if process["gib"] is not None else "")
        for process in processes
    )


def _usable_gpus(machine: Machine, health: Health, left_out: Health) -> str:
    """Name the usable GPUs of one kind that are not left out."""
    free = {gpu["index"] for gpu in health if gpu not in left_out and not _is_prohibited(gpu) and not _is_damaged(gpu)}
    supported = [gpu for gpu in machine.gpus if gpu.index in free and gpu.compute_capability >= OLDEST_SUPPORTED]
    return f"{visible_only(equal_gpus(supported))} in front of the command" if supported else "none is free"


def _is_prohibited(gpu: dict[str, Any]) -> bool:
    return bool(gpu["compute_mode"] == "prohibited")


def _compute_mode(health: Health) -> Iterator[Finding]:
    shut = [gpu["index"] for gpu in health if _is_prohibited(gpu)]
    if shut:
        yield Kind.gpus.error(
            id="gpu-compute-mode",
            what=f"GPU {listed(shut)}: the compute mode is `prohibited`, so no program may use it",
            fix=f"sudo nvidia-smi -i {','.join(map(str, shut))} -c 0",
            data={"indices": shut},
        )


def _split(machine: Machine) -> Iterator[Finding]:
    slices = [gpu for gpu in machine.gpus if gpu.is_mig]
    if slices:
        indices = sorted({gpu.index for gpu in slices})
        yield Kind.gpus.warning(
            id="gpu-split",
            what=f"GPU {listed(indices)} is split (MIG): a run gets a slice of {slices[0].memory_gib:g} GiB, and NCCL "
            "cannot connect slices, so only one rank can train",
            fix=f"parallelism=single; or for the whole GPU, with nothing on it: sudo nvidia-smi -i "
            f"{','.join(map(str, indices))} -mig 0",
            data={"indices": indices},
        )


def _memory_errors(machine: Machine, health: Health) -> Iterator[Finding]:
    """Report uncorrected errors since the driver was loaded, and repairs that failed or need a restart."""
    bad = [gpu for gpu in health if _is_damaged(gpu)]
    waiting = [gpu for gpu in health if gpu not in bad and _awaits_repair(gpu)]
    data = {
        "uncorrected_since_start": {str(gpu["index"]): gpu["uncorrected_since_start"] for gpu in health},
        "uncorrected_ever": {str(gpu["index"]): gpu["uncorrected_ever"] for gpu in health},
        "remapping": {str(gpu["index"]): gpu["remapping"] for gpu in health},
    }
    if bad:
        yield Kind.gpus.error(
            id="gpu-memory-errors",
            what="; ".join(f"GPU {gpu['index']}: {_damage(gpu)}" for gpu in bad),
            fix="nvidia-smi -q -d ECC,ROW_REMAPPER; reset the GPU or restart the machine, and replace a GPU on which "
            f"it comes back; meanwhile {_usable_gpus(machine, health, bad)}",
            data=data,
        )
    if waiting:
        yield Kind.gpus.warning(
            id="gpu-memory-errors",
            what=f"GPU {listed([gpu['index'] for gpu in waiting])}: bad memory is replaced at the next restart",
            fix="sudo nvidia-smi -r with nothing on the GPUs, or sudo reboot",
            data=data,
        )
    if health and not bad and not waiting:
        protected = [gpu["index"] for gpu in health if gpu["ecc"]]
        what = (
            f"no uncorrected memory errors (ECC is on for GPU {listed(protected)})"
            if protected
            else ("memory errors are not counted: ECC is off, or the GPUs have none")
        )
        yield Kind.gpus.ok(id="gpu-memory-errors", what=what, data=data)


def _is_damaged(gpu: dict[str, Any]) -> bool:
    return bool(gpu["uncorrected_since_start"]) or bool(gpu["remapping"] and gpu["remapping"]["has_failed"])


def _awaits_repair(gpu: dict[str, Any]) -> bool:
    return bool(gpu["retirement_pending"]) or bool(gpu["remapping"] and gpu["remapping"]["is_pending"])


def _damage(gpu: dict[str, Any]) -> str:
    if gpu["uncorrected_since_start"]:
        return f"{gpu['uncorrected_since_start']} uncorrected memory errors since the driver was loaded"
    return "bad memory could not be replaced"


def _persistence(health: Health) -> Iterator[Finding]:
    off = [gpu["index"] for gpu in health if gpu["persistence"] is False]
    if off:
        yield Kind.gpus.warning(
            id="gpu-persistence",
            what=f"GPU {listed(off)}: persistence mode is off, so each first use waits seconds for the driver to load",
            fix="sudo nvidia-smi -pm 1, or the service nvidia-persistenced",
            data={"indices": off},
        )


def _pcie_width(health: Health) -> Iterator[Finding]:
    """Report badly seated cards, which run with fewer lanes. (Lane speed drops in any idle GPU.)"""
    known = [gpu for gpu in health if gpu["pcie_width"] and gpu["pcie_max_width"]]
    narrow = [gpu for gpu in known if gpu["pcie_width"] < gpu["pcie_max_width"]]
    if narrow:
        yield Kind.gpus.warning(
            id="gpu-pcie-width",
            what="; ".join(
                f"GPU {gpu['index']}: {gpu['pcie_width']} of {gpu['pcie_max_width']} PCIe lanes" for gpu in narrow
            ),
            fix="lspci -vv says whether the slot has no more (LnkCap); if it has, seat the card and its riser again",
            data={"lanes": {str(gpu["index"]): [gpu["pcie_width"], gpu["pcie_max_width"]] for gpu in known}},
        )


@dataclass(frozen=True, kw_only=True)
class PciGpu:
    """A card and the kernel driver that controls it, if any."""

    address: str
    driver: str | None


def gpus_on_bus(devices: Path = DEVICES) -> list[PciGpu]:
    """NVIDIA GPUs on the PCI bus; empty if the bus cannot be read."""
    try:
        found = [PciGpu(address=one.name, driver=_driver(one)) for one in sorted(devices.iterdir()) if _is_gpu(one)]
    except OSError:
        return []
    return [gpu for gpu in found if gpu.driver != _TO_A_GUEST]


def _is_gpu(device: Path) -> bool:
    try:
        vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
    except OSError:  # it was removed in the meantime
        return False
    return vendor == _NVIDIA and kind.startswith(_DISPLAY)


def _driver(device: Path) -> str | None:
    link = device / "driver"
    return link.resolve().name if link.exists() else None


def without_answer(gpus: Sequence[PciGpu], notes: Sequence[str], listing: Answer | None) -> Finding:
    """The finding for GPUs on the bus that NVML does not find; `listing` is the output of `nvidia-smi -L`.

    An error if nvidia-smi is installed. Else it is most often a container without access to the GPUs.
    """
    has_program = listing is not None and listing.problem != ABSENT
    reasons = list(notes) or ["no NVIDIA driver answers"]
    if listing is not None and has_program:
        reasons.append(f"nvidia-smi: {listing.problem or listing.text}")
    number = "an NVIDIA GPU is" if len(gpus) == 1 else f"{len(gpus)} NVIDIA GPUs are"
    data: dict[str, Any] = {"on_bus": [{"address": gpu.address, "driver": gpu.driver} for gpu in gpus]}
    return Finding(
        id="driver-silent" if has_program else "gpus-found",
        kind=Kind.gpus,
        level=Level.error if has_program else Level.warning,
        what=f"{number} on the PCI bus ({', '.join(gpu.address for gpu in gpus)}), but {'; '.join(reasons)}",
        fix=_fix({gpu.driver for gpu in gpus}, has_program=has_program),
        data=data,
    )


def _fix(drivers: set[str | None], *, has_program: bool) -> str:
    """The fix, by the kernel drivers of the cards."""
    if "nvidia" in drivers:
        if has_program:
            return "sudo dmesg | grep -iE 'nvrm|xid' says what is wrong with it, then sudo reboot"
        return "in a container: start it with its GPUs (docker run --gpus all; make does); else install NVIDIA's driver"
    if "nouveau" in drivers:
        return "install NVIDIA's driver, which takes the place of nouveau, then sudo reboot"
    if has_program:
        return (
            "sudo modprobe nvidia; after an update of the kernel build the driver for it (sudo dkms autoinstall, or "
            "install it again) and sudo reboot; sudo dmesg | grep -i nvrm says more"
        )
    return "install NVIDIA's driver, then sudo reboot"
