"""`nvidia-smi`, which may be missing, hang, fail or print nothing, and its matrix of connections."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunebook.hardware.nvidia_smi import Link, ask_nvidia_smi, ask_topology, listed_gpus, parse_topology

TOPOLOGY = Path(__file__).parent / "topologies" / "h100x8.txt"
FOLDER = Path(__file__).parent / "topologies"
FILES = sorted(file.stem for file in FOLDER.glob("*.txt"))


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """`nvidia_smi(script)` puts a replacement into PATH."""

    def install(script: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return install


def test_escape_codes_of_nvidia_smi_are_removed(nvidia_smi) -> None:
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


def read(name: str) -> str:
    return (FOLDER / f"{name}.txt").read_text()


def parsed(name: str):
    return parse_topology(read(name))


def test_eight_gpus_behind_switches_with_four_cards() -> None:
    topology = parsed("h100x8")
    assert [gpu.name for gpu in topology.gpus] == [f"GPU{n}" for n in range(8)]
    assert [card.interface for card in topology.cards] == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_bond_0"]
    connection = topology.connections["GPU0", "GPU7"]
    assert (connection.link, connection.num_nvlinks, connection.text) == (Link.nvlink, 18, "NV18")
    assert connection.words == "18 NVLinks"
    assert (topology.gpus[4].cpus, topology.gpus[4].numa) == ("56-111,168-223", "1")
    name, way = topology.nearest_card("GPU5")
    assert (name, way.text) == ("NIC2", "PXB")
    assert topology.connections["GPU5", "NIC0"].link is Link.sys


def test_a_v100_mesh_of_an_older_driver_names_cards_in_the_matrix() -> None:
    topology = parsed("v100x8")
    assert len(topology.gpus) == 8
    assert [(card.name, card.interface) for card in topology.cards] == [("mlx5_0", "mlx5_0"), ("mlx5_1", "mlx5_1")]
    assert topology.connections["GPU0", "GPU3"].text == "NV2"
    worst = topology.between_gpus()[0]
    assert worst[2].link is Link.sys
    assert len(topology.between_gpus()) == 28  # 8 x 7 / 2
    assert topology.nearest_card("GPU2")[1].link is Link.pix


def test_the_best_connection_comes_last() -> None:
    order = [connection.text for *_, connection in parsed("v100x8").between_gpus()]
    assert order == ["SYS"] * 12 + ["NV1"] * 8 + ["NV2"] * 8


def test_matrix_of_a_virtual_machine_has_no_cpus() -> None:
    gpu = parsed("virtual_machine").gpus[0]
    assert (gpu.cpus, gpu.numa) == (None, None)


def test_one_gpu_has_no_pairs() -> None:
    topology = parsed("one_gpu")
    assert topology.between_gpus() == []
    assert topology.nearest_card("GPU0") is None
    assert topology.gpus[0].cpus == "0-19"


@pytest.mark.parametrize("name", FILES)
def test_every_pair_is_connected_alike_in_both_directions(name: str) -> None:
    topology = parsed(name)
    for (one, two), connection in topology.connections.items():
        assert topology.connections[two, one] == connection
    matrix = topology.to_json()["matrix"]
    assert sum(map(len, matrix.values())) == len(topology.devices) * (len(topology.devices) - 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no line of it lists GPUs; it begins with ''"),
        ("Unable to determine the device handle for GPU0000:4D:00.0: GPU is lost.", "begins with 'Unable to determine"),
        ("\x00\x01garbage\t\t", "no line of it lists GPUs"),
        ("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV4\t0-3\n", "the row of GPU1 is missing"),
        ("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \nGPU1\tNV4\t X \t0-3\n", "the row of GPU0 has 1 cells for 2 devices"),
        ("\tGPU0\tGPU1\nGPU0\t X \tNV\nGPU1\tNV\t X \n", "the cell of GPU0 and GPU1 is 'NV'"),
        ("\tGPU0\tGPU1\nGPU0\t X \t X \nGPU1\tNV1\t X \n", "the cell of GPU0 and GPU1 is 'X'"),
        ("\tGPU0\tGPU1\nGPU0\t X \tNV18\nGPU1\tNV1\t X \n", "GPU0 to GPU1 is NV18, and back NV1"),
        ("\tGPU0\tGPU1\nGPU0\tPIX\tPIX\nGPU1\tPIX\t X \n", "the cell of GPU0 and GPU0 is 'PIX'"),
    ],
)
def test_text_without_a_matrix_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        parse_topology(text)


@pytest.mark.parametrize("name", FILES)
def test_truncated_matrix_never_crashes(name: str) -> None:
    text = read(name)
    outcomes = set()
    for end in range(0, len(text), 7):
        try:
            parse_topology(text[:end])
            outcomes.add("read")
        except ValueError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}
