"""Machines as records tell them: a run is planned for one as it was planned there, wherever that is asked."""

from __future__ import annotations

from typing import Any

from tunebook.config.choices import Generation
from tunebook.evidence.schema import Hardware
from tunebook.facts.generations import GENERATIONS
from tunebook.hardware.detect import Gpu, Machine

_USUAL_MEMORY_GIB = 512.0  # of a machine with GPUs, whose evidence says the GPUs' alone


def machine_of_evidence(hardware: Hardware) -> Machine:
    """The machine that evidence was recorded on, or one of its nodes."""
    num_gpus = 0 if hardware.gpu is None else hardware.gpus // hardware.nodes
    gpu = {"name": hardware.gpu, "memory_gib": hardware.memory_gib or 0.0, "generation": hardware.generation}
    memory_gib = hardware.memory_gib if hardware.gpu is None else None
    return Machine(
        gpus=_gpus([gpu] * num_gpus),
        driver=hardware.driver,
        num_cpus=hardware.cpus,
        host_memory_gib=memory_gib or _USUAL_MEMORY_GIB,
    )


def machine_of_manifest(found: dict[str, Any]) -> Machine:
    """The machine that started a run, from the manifest's section `hardware`."""
    return Machine(
        gpus=_gpus(found["gpus"]),
        driver=found["driver"],
        num_cpus=found["cpus"],
        host_memory_gib=found["memory_gib"],
    )


def _gpus(recorded: list[dict[str, Any]]) -> list[Gpu]:
    return [
        Gpu(
            name=gpu["name"],
            memory_gib=gpu["memory_gib"],
            compute_capability=GENERATIONS[Generation[gpu["generation"]]].compute_capabilities[0],
            generation=Generation[gpu["generation"]],
            index=index,
        )
        for index, gpu in enumerate(recorded)
    ]
