"""Report what takes most of a host's memory if a run does not fit, and which changes need less by estimate.

Every change is estimated like the run. It is left out if it needs as much, breaks a rule or no longer fits into the
GPUs: a change that frees host memory in one run (such as offloading to a disk) takes more in another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tunebook.config.choices import Checkpointing, Offload, PeftMethod
from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import FsdpConfig, ParallelismConfig, RunConfig, ZeroConfig, world_size
from tunebook.facts.optimizers import OPTIMIZERS
from tunebook.facts.sharing import offloaded_states
from tunebook.facts.strategies import ALONE, OFFLOADING_ALL, SPARING_THE_HOST
from tunebook.plan.memory import GIB, estimate_memory
from tunebook.plan.memory.gpu import plan_memory
from tunebook.plan.memory.host import HostBytes, host_bytes, offloaded_activation_bytes, offloaded_bytes
from tunebook.plan.memory.states import paged_bytes
from tunebook.plan.rules import check

MAX_CHANGES = 3
_Remedy = tuple[str, RunConfig]  # what to type, and the resolved configuration with it
_SET_ACTUAL_MEMORY = "say what the nodes really have: hardware.host_memory_gib=GIB"
_MAX_DOUBLINGS = 3  # most doublings of nodes and halvings of GPUs per node; more is another plan


def estimate_host(config: RunConfig, facts: ModelFacts) -> HostBytes:
    """Estimate a resolved configuration's host memory."""
    return host_bytes(config, facts, tensors=estimate_memory(config, facts).total_gib * GIB)


def host_advice(config: RunConfig, facts: ModelFacts, capacity: float) -> str:
    """Return the largest part, the changes that need less by estimate, and what to do if none of them helps."""
    asked = estimate_host(config, facts)
    less: list[tuple[str, HostBytes]] = []
    for words, changed in _remedies(config, facts, capacity):
        found = estimate_host(changed, facts)
        if found.peak < asked.peak and _can_run(changed):
            less.append((words, found))
    enough = [one for one in less if one[1].peak <= capacity * GIB]
    named = " or ".join(f"{words} ({found.peak / GIB:,.1f} GiB)" for words, found in enough[:MAX_CHANGES])
    advice = f"try {named}, or " if enough else ""
    if less and not enough:
        words, found = min(less, key=lambda one: one[1].peak)
        advice = f"no change that was estimated is enough, {words} needs least ({found.peak / GIB:,.1f} GiB); "
    largest = _largest_part(config, facts, asked)
    return f"{largest}; {advice}{_SET_ACTUAL_MEMORY}"


def _largest_part(config: RunConfig, facts: ModelFacts, asked: HostBytes) -> str:
    """The largest part at the peak, with the keys that cause it."""
    ranks = config.hardware.gpus_per_node or 1
    kept = offloaded_activation_bytes(config, facts)
    places = " ".join(f"parallelism.{key}={place.name}" for key, place in offloaded_states(config).items())
    by_part = {
        "the processes, one for each GPU": asked.processes,
        "activations (activation.offload=true)": ranks * kept,
        f"pages of the optimizer (optimizer={config.optimizer.name.name})": ranks * paged_bytes(config, facts),
        f"offloaded states ({places})": ranks * offloaded_bytes(config, facts).host,
        "the model while it is saved": asked.saving,
    }
    if asked.loading > asked.training + asked.offload + asked.saving:
        by_part = {"the processes, one for each GPU": asked.processes, "the weights while they load": asked.loading}
    largest = max(by_part, key=lambda name: by_part[name])
    return f"the largest part, {by_part[largest] / GIB:,.1f} GiB, is {largest}"


def _can_run(config: RunConfig) -> bool:
    """Whether no rule refuses it and the GPUs may hold it."""
    return plan_memory(config).fits is not False and not any(problem.is_error for problem in check(config))


def _remedies(config: RunConfig, facts: ModelFacts, capacity: float) -> Iterator[_Remedy]:
    """Yield changes that may need less, cheapest first: requested options, strategy, machines, method."""
    if config.activation.offload:
        kept_on_gpu = replace(config, activation=replace(config.activation, offload=False))
        yield "activation.offload=false", kept_on_gpu
        recomputed = replace(kept_on_gpu.activation, checkpointing=Checkpointing.enabled)
        words = "activation=checkpointing activation.offload=false"
        yield words, replace(config, activation=recomputed)
    if (name := OPTIMIZERS[config.optimizer.name].same_steps_unpaged) is not None:
        another = replace(config, optimizer=replace(config.optimizer, name=name))
        yield f"optimizer.name={name.name}", another  # also works if the key was typed
    settings = config.parallelism
    if isinstance(settings, ZeroConfig) and offloaded_states(config) and settings.pin_memory is not False:
        yield "parallelism.pin_memory=false", replace(config, parallelism=replace(settings, pin_memory=False))
    yield from _strategies(config)
    yield from _machines(config, facts, capacity)
    if config.peft.method is PeftMethod.full:
        adapter = replace(config, peft=replace(config.peft, method=PeftMethod.lora))
        yield "peft=lora", adapter


def _strategies(config: RunConfig) -> Iterator[_Remedy]:
    """Strategies that keep everything on the GPUs, divided if there are several; and a disk for offloaded states.

    Offloading may come from the strategy's file or from an override, which would undo the change: `without` names it.
    """
    places = offloaded_states(config)
    without = f" without {', '.join(f'parallelism.{key}' for key in places)}" if places else ""
    alone, divided = ParallelismConfig(strategy=ALONE), FsdpConfig(strategy=SPARING_THE_HOST)
    on_gpus = alone if world_size(config) == 1 else divided
    words = f"parallelism={on_gpus.strategy.name}{without}"
    yield words, replace(config, parallelism=on_gpus)
    if places:
        on_disk = ZeroConfig(
            strategy=OFFLOADING_ALL, offload_optimizer=Offload.nvme, offload_parameters=Offload.nvme, nvme_path="FOLDER"
        )
        words = f"parallelism=zero3_nvme parallelism.nvme_path=FOLDER{without}"
        yield words, replace(config, parallelism=on_disk)


def _machines(config: RunConfig, facts: ModelFacts, capacity: float) -> Iterator[_Remedy]:
    """More nodes, and fewer GPUs per node: the smallest sufficient change, else the largest one tried."""
    nodes, gpus = config.hardware.num_nodes, config.hardware.gpus_per_node or 1
    powers = [2**power for power in range(1, _MAX_DOUBLINGS + 1)]
    more = [nodes * power for power in powers]
    fewer = [gpus // power for power in powers if gpus % power == 0]
    for key, counts in (("num_nodes", more), ("gpus_per_node", fewer)):
        tries = [replace(config, hardware=replace(config.hardware, **{key: count})) for count in counts]
        peaks = [estimate_host(tried, facts).peak for tried in tries]
        enough = (place for place, peak in enumerate(peaks) if peak <= capacity * GIB)
        if tries:
            chosen = next(enough, len(tries) - 1)
            yield f"hardware.{key}={counts[chosen]}", tries[chosen]
