"""Resolve `auto` hardware: the GPUs found here, else the machine of `hardware.reference`."""

from __future__ import annotations

from tunebook.config.choices import Generation, LauncherName
from tunebook.config.schema import RunConfig
from tunebook.facts.generations import GENERATIONS
from tunebook.facts.strategies import UNDECIDED, strategy_facts
from tunebook.hardware.detect import Gpu, Machine
from tunebook.plan.auto.decisions import Decisions


def decide_hardware(decisions: Decisions, machine: Machine) -> None:
    """Fill in `hardware.generation`, `gpus_per_node` and `memory_gib`, in this order."""
    config = decisions.config
    decisions.decide("hardware.generation", lambda: _generation(config, machine.gpus))
    is_here = any(gpu.generation is config.hardware.generation for gpu in machine.gpus)
    gpus = machine.gpus if is_here else []
    decisions.decide("hardware.gpus_per_node", lambda: _gpus_per_node(config, gpus))
    decisions.decide("hardware.memory_gib", lambda: _memory_gib(config, gpus, machine.host_memory_gib))


def _single_gpu_reason(config: RunConfig, gpus: list[Gpu]) -> str | None:
    """Why a run uses one GPU of several; None if it uses all. A named strategy is used as it is, or refused."""
    if strategy_facts(config).runs_on_one:
        return f"parallelism={config.parallelism.strategy.name} runs on one"
    if config.parallelism.strategy is not UNDECIDED:
        return None
    if len(gpus) > 1 and any(gpu.is_mig for gpu in gpus):
        return "NCCL cannot connect slices of a GPU"
    is_mixed = len({gpu.generation for gpu in gpus}) > 1
    return "GPUs of different generations do not train together" if is_mixed else None


def _generation(config: RunConfig, gpus: list[Gpu]) -> tuple[Generation, str]:
    hardware, launcher = config.hardware, config.launcher.name
    if gpus:
        counts = [f"{sum(gpu.name == name for gpu in gpus)} x {name}" for name in sorted({gpu.name for gpu in gpus})]
        is_alone = hardware.gpus_per_node is None and _single_gpu_reason(config, gpus) is not None
        oldest = min(gpus, key=lambda gpu: gpu.compute_capability)
        taken = gpus[0] if is_alone or hardware.gpus_per_node == 1 else oldest
        return taken.generation, f"this machine has {', '.join(counts)}"
    where = (
        "this machine has no GPU" if launcher is LauncherName.local else f"launcher={launcher.name} starts elsewhere"
    )
    if hardware.reference.generation is Generation.auto:
        return Generation.cpu, f"{where}"
    return hardware.reference.generation, f"{where}; the recipe's machine (hardware.reference)"


def _gpus_per_node(config: RunConfig, gpus: list[Gpu]) -> tuple[int, str]:
    hardware = config.hardware
    if why := _single_gpu_reason(config, gpus):
        return 1, why
    if gpus:
        return len(gpus), "all GPUs of this machine"
    if hardware.generation is Generation.cpu and hardware.reference.generation is not Generation.cpu:
        return 1, "one process uses every CPU core"
    return hardware.reference.gpus_per_node, "the recipe's machine (hardware.reference)"


def _memory_gib(config: RunConfig, gpus: list[Gpu], host_memory_gib: float) -> tuple[float | None, str]:
    hardware = config.hardware
    if gpus:
        return min(gpu.memory_gib for gpu in gpus), "the smallest GPU of this machine, by its driver"
    if hardware.generation is Generation.cpu:
        share = round(host_memory_gib / (hardware.gpus_per_node or 1), 2)
        return share, f"the share of each rank in {host_memory_gib:g} GiB of host memory"
    if hardware.generation is hardware.reference.generation and hardware.reference.memory_gib:
        return hardware.reference.memory_gib, "the recipe's machine (hardware.reference)"
    facts = GENERATIONS[hardware.generation]
    return facts.usual_memory_gib, f"the usual {hardware.generation.name} GPU: {facts.reference_gpu}"
