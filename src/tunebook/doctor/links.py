"""How the GPUs are connected, and the measured bandwidth."""

from __future__ import annotations

from typing import Any

from tunebook.doctor.findings import Finding, Kind
from tunebook.hardware.bandwidth import ALL_GATHER, ALL_REDUCE, Bandwidth, Measurement
from tunebook.hardware.detect import VISIBLE_VARIABLE, Gpu, Machine, equal_gpus, visible_only
from tunebook.hardware.disk import size_text
from tunebook.hardware.nvidia_smi import Connection, Link, Topology, parse_topology
from tunebook.processes import Answer

# One link in one direction, NVLink 2 to 4 (V100, A100, H100); NVLink 5 has twice that. Source: NVIDIA's datasheets.
_NVLINK_GB_PER_S = 25.0
# Rings reach 70% to 80% of it. Less than half means that NCCL uses another path.
_NVLINK_SHARE = 0.5
# PCIe 3 x 16 reaches 10 and more between GPUs. Less means a detour through host memory, or few lanes.
_PCIE_GB_PER_S = 5.0


def check_topology(machine: Machine, answer: Answer, num_nodes: int) -> tuple[Topology | None, list[Finding]]:
    """Parse the output of nvidia-smi, and judge the links between the GPUs that this process sees.

    Returns the matrix, if there is one, and the findings.
    """
    problem = answer.problem
    topology = None
    if problem is None:
        try:
            topology = parse_topology(answer.text)
        except ValueError as error:
            problem = f"it printed something else than a matrix: {error}"
    if topology is None:
        needs_no_link = len(machine.gpus) == 1 and num_nodes == 1  # whatever the matrix would say
        unknown = _single() if needs_no_link else _unknown(str(problem))
        return None, [unknown] if machine.gpus else []
    cards = [_cards(machine, topology, num_nodes)] if topology.cards else []
    return topology, [_between(machine, topology), *cards]


def _single() -> Finding:
    return Kind.links.ok(id="topology", what="one GPU: it needs no link to another")


def _unknown(problem: str) -> Finding:
    return Kind.links.warning(
        id="topology",
        what=f"how the GPUs are connected is not known: nvidia-smi topo -m: {problem}",
        fix="nvidia-smi topo -m by itself; in a container it needs NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        data={"problem": problem},
    )


def _between(machine: Machine, topology: Topology) -> Finding:
    pairs = _pairs(machine, topology)
    if not pairs:
        return _single()
    worst_one, worst_two, worst = pairs[0]
    kinds = sorted({connection for *_, connection in pairs}, key=lambda connection: connection.rank)
    data = {"pairs": {f"{one}-{two}": connection.text for one, two, connection in pairs}}
    what = " and ".join(f"{connection.text} ({connection.words})" for connection in kinds)
    if worst.link is not Link.sys or _all_reach_each_other(pairs):
        return Kind.links.ok(id="topology", what=f"the GPUs are connected by {what}", data=data)
    near = visible_only(_same_socket(machine, topology))
    return Kind.links.warning(
        id="topology",
        what=f"the GPUs are connected by {what}; {worst_one} and {worst_two} are on different CPU sockets, which slows "
        "every collective operation",
        fix=f"for a run on one socket: {near} in front of the command; over all of them a strategy "
        "that communicates once a step (parallelism=ddp or zero2) rather than in every layer (zero3, fsdp)",
        data=data,
    )


def _pairs(machine: Machine, topology: Topology) -> list[tuple[str, str, Connection]]:
    """Every pair of GPUs that this process sees, the worst connected first."""
    visible = {_name(gpu) for gpu in machine.gpus}
    return [pair for pair in topology.between_gpus() if pair[0] in visible and pair[1] in visible]


def _name(gpu: Gpu) -> str:
    """The name in the matrix."""
    return f"GPU{gpu.index}"


def _all_reach_each_other(pairs: list[tuple[str, str, Connection]]) -> bool:
    """True if NVLinks connect each GPU with every other, directly or over others, as NCCL's rings do."""
    names = {name for one, two, _ in pairs for name in (one, two)}
    reached = {min(names)}
    while True:
        more = {
            name
            for one, two, connection in pairs
            if connection.link is Link.nvlink and {one, two} & reached
            for name in (one, two)
        }
        if more <= reached:
            return reached == names
        reached |= more


def _same_socket(machine: Machine, topology: Topology) -> list[Gpu]:
    """The largest group of GPUs of one kind with no connection between sockets among them."""
    best: list[Gpu] = []
    gpus = [gpu for gpu in equal_gpus(machine.gpus) if _name(gpu) in {device.name for device in topology.gpus}]
    for one in gpus:
        near = [two for two in gpus if two is one or not _is_between_sockets(topology, one, two)]
        best = max(best, near, key=len)
    return best


def _is_between_sockets(topology: Topology, one: Gpu, two: Gpu) -> bool:
    connection = topology.connections.get((_name(one), _name(two)))  # none between slices of one GPU
    return connection is not None and connection.link is Link.sys


def _cards(machine: Machine, topology: Topology, num_nodes: int) -> Finding:
    """The network cards, over which several nodes communicate. Best is one on the GPU's own PCIe switch."""
    nearest = {}
    for gpu in machine.gpus:
        name = _name(gpu)
        if name in {device.name for device in topology.gpus} and (card := topology.nearest_card(name)) is not None:
            nearest[name] = card
    interfaces = {card.name: card.interface or card.name for card in topology.cards}
    data = {name: {"card": interfaces[card], "link": link.text} for name, (card, link) in nearest.items()}
    far = [name for name, (_, link) in nearest.items() if link.link is Link.sys]
    text = ", ".join(f"{name} {interfaces[card]} ({link.text})" for name, (card, link) in nearest.items())
    what = f"{len(topology.cards)} network card{'s' if len(topology.cards) > 1 else ''}; the nearest: {text}"
    if not far or num_nodes == 1:
        return Kind.links.ok(id="network-cards", what=what, data={"nearest": data})
    return Kind.links.warning(
        id="network-cards",
        what=f"{what}; {', '.join(far)} reach one only over the other CPU socket",
        fix="NCCL_IB_HCA names the cards to use; a run on fewer GPUs can take those near a card by "
        f"{VISIBLE_VARIABLE}=...",
        data={"nearest": data},
    )


