"""`nvidia-smi`, which may answer, be absent, hang, fail, or print nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunebook.hardware.nvidia_smi import ask_nvidia_smi, listed_gpus
from tunebook.hardware.topology import ask_topology, parse_topology

TOPOLOGY = Path(__file__).parent / "topologies" / "h100x8.txt"


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """`nvidia_smi(script)` puts a stand-in into an otherwise usual PATH."""

    def install(script: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return install


def test_the_command_is_asked_and_its_escape_codes_taken_away(nvidia_smi) -> None:
    nvidia_smi(f'[ "$*" = "topo -m" ] && cat {TOPOLOGY}')
    answer = ask_topology()
    assert answer.problem is None
    assert "\x1b" not in answer.text
    assert len(parse_topology(answer.text).devices) == 12


def test_it_is_absent(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ask_topology().problem == "there is no nvidia-smi"


def test_it_hangs(nvidia_smi) -> None:
    nvidia_smi("trap '' TERM; sleep 300")
    assert ask_topology(timeout_s=0.5).problem == "no answer within 0.5 s"


def test_it_fails(nvidia_smi) -> None:
    nvidia_smi("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    assert ask_topology().problem == (
        "it ended with exit code 18: Failed to initialize NVML: Driver/library version mismatch"
    )


def test_it_says_nothing(nvidia_smi) -> None:
    nvidia_smi("echo")
    assert ask_topology().problem == "it printed nothing"


def test_the_gpus_of_a_listing_without_their_slices() -> None:
    text = (
        "GPU 0: NVIDIA A30 (UUID: GPU-1)\n  MIG 1g.6gb      Device  0: (UUID: MIG-2)\nGPU 1: NVIDIA A30 (UUID: GPU-3)"
    )
    assert listed_gpus(text) == ["GPU 0: NVIDIA A30 (UUID: GPU-1)", "GPU 1: NVIDIA A30 (UUID: GPU-3)"]
    assert listed_gpus("No devices found.") == []


def test_its_arguments_are_passed_on(nvidia_smi) -> None:
    nvidia_smi('echo "$*"')
    assert ask_nvidia_smi("-L", "-i", "0").text == "-L -i 0"
