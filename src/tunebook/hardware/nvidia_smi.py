"""The output of `nvidia-smi`: the GPUs, and how GPUs and network cards are connected (`nvidia-smi topo -m`).

The program may be missing, hang, fail, or print something unexpected. The topology is a matrix with tabs between its
cells: one row and column per GPU and card, then columns about the CPU. Since driver 520 the cards are called NIC0,
NIC1, ... with a legend; before, their names were in the matrix.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tunebook.processes import Answer, ask

_DEVICE = re.compile(r"GPU\d+|NIC\d+|\w+_\w+|[a-z]\w*\d")  # GPU0, NIC0; before driver 520 mlx5_0, mlx5_bond_0
_NOTHING = ("", "N/A")
PROGRAM = "nvidia-smi"
ABSENT = f"there is no {PROGRAM}"
TIMEOUT_S = 40.0  # 8 GPUs without persistence mode take 10 s and more
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")  # it underlines headers
_GPU = re.compile(r"^GPU \d+: .+$", re.MULTILINE)  # GPU 0: NVIDIA H200 (UUID: GPU-...)


class Link(Enum):
    """How two devices are connected, best first. Source: the legend of the command's output."""

    nvlink = "NV#"  # so many NVLinks
    pix = "PIX"  # at most one PCIe bridge
    pxb = "PXB"  # several PCIe bridges
    phb = "PHB"  # the CPU's PCIe root
    node = "NODE"  # two PCIe roots of one NUMA node
    sys = "SYS"  # the connection between CPU sockets


_WORDS = {
    Link.pix: "one PCIe switch",
    Link.pxb: "several PCIe switches",
    Link.phb: "PCIe through the CPU",
    Link.node: "PCIe through the CPU's own interconnect",
    Link.sys: "PCIe and the connection between CPU sockets",
}


@dataclass(frozen=True, kw_only=True)
class Connection:
    """How two devices are connected."""

    link: Link
    num_nvlinks: int = 0

    @property
    def text(self) -> str:
        """As nvidia-smi writes it, such as NV18."""
        return f"NV{self.num_nvlinks}" if self.link is Link.nvlink else self.link.value

    @property
    def words(self) -> str:
        """The connection in words."""
        nvlinks = f"{self.num_nvlinks} NVLink{'s' if self.num_nvlinks != 1 else ''}"
        return nvlinks if self.link is Link.nvlink else _WORDS[self.link]

    @property
    def rank(self) -> tuple[int, int]:
        """Sorts the best first."""
        return [*Link].index(self.link), -self.num_nvlinks


