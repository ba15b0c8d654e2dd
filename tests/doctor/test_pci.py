"""NVIDIA GPUs on the PCI bus, in folders laid out as the kernel lays them out; what is said where no driver answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunebook.doctor.findings import Level
from tunebook.doctor.gpus import look_at_gpus
from tunebook.doctor.pci import PciGpu, gpus_on_bus
from tunebook.hardware.nvidia_smi import SmiAnswer

from .conftest import CPU_ONLY, h200, health, machine_with

NO_PROGRAM = SmiAnswer(text=None, problem="there is no nvidia-smi", is_absent=True)
NOT_LOADED = SmiAnswer(
    text=None,
    problem="it ended with exit code 9: NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running.",
)
ONE = [PciGpu(address="0000:3b:00.0", driver=None)]


def put(bus: Path, address: str, vendor: str, kind: str, driver: str | None = None) -> None:
    device = bus / "devices" / address
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")
    if driver is not None:
        (bus / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (device / "driver").symlink_to(bus / "drivers" / driver)


def test_cards_for_displays_and_for_computing_are_gpus_and_other_devices_are_not(tmp_path: Path) -> None:
    put(tmp_path, "0000:5e:00.0", "0x10de", "0x030200", "nvidia")  # a data centre's, without a display
    put(tmp_path, "0000:3b:00.0", "0x10de", "0x030000")
    put(tmp_path, "0000:3b:00.1", "0x10de", "0x040300", "snd_hda_intel")  # the sound of a card
    put(tmp_path, "0000:c1:00.0", "0x10de", "0x068000")  # a switch between GPUs
    put(tmp_path, "0000:00:02.0", "0x8086", "0x030000", "i915")
    put(tmp_path, "0000:af:00.0", "0x10de", "0x030200", "vfio-pci")  # given to a virtual machine
    (tmp_path / "devices" / "0000:ff:00.0").mkdir()  # taken off the bus
    assert gpus_on_bus(tmp_path / "devices") == [
        PciGpu(address="0000:3b:00.0", driver=None),
        PciGpu(address="0000:5e:00.0", driver="nvidia"),
    ]


def test_a_machine_without_such_a_bus_has_none(tmp_path: Path) -> None:
    assert gpus_on_bus(tmp_path / "devices") == []


@pytest.mark.parametrize(
    ("driver", "listing", "level", "fix"),
    [
        (None, NOT_LOADED, Level.error, "sudo modprobe nvidia; after an update of the kernel build the driver for it "),
        ("nvidia", NOT_LOADED, Level.error, "sudo dmesg | grep -iE 'nvrm|xid' says what is wrong with it, then sudo r"),
        ("nouveau", NOT_LOADED, Level.error, "install NVIDIA's driver, which takes the place of nouveau"),
        (None, NO_PROGRAM, Level.warning, "install NVIDIA's driver, then sudo reboot"),
        ("nvidia", NO_PROGRAM, Level.warning, "in a container: start it with its GPUs (docker run --gpus all;"),
        ("nouveau", NO_PROGRAM, Level.warning, "install NVIDIA's driver, which takes the place of nouveau"),
        (None, SmiAnswer(text="No devices found.", problem=None), Level.error, "sudo modprobe nvidia"),
        (None, None, Level.warning, "install NVIDIA's driver"),
    ],
)
def test_a_gpu_whose_driver_does_not_answer_is_told_from_no_gpu(
    driver: str | None, listing: SmiAnswer | None, level: Level, fix: str
) -> None:
    two = [PciGpu(address=f"0000:{bus}:00.0", driver=driver) for bus in ("3b", "5e")]
    (found,) = look_at_gpus(CPU_ONLY, [], None, listing, two)
    assert (found.level, found.id) == (level, "driver-silent" if level is Level.error else "gpus-found")
    said = "2 NVIDIA GPUs are on the PCI bus (0000:3b:00.0, 0000:5e:00.0), but no NVIDIA driver answers here"
    assert found.what.startswith(said)
    assert found.fix is not None and found.fix.startswith(fix)
    assert ("nvidia-smi: " in found.what) is (level is Level.error)
    assert found.data["on_bus"][0] == {"address": "0000:3b:00.0", "driver": driver}


def test_without_one_on_the_bus_the_same_answer_is_nothing_wrong() -> None:
    (found,) = look_at_gpus(CPU_ONLY, [], None, NOT_LOADED, [])
    assert (found.level, found.id) == (Level.ok, "gpus-found")
    (one,) = look_at_gpus(CPU_ONLY, [], None, NOT_LOADED, ONE)
    assert one.what.startswith("an NVIDIA GPU is on the PCI bus (0000:3b:00.0), but no NVIDIA driver answers here; ")


def test_what_says_more_than_the_bus_comes_first() -> None:
    """A driver of another version, GPUs that work, and GPUs that are hidden have findings of their own."""
    mismatch = SmiAnswer(text=None, problem="it ended with exit code 18: Driver/library version mismatch")
    assert [found.id for found in look_at_gpus(CPU_ONLY, [], None, mismatch, ONE)] == ["gpus-found", "nvidia-smi"]
    works = look_at_gpus(machine_with(h200(0)), [health(0)], None, None, ONE)
    assert {found.level for found in works} == {Level.ok}
    hidden = look_at_gpus(machine_with(notes=("CUDA_VISIBLE_DEVICES='' leaves 0 of 1",)), [], None, None, ONE)
    assert [found.id for found in hidden] == ["gpus-found"]
