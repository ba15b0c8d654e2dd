"""The findings about healthy and faulty GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunebook.doctor.findings import Level
from tunebook.doctor.gpus import PciGpu, check_gpus, gpus_on_bus
from tunebook.hardware.detect import Machine
from tunebook.processes import Answer

from .conftest import CPU_ONLY, h200, health, machine_with, only

TWO = machine_with(h200(0), h200(1))
NO_PROGRAM = Answer(text="", problem="there is no nvidia-smi")
NOT_LOADED = Answer(
    text="",
    problem="it ended with exit code 9: NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running.",
)
ONE = [PciGpu(address="0000:3b:00.0", driver=None)]


def look(*gpus: dict, machine: Machine = TWO):
    return check_gpus(machine, list(gpus), None, None)


def test_healthy_gpus() -> None:
    findings = look(health(0), health(1))
    assert [finding.level for finding in findings] == [Level.ok] * 3
    found = only(findings, "gpus-found")
    assert found.what == "2 x NVIDIA H200 (140.4 GiB, compute capability 9.0)"
    assert [gpu["generation"] for gpu in found.data["gpus"]] == ["hopper", "hopper"]
    assert only(findings, "gpu-memory-errors").what == "no uncorrected memory errors (ECC is on for GPU 0-1)"


def test_a_driver_without_a_gpu_is_a_warning() -> None:
    (found,) = check_gpus(machine_with(notes=("CUDA_VISIBLE_DEVICES='' leaves 0 of 2 GPUs visible",)), [], None, None)
    assert found.level is Level.warning
    assert "leaves 0 of 2" in found.what


def test_a_driver_that_does_not_answer_is_the_only_finding() -> None:
    (found,) = check_gpus(CPU_ONLY, [], "no answer within 40 s", None)
    assert (found.id, found.level) == ("driver-silent", Level.error)
    assert "no answer within 40 s" in found.what
    assert "sudo reboot" in found.fix


def test_gpu_in_use_names_process_memory_and_a_free_gpu() -> None:
    busy = health(0, used_gib=26.1, processes=[{"pid": 12806, "gib": 25.6}, {"pid": 7, "gib": None}])
    found = only(look(busy, health(1)), "gpu-in-use")
    assert found.level is Level.warning
    assert found.what == "GPU 0: 26.1 of 140.4 GiB in use, by process 12806 (25.6 GiB), 7"
    assert found.fix.endswith("or take others: CUDA_VISIBLE_DEVICES=GPU-1 in front of the command")
    assert found.data["used_gib"] == {"0": 26.1, "1": 0.5}


@pytest.mark.parametrize(
    "changes",
    [
        {"compute_mode": "prohibited"},
        {"uncorrected_since_start": 2},
        {"remapping": {"is_pending": False, "has_failed": True}},
    ],
    ids=["prohibited", "errors", "not_repaired"],
)
def test_unusable_gpu_is_not_suggested(changes: dict) -> None:
    three = machine_with(h200(0), h200(1), h200(2))
    busy, bad = health(0, used_gib=26.1), health(1, **changes)
    found = only(look(busy, health(1), health(2), machine=three), "gpu-in-use")
    assert "CUDA_VISIBLE_DEVICES=GPU-1,GPU-2 in" in found.fix
    found = only(look(busy, bad, health(2), machine=three), "gpu-in-use")
    assert "CUDA_VISIBLE_DEVICES=GPU-2 in" in found.fix
    assert "none is free" in only(look(busy, bad), "gpu-in-use").fix


def test_suggested_gpus_are_of_one_kind() -> None:
    small = h200(2, name="NVIDIA T1000", memory_gib=4.0, compute_capability=(7, 5))
    machine = machine_with(h200(0), h200(1), small, h200(3))
    found = only(look(health(0, used_gib=26.1), *map(health, (1, 2, 3)), machine=machine), "gpu-in-use")
    assert "CUDA_VISIBLE_DEVICES=GPU-1,GPU-3 in" in found.fix


def test_different_gpus_name_those_to_use() -> None:
    note = "different GPUs in one machine: 1 x NVIDIA DGX Display, 2 x NVIDIA H200; CUDA_VISIBLE_DEVICES can restrict"
    display = h200(1, name="NVIDIA DGX Display", memory_gib=4.0, compute_capability=(7, 5))
    machine = machine_with(h200(0), display, h200(2), notes=(note,))
    found = only(look(*map(health, (0, 1, 2)), machine=machine), "gpu-note")
    assert found.fix == "CUDA_VISIBLE_DEVICES=GPU-0,GPU-2 in front of the command takes those of one kind"


def test_all_in_use_by_processes_outside_of_the_container() -> None:
    found = only(look(health(0, used_gib=3.0), health(1, used_gib=2.0, processes=None)), "gpu-in-use")
    assert found.what.count("by a process that is not seen from here") == 2
    assert "none is free" in found.fix


@pytest.mark.parametrize("used", [None, 0.0, 1.0])
def test_memory_of_the_driver_is_not_in_use(used: float | None) -> None:
    assert only(look(health(0, used_gib=used), health(1)), "gpu-in-use").level is Level.ok


@pytest.mark.parametrize(
    ("changes", "level", "said"),
    [
        ({"uncorrected_since_start": 2}, Level.error, "GPU 1: 2 uncorrected memory errors since the driver was loaded"),
        ({"remapping": {"is_pending": False, "has_failed": True}}, Level.error, "GPU 1: bad memory could not be"),
        ({"remapping": {"is_pending": True, "has_failed": False}}, Level.warning, "GPU 1: bad memory is replaced"),
        ({"retirement_pending": True}, Level.warning, "GPU 1: bad memory is replaced at the next restart"),
    ],
)
def test_memory_errors(changes: dict, level: Level, said: str) -> None:
    found = only(look(health(0), health(1, **changes)), "gpu-memory-errors")
    assert found.level is level
    assert found.what.startswith(said)


def test_errors_of_the_past_are_data_only() -> None:
    found = only(look(health(0, uncorrected_ever=5), health(1)), "gpu-memory-errors")
    assert (found.level, found.data["uncorrected_ever"]) == (Level.ok, {"0": 5, "1": 0})


def test_gpus_without_error_correction() -> None:
    questions = {"ecc": None, "uncorrected_since_start": None, "remapping": None}
    found = only(look(health(0, **questions), health(1, **questions)), "gpu-memory-errors")
    assert (found.level, "not counted" in found.what) == (Level.ok, True)


def test_persistence_compute_mode_and_lanes() -> None:
    bad = health(1, persistence=False, compute_mode="prohibited", pcie_width=8)
    findings = look(health(0, persistence=None), bad)
    assert only(findings, "gpu-persistence").what.startswith("GPU 1: persistence mode is off")
    assert only(findings, "gpu-compute-mode").level is Level.error
    assert only(findings, "gpu-compute-mode").fix == "sudo nvidia-smi -i 1 -c 0"
    assert only(findings, "gpu-pcie-width").what == "GPU 1: 8 of 16 PCIe lanes"


def test_a_slice_cannot_train_with_others() -> None:
    machine = machine_with(h200(0, is_mig=True, memory_gib=16.0))
    found = only(check_gpus(machine, [health(0)], None, None), "gpu-split")
    assert "parallelism=single" in found.fix
    assert "16 GiB" in found.what


def test_gpus_that_are_hidden_are_left_out() -> None:
    hidden = health(0, used_gib=100.0, uncorrected_since_start=7)
    findings = look(hidden, health(1), machine=machine_with(h200(1)))
    assert {finding.level for finding in findings} == {Level.ok}
    assert list(only(findings, "gpu-in-use").data["used_gib"]) == ["1"]


def test_silent_gpu_is_reported_by_detection() -> None:
    lost = {"index": 0, "problem": "GPU is lost"}
    machine = machine_with(h200(1), notes=("GPU 0 does not answer (GPU is lost) and is left out",))
    note = only(check_gpus(machine, [lost, health(1)], None, None), "gpu-note")
    assert (note.level, note.what) == (Level.warning, "GPU 0 does not answer (GPU is lost) and is left out")


def test_deliberately_hidden_gpus_are_no_warning() -> None:
    machine = machine_with(h200(1), notes=("CUDA_VISIBLE_DEVICES='1' leaves 1 of 2 GPUs visible",))
    assert only(check_gpus(machine, [health(0), health(1)], None, None), "gpu-note").level is Level.ok


def test_one_that_torch_has_no_code_for() -> None:
    machine = machine_with(h200(0, name="Tesla P100", compute_capability=(6, 0)))
    found = only(check_gpus(machine, [health(0)], None, None), "gpu-too-old")
    assert (found.level, found.what) == (Level.error, "Tesla P100 has compute capability 6.0; torch starts at 7.0")


LISTING = """\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-5f3c7a10-0000-1111-2222-333344445555)
  MIG 3g.40gb     Device  0: (UUID: MIG-c6d4f1ef-0000-1111-2222-333344445555)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-77aa0000-0000-1111-2222-333344445555)
