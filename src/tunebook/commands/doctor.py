"""`tunebook doctor`: run all checks in order, and show or print the findings."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from tunebook.config.book import resolve_path
from tunebook.config.compose import compose
from tunebook.config.schema import RunConfig, starts_elsewhere
from tunebook.data.batch import BatchPlan, solve_batch
from tunebook.doctor.bandwidth import measure_bandwidth
from tunebook.doctor.findings import Finding, Kind, Level, exit_code_of, finding_of, finding_of_error, show_findings
from tunebook.doctor.gpus import check_gpus, gpus_on_bus
from tunebook.doctor.links import check_bandwidth, check_topology, not_measured
from tunebook.doctor.probes import Probe, run_probe
from tunebook.doctor.software import check_software
from tunebook.doctor.storage import check_storage
from tunebook.doctor.system import GIB, MEMINFO, check_system, read_meminfo, swap
from tunebook.doctor.tokenizers import check_tokenizer, probe_tokenizer
from tunebook.errors import RequestError, RulesError
from tunebook.hardware.bandwidth import Bandwidth, remember
from tunebook.hardware.detect import Machine, detect_machine
from tunebook.hardware.disk import existing
from tunebook.hardware.nvidia_smi import Topology, ask_nvidia_smi, ask_topology
from tunebook.plan.advice.host_advice import host_advice
from tunebook.plan.advice.links import advise
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.plan.memory.host_memory import plan_host_memory
from tunebook.plan.rules import check

Say = Callable[[str], None]

_MIN_FREE_GIB = 2.0  # for Python, torch and a rank's share of the data, before anything is loaded
_NVML_TIMEOUT_S = 40.0  # 8 GPUs without persistence mode take 10 s or more
_TORCH_TIMEOUT_S = 120.0  # importing torch takes 30 s from a cold network disk, plus a second per GPU


@dataclass(kw_only=True)
class Diagnosis:
    """All findings."""

    findings: list[Finding] = field(default_factory=list)
    topology: Topology | None = None
    bandwidth: Bandwidth | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the output of `doctor --json`."""
        return {
            "findings": [finding.to_json() for finding in self.findings],
            "topology": self.topology.to_json() if self.topology is not None else None,
            "bandwidth": self.bandwidth.to_json() if self.bandwidth is not None else None,
        }


@dataclass(frozen=True, kw_only=True)
class Request:
    """The recipe as far as it could be resolved for this machine; `config` is None if no run was named."""

    config: RunConfig | None = None
    batch: BatchPlan | None = None
    outputs: str = "outputs"
    num_nodes: int = 1
    findings: list[Finding] = field(default_factory=list)