def not_measured(machine: Machine, free_gib: list[float]) -> Finding | None:
    """Return why the GPU links cannot be measured, or None. `free_gib` is each GPU's free memory."""
    if split := sorted({gpu.index for gpu in machine.gpus if gpu.is_mig}):
        fix = f"for whole GPUs, with nothing on them: sudo nvidia-smi -i {','.join(map(str, split))} -mig 0"
        return _not_measured("NCCL connects no MIG slices", fix)
    if len({gpu.name for gpu in machine.gpus}) > 1:
        fix = f"{visible_only(equal_gpus(machine.gpus))} in front of the command"
        return _not_measured("the GPUs are of different kinds", fix)
    if len(free_gib) < len(machine.gpus):
        fix = "fix the CUDA problem above (tunebook explain cuda-works), then run doctor again"
        return _not_measured("CUDA does not work on all GPUs", fix)
    if min(free_gib) < NEEDED_GIB:
        reason = f"a GPU has only {min(free_gib):g} GiB of free memory, and {NEEDED_GIB:g} are needed"
        return _not_measured(reason, "free the GPUs and type the same again")
    return None


NEEDED_GIB = 4.0  # the largest buffer and its shares, NCCL's own memory, and the CUDA context


def _not_measured(reason: str, fix: str) -> Finding:
    return Kind.links.warning(
        id="bandwidth",
        what=f"the bandwidth between the GPUs was not measured: {reason}",
        fix=fix,
        data={"problem": reason},
    )


def check_bandwidth(bandwidth: Bandwidth, topology: Topology | None, machine: Machine) -> list[Finding]:
    """Compare the measured bandwidth with what the links between these GPUs should reach."""
    data = {"backend": bandwidth.backend, "num_ranks": bandwidth.num_ranks, "problem": bandwidth.problem}
    findings = [_wrong(bandwidth.wrong)] if bandwidth.wrong else []
    reduce, gather = bandwidth.best(ALL_REDUCE), bandwidth.best(ALL_GATHER)
    if bandwidth.problem is not None:
        return [*findings, _failed(bandwidth, data)]
    assert reduce is not None, "ranks that end well have measured it first"
    what = f"{_ranks(bandwidth)}: all-reduce {_speed(reduce)}"
    what += f", all-gather {_speed(gather)} (bus bandwidth)" if gather is not None else " (bus bandwidth)"
    if bandwidth.backend != "nccl":
        what += "; of this machine's memory: it says nothing about GPUs"
    expected = _expected(topology, machine) if bandwidth.backend == "nccl" else 0.0
    if reduce.bus_gb_per_s >= expected:
        return [*findings, Kind.links.ok(id="bandwidth", what=what, data=data)]
    slow = Kind.links.warning(
        id="bandwidth",
        what=f"{what}; such links reach at least {expected:.0f} GB/s",
        fix="NCCL_DEBUG=INFO tunebook doctor says which way NCCL takes; unset NCCL_P2P_DISABLE, NCCL_SHM_DISABLE and "
        "NCCL_P2P_LEVEL; nvidia-smi nvlink -s lists links that are down",
        data=data,
    )
    return [*findings, slow]


def _expected(topology: Topology | None, machine: Machine) -> float:
    """Return the minimum bus bandwidth in GB/s that the links should reach."""
    if topology is None:
        return 0.0
    connections = [connection for *_, connection in _pairs(machine, topology)]
    if connections and all(connection.link is Link.nvlink for connection in connections):
        return _NVLINK_SHARE * _NVLINK_GB_PER_S * min(connection.num_nvlinks for connection in connections)
    return _PCIE_GB_PER_S


def _ranks(bandwidth: Bandwidth) -> str:
    return f"{bandwidth.num_ranks} {'GPUs' if bandwidth.backend == 'nccl' else 'CPU ranks'}"


def _speed(one: Measurement) -> str:
    return f"{one.bus_gb_per_s:.3g} GB/s at {size_text(one.bytes)}"


def _wrong(wrong: list[str]) -> Finding:
    return Kind.links.error(
        id="wrong-sums",
        what=f"numbers were corrupted in transit: {'; '.join(wrong)}. A training over these links is invalid",
        fix="NCCL_P2P_DISABLE=1 tunebook doctor; if that is right, turn off PCIe access control (ACS) and the IOMMU in "
        "the firmware, or keep the variable",
        data={"ranks": wrong},
    )


def _failed(bandwidth: Bandwidth, data: dict[str, Any]) -> Finding:
    done = len(bandwidth.measurements)
    after = f"after {done} measurements" if done else "before the first measurement"
    what = f"{_ranks(bandwidth)} could not communicate: {bandwidth.problem} ({after})"
    advice = "NCCL_DEBUG=INFO tunebook doctor shows where it stops; "
    if bandwidth.is_late:
        advice += (
            "NCCL_P2P_DISABLE=1 in front of it: if that works, PCIe access control (ACS) or the IOMMU is in the way"
        )
    else:
        advice += "a /dev/shm that is too small is the most frequent cause (see shm-size)"
    return Kind.links.error(id="bandwidth", what=what, fix=advice, data=data)
