"""Machines for the tests: GPUs as detected and as NVML reports them, healthy by default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tunebook.config.choices import Generation
from tunebook.config.compose import compose
from tunebook.config.schema import RunConfig
from tunebook.doctor.findings import Finding
from tunebook.hardware.bandwidth import OPERATIONS, Bandwidth, Measurement
from tunebook.hardware.detect import Gpu, Machine
from tunebook.hardware.nvidia_smi import Topology, parse_topology
from tunebook.plan.auto.resolve import resolve_auto

TOPOLOGIES = Path(__file__).parents[1] / "hardware" / "topologies"
CPU_ONLY = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0, notes=["no NVIDIA driver answers here"])


def h200(index: int = 0, **changes: Any) -> Gpu:
    facts: dict[str, Any] = {
        "name": "NVIDIA H200", "memory_gib": 140.4, "compute_capability": (9, 0), "generation": Generation.hopper,
        "index": index, "uuid": f"GPU-{index}",
    }  # fmt: skip
    return Gpu(**facts | changes)


def machine_with(*gpus: Gpu, driver: str = "580.159.04", notes: tuple[str, ...] = ()) -> Machine:
    return Machine(gpus=list(gpus), driver=driver, num_cpus=64, host_memory_gib=512.0, notes=list(notes))


def health(index: int = 0, **changes: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "index": index, "problem": None, "used_gib": 0.5, "total_gib": 140.4, "processes": [], "persistence": True,
        "compute_mode": "default", "mig": False, "ecc": True, "uncorrected_since_start": 0, "uncorrected_ever": 0,
        "remapping": {"correctable": 0, "uncorrectable": 0, "is_pending": False, "has_failed": False},
        "retirement_pending": None, "pcie_width": 16, "pcie_max_width": 16,
    }  # fmt: skip
    return facts | changes


def topology_of(name: str) -> Topology:
    return parse_topology((TOPOLOGIES / f"{name}.txt").read_text())


def measured(*bus: float, sizes: tuple[int, ...] = (2**30,), num_ranks: int = 4, **changes: Any) -> Bandwidth:
    """A measurement with these bus bandwidths in GB/s, one per size, the same for both operations."""
    speeds = bus if len(bus) == len(sizes) else bus * len(sizes)
    found = [
        Measurement(operation=operation, bytes=size, runs=3, seconds=1.0, algorithm_gb_per_s=speed, bus_gb_per_s=speed)
        for size, speed in zip(sizes, speeds, strict=True)
        for operation in OPERATIONS
    ]
    facts: dict[str, Any] = {"backend": "nccl", "num_ranks": num_ranks, "measurements": found}
    return Bandwidth(**facts | changes)


def resolved(recipe: str, *overrides: str, machine: Machine = CPU_ONLY) -> RunConfig:
    return resolve_auto(compose(recipe, list(overrides)).config, machine).config


def only(findings: list[Finding], id: str) -> Finding:
    """The one finding with an id."""
    (found,) = [finding for finding in findings if finding.id == id]
    return found


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = (
        "CUDA_VISIBLE_DEVICES", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "TRANSFORMERS_OFFLINE", "NCCL_P2P_DISABLE",
        "KUBERNETES_SERVICE_HOST", "container",
    )  # fmt: skip
    for name in variables:
        monkeypatch.delenv(name, raising=False)