def doctor_command(
    recipe: str | None,
    overrides: list[str],
    recipes_dirs: list[Path],
    console: Console,
    *,
    as_json: bool = False,
    is_measured: bool = True,
    cpu_ranks: int | None = None,
) -> int:
    """Check this machine, and a recipe's requirements if one is named; return 0 without errors, else 2.

    `is_measured` requests the bandwidth between the GPUs, `cpu_ranks` the bandwidth between that many processes over
    gloo.
    """
    with _show_progress(console, is_quiet=as_json) as say:
        diagnosis = diagnose(recipe, overrides, recipes_dirs, say, is_measured=is_measured, cpu_ranks=cpu_ranks)
    if as_json:
        json.dump(diagnosis.to_json(), sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
        print()
    else:
        show_findings(diagnosis.findings, diagnosis.topology, diagnosis.bandwidth, console)
    return exit_code_of(diagnosis.findings)


def diagnose(
    recipe: str | None,
    overrides: list[str],
    recipes_dirs: list[Path],
    say: Say,
    *,
    is_measured: bool,
    cpu_ranks: int | None,
) -> Diagnosis:
    """Return all findings, ordered by kind."""
    say("asking the NVIDIA driver")
    health = run_probe("nvml", timeout_s=_NVML_TIMEOUT_S)
    machine = _machine(health)
    request = _resolve(recipe, overrides, recipes_dirs, machine)
    config = request.config
    outputs = resolve_path(config.outputs if config is not None else request.outputs)
    say("loading torch")
    torch = run_probe("torch_build", timeout_s=_TORCH_TIMEOUT_S)
    found = Diagnosis()
    # nvidia-smi uses NVML: if NVML did not respond, it would not either.
    listing = ask_nvidia_smi("-L") if health.problem is None and machine.driver is None else None
    gpus = (health.facts or {"gpus": []})["gpus"]
    found.findings += check_gpus(machine, gpus, health.problem, listing, gpus_on_bus())
    found.findings += check_software(machine, config, torch)
    _check_links(found, machine, request, torch, say, is_measured=is_measured, cpu_ranks=cpu_ranks)
    is_one_node = config is not None and config.hardware.num_nodes == 1  # communicates without network cards
    has_cards = found.topology is not None and bool(found.topology.cards) and not is_one_node
    memory = read_meminfo(MEMINFO)
    of_host = [host_memory(machine, config, memory), swap(memory)] if memory else []
    found.findings += check_system(machine, config, existing(outputs), has_cards=has_cards, of_host=of_host)
    found.findings += check_storage(config, outputs)
    found.findings += request.findings
    if config is not None:
        say("loading the tokenizer")
        found.findings += check_tokenizer(config, probe_tokenizer(config))
    return found


def _machine(health: Probe) -> Machine:
    """Detect this machine, without using NVML in this process if it did not respond to the probe."""
    if health.problem is None:
        return detect_machine()
    return detect_machine(no_gpu_because=f"the NVIDIA driver was asked and did not answer properly: {health.problem}")


def _resolve(recipe: str | None, overrides: list[str], recipes_dirs: list[Path], machine: Machine) -> Request:
    """Compose, resolve and check the named run; its problems become findings."""
    if recipe is None and not overrides:
        return Request()
    config, findings = None, []
    try:
        composition = compose(recipe, overrides, recipes_dirs)
        if recipe is None and not any(_names_model(word) for word in overrides):  # only the machine is checked
            asked = composition.config
            return Request(outputs=asked.outputs, num_nodes=asked.hardware.num_nodes)
        config = resolve_auto(composition.config, machine).config
        problems = check(config, composition.origins.set_by)
        findings = [finding_of(problem, Kind.recipe) for problem in problems]
        findings += _other_machines_findings(config)
        if any(problem.is_error for problem in problems):
            return Request(config=config, findings=findings)
        batch = solve_batch(config, None)
        return Request(config=config, batch=batch, findings=[_plan_finding(config), *findings])
    except RulesError as error:
        findings += [finding_of(problem, Kind.recipe) for problem in error.problems]
    except RequestError as error:
        findings.append(finding_of_error(error, Kind.recipe, otherwise="recipe"))
    return Request(config=config, findings=findings)


def _names_model(override: str) -> bool:
    key, *_ = override.lstrip("+~").split("=", 1)
    return key.split(".")[0].split("@")[0] == "model"


def _plan_finding(config: RunConfig) -> Finding:
    hardware = config.hardware
    machine = f"{hardware.num_nodes} x {hardware.gpus_per_node} {hardware.generation.name}"
    strategy = config.parallelism.strategy.name
    what = f"{config.recipe or 'the request'} composes for {machine} with {strategy}, and no rule forbids it"
    return Kind.recipe.ok(id="recipe", what=what)


def _other_machines_findings(config: RunConfig) -> list[Finding]:
    """Return findings for a run whose ranks start on other machines."""
    if starts_elsewhere(config):
        name = config.launcher.name.name
        command = "srun tunebook doctor" if name == "slurm" else "tunebook doctor"
        what = f"launcher={name} starts the ranks on other machines; look at those too: {command} there"
    elif config.hardware.num_nodes > 1:
        others = config.hardware.num_nodes - 1
        what = f"{others} of {config.hardware.num_nodes} nodes and the links between them were not looked at"
        what += "; tunebook doctor on each"
    else:
        return []
    return [Kind.recipe.ok(id="other-machines", what=what)]


def _check_links(
    found: Diagnosis,
    machine: Machine,
    request: Request,
    torch: Probe,
    say: Say,
    *,
    is_measured: bool,
    cpu_ranks: int | None,
) -> None:
    num_nodes = request.config.hardware.num_nodes if request.config is not None else request.num_nodes
    if machine.gpus:
        found.topology, findings = check_topology(machine, ask_topology(), num_nodes)
        found.findings += findings
    if cpu_ranks is not None:
        say("measuring the bandwidth between CPU ranks")
        found.bandwidth = measure_bandwidth(cpu_ranks, "gloo")
    elif is_measured and len(machine.gpus) > 1:
        devices = (torch.facts or {"devices": []})["devices"]
        free_gib = [device["free_gib"] for device in devices if device["problem"] is None]
        unmeasured = not_measured(machine, free_gib)
        if unmeasured is not None:
            found.findings.append(unmeasured)
            return
        say("measuring the bandwidth between the GPUs")
        found.bandwidth = measure_bandwidth(len(machine.gpus), "nccl")
        remember(found.bandwidth, machine)
    if found.bandwidth is None:
        return
    found.findings += check_bandwidth(found.bandwidth, found.topology, machine)
    if found.bandwidth.backend == "nccl" and request.config is not None and request.batch is not None:
        advice = advise(request.config, request.batch, found.bandwidth, machine.gpus[0].name)
        if advice is not None:
            level, what = Level.ok if advice.fix is None else Level.warning, advice.text
            advised = Finding(
                id="sharding-advice", kind=Kind.links, level=level, what=what, fix=advice.fix, data=advice.data
            )
            found.findings.append(advised)


def host_memory(machine: Machine, config: RunConfig | None, memory: dict[str, int]) -> Finding:
    """Compare this host's free memory with what a recipe offloads to it.

    If the ranks start on other machines, check the configured memory of those instead.
    """
    if config is not None and starts_elsewhere(config):
        return _nodes_memory(config)
    free = min(memory.get("MemAvailable", 0) / GIB, machine.host_memory_gib)
    needed = offloaded_gib(config) if config is not None else 0.0
    what = f"host memory: {machine.host_memory_gib:g} GiB may be used, {free:.1f} are free"
    what += f"; {needed:.1f} GiB of states are offloaded to it" if needed else ""
    data = {"usable_gib": machine.host_memory_gib, "free_gib": round(free, 2), "offloaded_gib": round(needed, 2)}
    level, fix = Level.ok, None
    if config is not None and needed > machine.host_memory_gib:
        level, fix = Level.error, _offload_advice(config, machine.host_memory_gib)
    elif free < max(_MIN_FREE_GIB, needed):
        level = Level.warning
        fix = "end what else runs here (top -o %MEM shows it); in a container, raise its memory limit"
    return Finding(id="host-memory", kind=Kind.system, level=level, what=what, fix=fix, data=data)


def _nodes_memory(config: RunConfig) -> Finding:
    """Compare what each of the other machines needs with its configured memory, as `tunebook plan` does."""
    capacity = config.hardware.host_memory_gib
    plan = plan_host_memory(config, capacity)
    needed, offloaded = plan.memory.total, plan.memory.offload
    what = "host memory of the nodes that the ranks start on"
    what += f": {needed:,.1f} GiB are needed on each, of them {offloaded or 0.0:,.1f} offloaded" if needed else ""
    level, fix = Level.ok, None
    if capacity is None:
        what += "; what they have is not known here: say it with hardware.host_memory_gib=GIB"
    else:
        what += f"; by estimate this {plan.verdict}" if plan.fits is not None else f"; {plan.verdict}"
    if capacity is not None and plan.fits is not True and needed is not None and config.model.facts is not None:
        level = Level.error if plan.fits is False else Level.warning
        fix = host_advice(config, config.model.facts, capacity)
    data = {
        "usable_gib": capacity,
        "needed_gib": None if needed is None else round(needed, 2),
        "offloaded_gib": round(offloaded or 0.0, 2),
    }
    return Finding(id="host-memory", kind=Kind.system, level=level, what=what, fix=fix, data=data)


def _offload_advice(config: RunConfig, capacity: float) -> str:
    """Return the advice of `tunebook plan`, except for the memory size, which was measured here."""
    assert config.model.facts is not None, "what is offloaded is estimated from them"
    return host_advice(config, config.model.facts, capacity, otherwise="take machines with more memory")


def offloaded_gib(config: RunConfig) -> float:
    """Return the GiB that all ranks of a node keep in host memory during training, by `tunebook plan`; 0 if unknown."""
    return plan_host_memory(config, None).memory.offload or 0.0


@contextmanager
def _show_progress(console: Console, *, is_quiet: bool) -> Iterator[Say]:
    """Yield a function that shows the current check on a terminal, and does nothing elsewhere."""
    if is_quiet or not console.is_terminal:
        yield lambda what: None
        return
    with console.status("") as status:
        yield lambda what: status.update(f"{what} ...")