"""


@pytest.mark.parametrize(
    ("answer", "level", "said"),
    [
        (Answer(text=LISTING), Level.error, "nvidia-smi lists 2 GPUs (GPU 0: NVIDIA A100"),
        (Answer(text="", problem="no answer within 40 s"), Level.warning, "no answer within 40 s"),
        (Answer(text="", problem="it ended with exit code 18: Driver/library version mismatch"), Level.warning,
         "version mismatch"),
        (Answer(text="\x00\x01 GPU?"), Level.warning, r"there are: it printed '\x00\x01 GPU?'"),
    ],
)  # fmt: skip
def test_an_nvidia_smi_where_python_finds_no_driver(answer: Answer, level: Level, said: str) -> None:
    found = only(check_gpus(CPU_ONLY, [], None, answer), "nvidia-smi")
    assert found.level is level
    assert said in found.what


@pytest.mark.parametrize("answer", [NO_PROGRAM, Answer(text="No devices found."), NOT_LOADED])
def test_an_nvidia_smi_that_says_that_there_is_no_gpu(answer: Answer) -> None:
    assert [finding.id for finding in check_gpus(CPU_ONLY, [], None, answer)] == ["gpus-found"]


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
        (None, Answer(text="No devices found."), Level.error, "sudo modprobe nvidia"),
        (None, None, Level.warning, "install NVIDIA's driver"),
    ],
)
def test_a_gpu_whose_driver_does_not_answer_is_told_from_no_gpu(
    driver: str | None, listing: Answer | None, level: Level, fix: str
) -> None:
    two = [PciGpu(address=f"0000:{bus}:00.0", driver=driver) for bus in ("3b", "5e")]
    (found,) = check_gpus(CPU_ONLY, [], None, listing, two)
    assert (found.level, found.id) == (level, "driver-silent" if level is Level.error else "gpus-found")
    said = "2 NVIDIA GPUs are on the PCI bus (0000:3b:00.0, 0000:5e:00.0), but no NVIDIA driver answers here"
    assert found.what.startswith(said)
    assert found.fix is not None and found.fix.startswith(fix)
    assert ("nvidia-smi: " in found.what) is (level is Level.error)
    assert found.data["on_bus"][0] == {"address": "0000:3b:00.0", "driver": driver}


def test_no_gpu_on_the_bus_is_no_problem() -> None:
    for listing in (None, NOT_LOADED):
        (found,) = check_gpus(CPU_ONLY, [], None, listing, [])
        assert (found.level, found.id) == (Level.ok, "gpus-found")
        assert found.what == "no GPU here: no NVIDIA driver answers here"
    (one,) = check_gpus(CPU_ONLY, [], None, NOT_LOADED, ONE)
    assert one.what.startswith("an NVIDIA GPU is on the PCI bus (0000:3b:00.0), but no NVIDIA driver answers here; ")


def test_more_specific_findings_replace_that_of_the_bus() -> None:
    """Other versions of the driver, working GPUs and hidden GPUs have their own findings."""
    mismatch = Answer(text="", problem="it ended with exit code 18: Driver/library version mismatch")
    assert [found.id for found in check_gpus(CPU_ONLY, [], None, mismatch, ONE)] == ["gpus-found", "nvidia-smi"]
    works = check_gpus(machine_with(h200(0)), [health(0)], None, None, ONE)
    assert {found.level for found in works} == {Level.ok}
    hidden = check_gpus(machine_with(notes=("CUDA_VISIBLE_DEVICES='' leaves 0 of 1",)), [], None, None, ONE)
    assert [found.id for found in hidden] == ["gpus-found"]
