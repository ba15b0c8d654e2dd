"""The checks: torch and collectives run on the CPU; GPUs and answers that a CPU cannot give are replaced."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tunebook.config.choices import Generation
from tunebook.doctor import checks
from tunebook.doctor.checks import (
    check_disks,
    check_driver,
    check_image,
    check_links,
    check_nccl,
    check_shared_memory,
    check_torch,
)
from tunebook.hardware.detect import Gpu, Machine
from tunebook.hardware.image import IMAGE_FILE_VARIABLE
from tunebook.hardware.links import BETWEEN_SOCKETS, NVLINK
from tunebook.processes import Answer

CPU_ONLY = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0, notes=["no NVIDIA driver answers here"])
GIB = 2**30


def machine_with(number: int, *, driver: str = "580.159.04", notes: tuple[str, ...] = ()) -> Machine:
    gpu = Gpu(name="NVIDIA H200", memory_gib=140.4, compute_capability=(9, 0), generation=Generation.hopper)
    return Machine(gpus=[gpu] * number, driver=driver, num_cpus=64, host_memory_gib=512.0, notes=list(notes))


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch):
    """`answer(text=...)` is what every asked program answers."""
    return lambda **facts: monkeypatch.setattr(
        checks, "ask", lambda *_, **__: Answer(text=facts.pop("text", ""), **facts)
    )


@pytest.mark.parametrize(
    ("machine", "level"),
    [
        (machine_with(8), "ok"),
        (machine_with(7, notes=("GPU 3 does not answer (lost) and is left out",)), "warning"),
        (CPU_ONLY, "ok"),
    ],
)
def test_which_gpus_there_are(machine, level, answer, monkeypatch):
    answer()
    monkeypatch.setattr(checks, "detect_machine", lambda: machine)
    found_machine, found = check_driver()
    assert (found_machine, found.level) == (machine, level)


def test_a_driver_that_hangs_is_not_asked_again(answer, monkeypatch):
    answer(problem="no answer within 40 s", is_late=True)
    machine, found = check_driver()
    assert (machine.gpus, found.level) == ([], "error")


def test_a_driver_that_is_too_old_for_torch(monkeypatch):
    monkeypatch.delenv(IMAGE_FILE_VARIABLE, raising=False)
    monkeypatch.setattr("tunebook.train.requirements.installed_version", lambda package: "2.13.0")
    found = {finding.id: finding.level for finding in check_image(machine_with(1, driver="550.1"))}
    assert found == {"container": "ok", "driver-too-old": "error"}


def test_a_damaged_image_file(tmp_path, monkeypatch):
    monkeypatch.setenv(IMAGE_FILE_VARIABLE, str(tmp_path / "absent.json"))
    (found,) = check_image(CPU_ONLY)
    assert (found.id, found.level) == ("image-file-broken", "error")


def test_the_real_torch_on_a_machine_without_gpus():
    assert check_torch(CPU_ONLY).level == "ok"


@pytest.mark.parametrize(
    ("num_gpus", "problem", "level"),
    [(2, None, "ok"), (1, "CUDA error: no kernel image is available", "error"), (0, None, "error")],
)
def test_torch_computes_on_every_gpu(num_gpus, problem, level, answer):
    answer(text=json.dumps({"version": "2.13.0", "cuda": "13.0", "num_gpus": num_gpus, "problem": problem}))
    found = check_torch(machine_with(2))
    assert found.level == level
    assert f"computes on {num_gpus} of 2 GPUs" in found.what and (problem or "") in found.what


@pytest.mark.parametrize(("kind", "level"), [(NVLINK, "ok"), (BETWEEN_SOCKETS, "warning")])
def test_links(kind, level, monkeypatch):
    monkeypatch.setattr(checks, "read_links", lambda gpus: {kind: [(0, 1)]})
    found = check_links(machine_with(2))
    assert found is not None and found.level == level


@pytest.mark.nightly
def test_a_real_all_reduce_between_processes(monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    found = check_nccl(2, "gloo")
    assert found.level == "ok"
    assert "all-reduce over 2 ranks by gloo, NCCL_P2P_DISABLE=1: " in found.what and "GB/s" in found.what


def test_ranks_that_fail_or_hang(answer):
    answer(problem="it ended with exit code 1", errors="Traceback\nCuda failure 2 'out of memory'")
    assert check_nccl(2).what.endswith("Cuda failure 2 'out of memory'")
    answer(problem="no answer within 120 s", errors="a warning", is_late=True)
    assert check_nccl(2).what.endswith("no answer within 120 s")
    assert check_nccl(2).level == "error"


@pytest.mark.parametrize(
    ("free", "num_gpus", "level"), [(2 * GIB, 8, "ok"), (2**26, 0, "warning"), (2**26, 8, "error")]
)
def test_shared_memory(free, num_gpus, level, monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    assert check_shared_memory(num_gpus, tmp_path).level == level


def test_disks(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=5 * GIB))
    found = [*check_disks(tmp_path / "outputs")]
    assert [(finding.id, finding.level) for finding in found] == [("disk-space", "warning")] * 3
    assert found[0].what == f"5 GiB free for {tmp_path / 'outputs'}"


def test_outputs_below_a_file_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    found = next(check_disks(tmp_path / "file" / "outputs"))
    assert (found.id, found.level) == ("folder-not-writable", "error")
