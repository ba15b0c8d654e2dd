"""NVIDIA GPUs on the PCI bus: what tells a machine without a GPU from one whose driver does not answer.

To NVML and nvidia-smi both are the same: there is no driver to talk to. The kernel lists a card whatever its driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunebook.doctor.findings import Finding, Kind, Level
from tunebook.hardware.nvidia_smi import SmiAnswer

DEVICES = Path("/sys/bus/pci/devices")
_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # class of display controllers, to which GPUs without a display belong too
_TO_A_GUEST = "vfio-pci"  # given to a virtual machine, so it is none of this one's


@dataclass(frozen=True, kw_only=True)
class PciGpu:
    """A card, and the kernel's driver that has it, if any does."""

    address: str
    driver: str | None


def gpus_on_bus(devices: Path = DEVICES) -> list[PciGpu]:
    """NVIDIA's GPUs on the bus; none where there is no such bus, or it cannot be read."""
    try:
        found = [PciGpu(address=one.name, driver=_driver(one)) for one in sorted(devices.iterdir()) if _is_gpu(one)]
    except OSError:
        return []
    return [gpu for gpu in found if gpu.driver != _TO_A_GUEST]


def _is_gpu(device: Path) -> bool:
    try:
        vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
    except OSError:  # taken off the bus meanwhile
        return False
    return vendor == _NVIDIA and kind.startswith(_DISPLAY)


def _driver(device: Path) -> str | None:
    link = device / "driver"
    return link.resolve().name if link.exists() else None


def without_answer(gpus: Sequence[PciGpu], notes: Sequence[str], listing: SmiAnswer | None) -> Finding:
    """The finding where such GPUs are here and NVML finds none, as `notes` say; `listing` is of `nvidia-smi -L`.

    An error where nvidia-smi is here, so that somebody meant to use them; else most often a container without them.
    """
    has_program = listing is not None and not listing.is_absent
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
    """What to type, by the driver that the kernel gave the cards."""
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
