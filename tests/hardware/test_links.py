"""How GPUs are connected, with NVML's answers replaced."""

from __future__ import annotations

import pynvml
import pytest

from tunebook.config.choices import Generation
from tunebook.hardware.detect import Gpu
from tunebook.hardware.links import BETWEEN_SOCKETS, NVLINK, links_text, read_links


def gpus(number: int, *, is_mig: bool = False) -> list[Gpu]:
    facts = {"name": "NVIDIA H200", "memory_gib": 140.4, "compute_capability": (9, 0), "generation": Generation.hopper}
    return [Gpu(index=index, is_mig=is_mig, **facts) for index in range(number)]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch):
    """`nvml(levels, nvlinks)` makes NVML answer with these levels of PCIe and these pairs with NVLink."""

    def install(levels: dict[tuple[int, int], int], nvlinks: set[tuple[int, int]] | None = None) -> None:
        def p2p_status(first: int, second: int, _index: int) -> int:
            if nvlinks is None:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return pynvml.NVML_P2P_STATUS_OK if (first, second) in nvlinks else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED

        answers = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetP2PStatus": p2p_status,
            "nvmlDeviceGetTopologyCommonAncestor": lambda first, second: levels[first, second],
        }
        for name, answer in answers.items():
            monkeypatch.setattr(pynvml, name, answer)

    return install


def test_nvlink_between_all(nvml):
    nvml({}, {(0, 1), (0, 2), (1, 2)})
    links = read_links(gpus(3))
    assert links == {NVLINK: [(0, 1), (0, 2), (1, 2)]}
    assert links_text(links) == "NVLink: all pairs"


def test_pcie_over_two_sockets(nvml):
    system, bridge = pynvml.NVML_TOPOLOGY_SYSTEM, pynvml.NVML_TOPOLOGY_HOSTBRIDGE
    nvml({(0, 1): pynvml.NVML_TOPOLOGY_SINGLE, (0, 2): system, (1, 2): bridge})
    links = read_links(gpus(3))
    assert links == {"PCIe switches": [(0, 1)], BETWEEN_SOCKETS: [(0, 2)], "PCIe through the CPU": [(1, 2)]}
    assert links_text(links).startswith("PCIe switches: 0-1; ")


def test_one_gpu_and_slices_have_no_links(nvml):
    nvml({})
    assert read_links(gpus(1)) == read_links(gpus(2, is_mig=True)) == {}
    assert links_text({}) == ""