@dataclass(frozen=True, kw_only=True)
class Device:
    """A row of the matrix: a GPU with its CPU and NUMA affinity, or a network card with its interface."""

    name: str
    is_gpu: bool
    cpus: str | None = None
    numa: str | None = None
    interface: str | None = None  # of a network card: mlx5_0


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The matrix; `connections` has both directions of every pair."""

    devices: list[Device]
    connections: dict[tuple[str, str], Connection]

    @property
    def gpus(self) -> list[Device]:
        """The GPUs."""
        return [device for device in self.devices if device.is_gpu]

    @property
    def cards(self) -> list[Device]:
        """The network cards."""
        return [device for device in self.devices if not device.is_gpu]

    def between_gpus(self) -> list[tuple[str, str, Connection]]:
        """Every pair of GPUs once, the worst connected first."""
        names = [gpu.name for gpu in self.gpus]
        pairs = [(one, two) for place, one in enumerate(names) for two in names[place + 1 :]]
        found = [(one, two, self.connections[one, two]) for one, two in pairs if (one, two) in self.connections]
        return sorted(found, key=lambda pair: pair[2].rank, reverse=True)

    def nearest_card(self, gpu: str) -> tuple[str, Connection] | None:
        """The best connected network card of a GPU; None without any."""
        found = [(card.name, self.connections[gpu, card.name]) for card in self.cards]
        return min(found, key=lambda pair: pair[1].rank) if found else None

    def to_json(self) -> dict[str, Any]:
        """The devices and the matrix."""
        return {
            "devices": [
                {
                    "name": device.name,
                    "kind": "gpu" if device.is_gpu else "network card",
                    "cpus": device.cpus,
                    "numa": device.numa,
                    "interface": device.interface,
                }
                for device in self.devices
            ],
            "matrix": {
                one.name: {
                    two.name: self.connections[one.name, two.name].text for two in self.devices if one is not two
                }
                for one in self.devices
            },
        }


def ask_topology(timeout_s: float = TIMEOUT_S) -> Answer:
    """The output of `nvidia-smi topo -m`. Never raises."""
    return ask_nvidia_smi("topo", "-m", timeout_s=timeout_s)


def parse_topology(text: str) -> Topology:
    """Parse the matrix. Raises: ValueError with the invalid text."""
    lines = plain(text).splitlines()
    start = next((place for place, line in enumerate(lines) if _is_header(line)), None)
    if start is None:
        first = next((line.strip() for line in lines if line.strip()), "")
        raise ValueError(f"no line of it lists GPUs; it begins with {first[:80]!r}")
    names = _header_names(lines[start])
    rows = {}
    for line in lines[start + 1 : start + 1 + len(names)]:
        name, *cells = [cell.strip() for cell in line.split("\t")]
        rows[name] = cells
    if missing := [name for name in names if name not in rows]:
        raise ValueError(f"it was cut off: the row of {missing[0]} is missing")
    interfaces = _interfaces(lines[start + 1 + len(names) :])
    devices = [_device(name, rows[name][len(names) :], interfaces) for name in names]
    return Topology(devices=devices, connections=_connections(names, rows))


def _is_header(line: str) -> bool:
    cells = [cell.strip() for cell in line.split("\t")]
    return len(cells) > 1 and "GPU0" in cells and cells[0] in ("", "GPU0") and "X" not in cells


def _header_names(header: str) -> list[str]:
    """The devices, without the following columns about the CPU, whose names contain a blank."""
    names = []
    for cell in (cell.strip() for cell in header.strip().split("\t")):
        if not _DEVICE.fullmatch(cell):
            break
        names.append(cell)
    return names


def _connections(names: list[str], rows: dict[str, list[str]]) -> dict[tuple[str, str], Connection]:
    found = {}
    for one in names:
        cells = rows[one]
        if len(cells) < len(names):
            raise ValueError(f"the row of {one} has {len(cells)} cells for {len(names)} devices")
        for two, cell in zip(names, cells, strict=False):
            if (one == two) != (cell == "X"):
                raise ValueError(f"the cell of {one} and {two} is {cell!r}")
            if one != two:
                found[one, two] = _connection(cell, one, two)
    for (one, two), connection in found.items():
        if found[two, one] != connection:  # a truncated row
            raise ValueError(f"{one} to {two} is {connection.text}, and back {found[two, one].text}")
    return found


def _connection(cell: str, one: str, two: str) -> Connection:
    if match := re.fullmatch(r"NV(\d+)", cell):
        return Connection(link=Link.nvlink, num_nvlinks=int(match[1]))
    if cell in [link.value for link in Link]:
        return Connection(link=Link(cell))
    raise ValueError(f"the cell of {one} and {two} is {cell!r}")


def _device(name: str, after: list[str], interfaces: dict[str, str]) -> Device:
    if not name.startswith("GPU"):
        own = None if name.startswith("NIC") else name
        return Device(name=name, is_gpu=False, interface=interfaces.get(name, own))
    cpus, numa = ([*after, "", ""])[:2]
    return Device(
        name=name,
        is_gpu=True,
        cpus=None if cpus in _NOTHING else cpus,
        numa=None if numa in _NOTHING else numa,
    )


def _interfaces(lines: list[str]) -> dict[str, str]:
    """The legend of the network cards: `  NIC0: mlx5_0`."""
    found = (re.fullmatch(r"\s*(NIC\d+):\s*(\S+)\s*", line) for line in lines)
    return {match[1]: match[2] for match in found if match}


def ask_nvidia_smi(*arguments: str, timeout_s: float = TIMEOUT_S) -> Answer:
    """Run `nvidia-smi` with these arguments; the text is without escape codes, and empty if there is a problem.

    Never raises, and never exceeds the time limit.
    """
    if shutil.which(PROGRAM) is None:
        return Answer(text="", problem=ABSENT)
    answer = ask([PROGRAM, *arguments], timeout_s=timeout_s)
    if answer.problem is not None:
        return Answer(text="", problem=answer.failure)
    text = plain(answer.text).strip("\n")
    return Answer(text=text, problem=None if text.strip() else "it printed nothing")


def plain(text: str) -> str:
    """The text without escape codes."""
    return _ESCAPE.sub("", text)


def listed_gpus(text: str) -> list[str]:
    """The GPUs in the output of `nvidia-smi -L`, a line each, without the indented MIG slices."""
    return _GPU.findall(text)
