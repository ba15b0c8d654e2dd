"""How the GPUs of this machine are connected, by NVML, for `doctor` and the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from types import ModuleType
from typing import Any

from tunebook.hardware.detect import Gpu

NVLINK = "NVLink"
BETWEEN_SOCKETS = "PCIe and the connection between CPU sockets"


def read_links(gpus: Sequence[Gpu]) -> dict[str, list[tuple[int, int]]]:
    """The pairs of GPUs, by NVML's indices, for each kind of connection. Empty if NVML does not answer.

    The slices of a split GPU are not connected.
    """
    import pynvml

    links: dict[str, list[tuple[int, int]]] = {}
    try:
        pynvml.nvmlInit()
        try:
            whole = {gpu.index: pynvml.nvmlDeviceGetHandleByIndex(gpu.index) for gpu in gpus if not gpu.is_mig}
            for first, second in combinations(whole, 2):
                links.setdefault(_connection(pynvml, whole[first], whole[second]), []).append((first, second))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return {}
    return links


def links_text(links: dict[str, list[tuple[int, int]]]) -> str:
    """Such as `NVLink: all pairs`, or each kind of connection with its pairs."""
    if len(links) == 1:
        return f"{next(iter(links))}: all pairs"
    return "; ".join(
        f"{kind}: {', '.join(f'{first}-{second}' for first, second in pairs)}" for kind, pairs in links.items()
    )


def _connection(nvml: ModuleType, first: Any, second: Any) -> str:
    try:
        if nvml.nvmlDeviceGetP2PStatus(first, second, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK:
            return NVLINK
    except nvml.NVMLError:  # not supported by this GPU
        pass
    level = nvml.nvmlDeviceGetTopologyCommonAncestor(first, second)
    if level <= nvml.NVML_TOPOLOGY_MULTIPLE:
        return "PCIe switches"
    return "PCIe through the CPU" if level < nvml.NVML_TOPOLOGY_SYSTEM else BETWEEN_SOCKETS
