"""`nvidia-smi topo -m`, in the forms in which drivers print it, and when it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunebook.hardware.topology import Link, parse_topology

FOLDER = Path(__file__).parent / "topologies"
FILES = sorted(file.stem for file in FOLDER.glob("*.txt"))


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


def test_a_virtual_machine_says_nothing_of_cpus() -> None:
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
def test_what_is_no_matrix_is_refused_with_its_words(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        parse_topology(text)


@pytest.mark.parametrize("name", FILES)
def test_one_that_is_cut_off_anywhere_is_refused_or_read_never_a_crash(name: str) -> None:
    text = read(name)
    outcomes = set()
    for end in range(0, len(text), 7):
        try:
            parse_topology(text[:end])
            outcomes.add("read")
        except ValueError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}
