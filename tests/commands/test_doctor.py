"""`tunebook doctor` on this machine, and its output."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tunebook.commands import doctor as command
from tunebook.commands.doctor import doctor_command
from tunebook.doctor.checks import Finding
from tunebook.hardware.detect import Machine

CPU_ONLY = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0)


@pytest.fixture
def levels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, str]]:
    """`levels()`: the level of each finding on a machine without GPUs."""
    monkeypatch.setattr(command, "check_driver", lambda: (CPU_ONLY, Finding(id="gpus-found", what="no GPU")))
    monkeypatch.setattr(command, "check_torch", lambda machine: Finding(id="torch-works", what="torch"))

    def run() -> dict[str, str]:
        findings = list(command.diagnose(tmp_path))
        assert all((finding.fix is None) == (finding.level == "ok") for finding in findings)
        return {finding.id: finding.level for finding in findings}

    return run


def test_the_machine_is_checked_and_an_error_is_the_exit_code(levels, tmp_path, monkeypatch):
    assert set(levels()) == {"gpus-found", "container", "torch-works", "shm-size", "disk-space"}
    for is_error, code in ((False, 0), (True, 2)):
        found = Finding(id="torch-works", what="torch", fix="fix", is_error=is_error)
        monkeypatch.setattr(command, "check_torch", lambda machine, found=found: found)
        console = Console(file=io.StringIO())
        assert doctor_command(tmp_path, console) == code
        assert f"{int(is_error)} error" in console.file.getvalue()


@pytest.mark.parametrize("torch_works", [True, False])
def test_nccl_is_tried_where_torch_works_on_several_gpus(torch_works, levels, monkeypatch):
    ranks: list[int] = []
    torch = Finding(id="torch-works", what="torch", fix=None if torch_works else "fix", is_error=not torch_works)
    machine = Machine(gpus=[None] * 2, driver="580", num_cpus=2, host_memory_gib=8.0)  # type: ignore[list-item]
    monkeypatch.setattr(command, "check_driver", lambda: (machine, torch))
    monkeypatch.setattr(command, "check_image", lambda machine: iter(()))
    monkeypatch.setattr(command, "check_torch", lambda machine: torch)
    monkeypatch.setattr(command, "check_links", lambda machine: Finding(id="links", what="NVLink"))
    monkeypatch.setattr(command, "check_nccl", lambda num: (ranks.append(num), Finding(id="nccl", what="right"))[1])
    levels()
    assert ranks == ([2] if torch_works else [])
