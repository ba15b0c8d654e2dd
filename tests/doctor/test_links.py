"""The findings about connections and measured bandwidths."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tunebook.doctor.findings import Level
from tunebook.doctor.links import check_bandwidth, check_topology, not_measured
from tunebook.hardware.nvidia_smi import parse_topology
from tunebook.processes import Answer

from .conftest import CPU_ONLY, TOPOLOGIES, h200, machine_with, measured, only, topology_of

EIGHT = machine_with(*(h200(index) for index in range(8)))


def look(name: str, num_gpus: int, num_nodes: int = 1, first: int = 0):
    text = (TOPOLOGIES / f"{name}.txt").read_text()
    machine = machine_with(*(h200(index) for index in range(first, first + num_gpus)))
    return check_topology(machine, Answer(text=text), num_nodes)[1]


def test_nvlink_everywhere() -> None:
    found = only(look("h100x8", 8), "topology")
    assert (found.level, found.what) == (Level.ok, "the GPUs are connected by NV18 (18 NVLinks)")
    assert len(found.data["pairs"]) == 28


def test_nvlink_reaches_every_gpu_through_others() -> None:
    found = only(look("v100x8", 8), "topology")
    assert found.level is Level.ok
    assert "NV2 (2 NVLinks) and NV1 (1 NVLink) and SYS" in found.what


def test_two_gpus_of_the_mesh_without_nvlinks() -> None:
    text = (TOPOLOGIES / "v100x8.txt").read_text()
    machine = machine_with(h200(0), h200(7))
    _, (found, _) = check_topology(machine, Answer(text=text), 1)
    assert found.level is Level.warning
    assert "GPU0 and GPU7 are on different CPU sockets" in found.what


def test_over_two_sockets_the_gpus_of_one_are_named() -> None:
    found = only(look("pcie_two_sockets", 4), "topology")
    assert found.level is Level.warning
    assert "CUDA_VISIBLE_DEVICES=GPU-0,GPU-1 in front" in found.fix
    assert only(look("pcie_two_sockets", 2), "topology").level is Level.ok  # both on one


def test_only_gpus_that_are_seen_count() -> None:
    found = only(look("pcie_two_sockets", 2, first=2), "topology")
    assert (found.level, list(found.data["pairs"])) == (Level.ok, ["GPU2-GPU3"])


def test_one_gpu() -> None:
    assert only(look("one_gpu", 1), "topology").what.startswith("one GPU")


def test_the_nearest_cards() -> None:
    found = only(look("h100x8", 8), "network-cards")
    assert found.level is Level.ok
    assert found.what.startswith("4 network cards; the nearest: GPU0 mlx5_0 (PXB), GPU1 mlx5_0 (PXB), GPU2 mlx5_1")
    assert found.data["nearest"]["GPU7"] == {"card": "mlx5_bond_0", "link": "PXB"}


def test_a_card_on_the_other_socket_matters_only_between_nodes() -> None:
    text = (
        "\tGPU0\tGPU1\tNIC0\tCPU Affinity\nGPU0\t X \tNV4\tPIX\t0-3\nGPU1\tNV4\t X \tSYS\t4-7\nNIC0\tPIX\tSYS\t X \t\n"
    )
    machine, answer = machine_with(h200(0), h200(1)), Answer(text=text)
    assert only(check_topology(machine, answer, 1)[1], "network-cards").level is Level.ok
    found = only(check_topology(machine, answer, 2)[1], "network-cards")
    assert (found.level, "GPU1 reach one only over" in found.what) == (Level.warning, True)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer(text="", problem="there is no nvidia-smi"), "there is no nvidia-smi"),
        (Answer(text="", problem="no answer within 40 s"), "no answer within 40 s"),
        (Answer(text="GPU is lost\n"), "something else than a matrix"),
        (Answer(text="\x00\x7f"), "something else than a matrix"),
    ],
)
def test_without_a_matrix_it_is_a_warning(answer: Answer, said: str) -> None:
    topology, (found,) = check_topology(machine_with(h200(0), h200(1)), answer, 1)
    assert topology is None
    assert (found.id, found.level) == ("topology", Level.warning)
    assert said in found.what
    assert check_topology(CPU_ONLY, answer, 1) == (None, [])
    _, (alone,) = check_topology(machine_with(h200(0)), answer, 1)
    assert (alone.level, alone.what) == (Level.ok, "one GPU: it needs no link to another")
    _, (of_several_nodes,) = check_topology(machine_with(h200(0)), answer, 2)
    assert of_several_nodes.level is Level.warning, "its link to a network card is not known"


def test_a_bandwidth_that_such_links_reach() -> None:
    (found,) = check_bandwidth(measured(360.0), topology_of("h100x8"), EIGHT)
    assert found.level is Level.ok
    assert found.what == "4 GPUs: all-reduce 360 GB/s at 1 GiB, all-gather 360 GB/s at 1 GiB (bus bandwidth)"


@pytest.mark.parametrize(("speed", "level"), [(224.0, Level.warning), (226.0, Level.ok)])  # half of 18 x 25 is 225
def test_half_of_what_nvlinks_carry_is_too_slow(speed: float, level: Level) -> None:
    (found,) = check_bandwidth(measured(speed), topology_of("h100x8"), EIGHT)
    assert found.level is level
    assert ("reach at least 225 GB/s" in found.what) is (level is Level.warning)


def test_pair_with_the_fewest_nvlinks_decides() -> None:
    text = "\tGPU0\tGPU1\tGPU2\nGPU0\t X \tNV4\tNV2\nGPU1\tNV4\t X \tNV4\nGPU2\tNV2\tNV4\t X \n"
    (found,) = check_bandwidth(
        measured(26.0, num_ranks=3), parse_topology(text), EIGHT
    )  # above half of 2 x 25, below of 4
    assert found.level is Level.ok


@pytest.mark.parametrize(("speed", "level"), [(4.9, Level.warning), (5.1, Level.ok)])
def test_pcie_has_a_floor_too(speed: float, level: Level) -> None:
    (found,) = check_bandwidth(measured(speed), topology_of("pcie_two_sockets"), EIGHT)
    assert found.level is level


def test_without_a_matrix_there_is_no_floor() -> None:
    (found,) = check_bandwidth(measured(0.1), None, EIGHT)
    assert found.level is Level.ok


def test_cpu_ranks_are_not_judged() -> None:
    (found,) = check_bandwidth(measured(0.1, backend="gloo", num_ranks=2), topology_of("h100x8"), EIGHT)
    assert found.level is Level.ok
    assert found.what.startswith("2 CPU ranks: ")
    assert "says nothing about GPUs" in found.what


def test_a_link_that_hangs_is_an_error_and_names_what_to_try() -> None:
    bandwidth = measured(300.0, problem="no answer within 120 s", is_late=True)
    (found,) = check_bandwidth(bandwidth, None, EIGHT)
    assert found.level is Level.error
    assert "no answer within 120 s (after 2 measurements)" in found.what
    assert "NCCL_P2P_DISABLE=1" in found.fix


def test_links_too_slow_for_a_second_measurement_are_judged_by_the_first() -> None:
    both = measured(0.1)
    (found,) = check_bandwidth(replace(both, measurements=both.measurements[:1]), topology_of("h100x8"), EIGHT)
    assert found.level is Level.warning
    assert found.what.startswith("4 GPUs: all-reduce 0.1 GB/s at 1 GiB (bus bandwidth); such links reach")


def test_ranks_that_fail() -> None:
    bandwidth = measured(sizes=(), problem="it ended with exit code 1; rank 0: No space left on device")
    (found,) = check_bandwidth(bandwidth, None, EIGHT)
    assert found.level is Level.error
    assert "rank 0: No space left on device (before the first measurement)" in found.what
    assert "/dev/shm" in found.fix


def test_wrong_sums_are_an_error_whatever_the_speed() -> None:
    findings = check_bandwidth(measured(360.0, wrong=["rank 1: all_reduce of 8 bytes"]), topology_of("h100x8"), EIGHT)
    assert only(findings, "wrong-sums").level is Level.error
    assert "rank 1: all_reduce of 8 bytes" in only(findings, "wrong-sums").what
    assert only(findings, "bandwidth").level is Level.ok


@pytest.mark.parametrize(
    ("seen", "expected"),
    [((0, 1, 2, 3), "reach at least 5 GB/s"), ((0, 1), "reach at least 50 GB/s")],  # half of 4 x 25
)
def test_only_links_between_gpus_that_are_seen_are_expected(seen: tuple[int, ...], expected: str) -> None:
    """Two pairs of GPUs, each with an NVLink bridge, and PCIe between the pairs."""
    text = (
        "\tGPU0\tGPU1\tGPU2\tGPU3\nGPU0\t X \tNV4\tPHB\tPHB\nGPU1\tNV4\t X \tPHB\tPHB\n"
        "GPU2\tPHB\tPHB\t X \tNV4\nGPU3\tPHB\tPHB\tNV4\t X \n"
    )
    machine = machine_with(*map(h200, seen))
    (found,) = check_bandwidth(measured(4.0, num_ranks=len(seen)), parse_topology(text), machine)
    assert (found.level, expected in found.what) == (Level.warning, True)


@pytest.mark.parametrize(
    ("gpus", "free", "said", "fix"),
    [
        ([h200(0), h200(1)], [139.0, 3.9], "only 3.9 GiB of free memory", "free the GPUs and type the same again"),
        ([h200(0), h200(1)], [139.0], "CUDA does not work on all GPUs", "fix the CUDA problem above (tunebook explain "
         "cuda-works), then run doctor again"),
        ([h200(0, is_mig=True), h200(1)], [9.0, 9.0], "NCCL connects no MIG slices", "for whole GPUs, with nothing on "
         "them: sudo nvidia-smi -i 0 -mig 0"),
        ([h200(0), h200(1, name="NVIDIA A100", compute_capability=(8, 0)), h200(2)], [9.0] * 3, "different kinds",
         "CUDA_VISIBLE_DEVICES=GPU-0,GPU-2 in front of the command"),
    ],
    ids=["memory", "cuda", "slices", "kinds"],
)  # fmt: skip
def test_what_cannot_be_measured(gpus: list, free: list[float], said: str, fix: str) -> None:
    found = not_measured(machine_with(*gpus), free)
    assert found is not None
    assert (found.level, said in found.what, found.fix) == (Level.warning, True, fix)


def test_free_gpus_of_one_kind_are_measured() -> None:
    assert not_measured(machine_with(h200(0), h200(1)), [139.0, 139.0]) is None
