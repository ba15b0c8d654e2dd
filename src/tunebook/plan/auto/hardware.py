"""Resolve `auto` hardware: the GPUs found here, else the machine that the recipe is planned for."""

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
    decisions.decide("hardware.generation", lambda: _generation(config, machine))
    decisions.decide("hardware.gpus_per_node", lambda: _gpus_per_node(config, machine))
    decisions.decide("hardware.memory_gib", lambda: _memory_gib(config, machine))


def _count_kinds(gpus: list[Gpu]) -> str:
    """Count GPUs by name, such as `4 x NVIDIA H200`."""
    names = sorted({gpu.name for gpu in gpus})
    return ", ".join(f"{sum(gpu.name == name for gpu in gpus)} x {name}" for name in names)


def _usable(config: RunConfig, machine: Machine) -> list[Gpu]:
    """The GPUs found here, if they are of the run's generation."""
    return machine.gpus if any(gpu.generation is config.hardware.generation for gpu in machine.gpus) else []


def _runs_on_one_gpu(config: RunConfig, machine: Machine) -> bool:
    if strategy_facts(config).runs_on_one or config.hardware.gpus_per_node == 1:
        return True
    return config.hardware.gpus_per_node is None and _why_only_one(config, machine.gpus) is not None


def _why_only_one(config: RunConfig, gpus: list[Gpu]) -> str | None:
    """Why `parallelism=auto` leaves all GPUs but one idle; None if it uses them.

    A named strategy is used as it is, or refused with a fix.
    """
    if config.parallelism.strategy is not UNDECIDED or len(gpus) < 2:
        return None
    if any(gpu.is_mig for gpu in gpus):
        return "NCCL cannot connect slices of a GPU"
    return "GPUs of different generations do not train together" if _is_mixed(gpus) else None


def _is_mixed(gpus: list[Gpu]) -> bool:
    return len({gpu.generation for gpu in gpus}) > 1


def _generation(config: RunConfig, machine: Machine) -> tuple[Generation, str]:
    if machine.gpus:
        found = _count_kinds(machine.gpus)
        if _runs_on_one_gpu(config, machine):
            return machine.gpus[0].generation, f"{found} found here"
        oldest = min(machine.gpus, key=lambda gpu: gpu.compute_capability)
        decides = "; the oldest decides for all" if _is_mixed(machine.gpus) else ""
        return oldest.generation, f"{found} found here{decides}"
    reference = config.hardware.reference.generation
    if reference is Generation.auto:  # the recipe names no machine
        return Generation.cpu, "no GPU is found here, and the recipe names no machine of its own"
    if config.launcher.name is not LauncherName.local:
        launcher = config.launcher.name.name
        return reference, f"launcher={launcher} starts elsewhere; the machine of the recipe is expected there"
    if reference is Generation.cpu and config.recipe is None:
        return reference, "no GPU is found here"
    if reference is Generation.cpu:
        return reference, "no GPU is found here, and a CPU is what the recipe is planned for"
    return reference, f"no GPU is found here; planned for {_reference(config)}"


def _reference(config: RunConfig) -> str:
    """How to name the planned machine if none is found here."""
    return (
        "the machine of hardware.reference" if config.recipe is None else "the machine that the recipe is planned for"
    )


def _gpus_per_node(config: RunConfig, machine: Machine) -> tuple[int, str]:
    hardware, reference = config.hardware, config.hardware.reference
    if strategy_facts(config).runs_on_one:
        return 1, "parallelism=single runs on one"
    found = _usable(config, machine)
    if why := _why_only_one(config, found):
        return 1, f"{why} ({_count_kinds(found)} found here)"
    if found:
        return len(found), f"all that are found here ({_count_kinds(found)})"
    is_cpu_by_default = config.recipe is None and reference.gpus_per_node == 1
    if hardware.generation is Generation.cpu and (reference.generation is not Generation.cpu or is_cpu_by_default):
        return 1, "one process uses every CPU core"
    if config.recipe is None and reference.gpus_per_node == 1:
        return 1, "no setting asks for more; hardware.gpus_per_node=8 plans for 8"
    unit = "ranks" if hardware.generation is Generation.cpu else "GPUs"
    return reference.gpus_per_node, f"{unit} of {_reference(config)}"


def _memory_gib(config: RunConfig, machine: Machine) -> tuple[float | None, str]:
    hardware, reference = config.hardware, config.hardware.reference
    found = _usable(config, machine)
    if found:
        smallest = min(found, key=lambda gpu: gpu.memory_gib)
        return smallest.memory_gib, f"of {smallest.name}, as its driver reports it"
    if hardware.generation is Generation.cpu:
        ranks = hardware.gpus_per_node or 1
        share = round(machine.host_memory_gib / ranks, 2)
        return share, f"{machine.host_memory_gib:g} GiB of host memory for {ranks} rank{'s' if ranks > 1 else ''}"
    if hardware.generation is reference.generation and (reference.memory_gib or 0) > 0:
        return reference.memory_gib, f"of {_reference(config)}"
    facts = GENERATIONS[hardware.generation]
    return facts.usual_memory_gib, f"of a {facts.reference_gpu}, the usual {hardware.generation.name} GPU"
