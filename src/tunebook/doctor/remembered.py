"""What `tunebook doctor` measured between this machine's GPUs, kept for the plans and runs that come after.

Kept in the cache by the GPUs' identities, the driver and NCCL's variables, so that a card that was exchanged, or
another way between the same cards (NCCL_P2P_DISABLE=1), is measured again.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from tunebook.config.schema import RunConfig
from tunebook.data.batch import BatchPlan
from tunebook.doctor.advice import advise
from tunebook.doctor.collectives.run import Bandwidth, Measurement
from tunebook.doctor.findings import Level
from tunebook.errors import Problem
from tunebook.facts.strategies import strategy_facts
from tunebook.files import atomic_write_json, cache_root
from tunebook.hardware.detect import Machine
from tunebook.plan.rules.environment import starts_elsewhere


def remember(bandwidth: Bandwidth, machine: Machine) -> None:
    """Keep a measurement between GPUs that ended well; a cache that cannot be written is no reason to fail."""
    if bandwidth.backend != "nccl" or bandwidth.problem is not None or bandwidth.wrong:
        return
    file = _file(machine, bandwidth.num_ranks)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_json(file, bandwidth.to_json())
    except OSError:
        return


def recall(machine: Machine, num_gpus: int) -> Bandwidth | None:
    """What was last measured between the first `num_gpus` visible GPUs; None where nothing readable is kept."""
    try:
        kept: dict[str, Any] = json.loads(_file(machine, num_gpus).read_text(encoding="utf-8"))
        measurements = [Measurement(**one) for one in kept["measurements"]]
        return Bandwidth(backend=str(kept["backend"]), num_ranks=int(kept["num_ranks"]), measurements=measurements)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def slow_links(config: RunConfig, batch: BatchPlan, machine: Machine) -> list[Problem]:
    """A warning where a strategy that gathers weights in every layer waits for links that were measured here."""
    num_gpus = config.hardware.gpus_per_node or 1
    if not strategy_facts(config).gathers_each_layer:
        return []
    if starts_elsewhere(config) or config.hardware.num_nodes > 1 or not 2 <= num_gpus <= len(machine.gpus):
        return []
    bandwidth = recall(machine, num_gpus)
    finding = advise(config, batch, bandwidth, machine.gpus[0].name) if bandwidth is not None else None
    if finding is None or finding.level is not Level.warning or finding.fix is None:
        return []
    return [Problem(id="slow-links", key="parallelism", message=finding.what, fix=finding.fix, is_error=False)]


def _file(machine: Machine, num_gpus: int) -> Path:
    gpus = [gpu.uuid or f"{gpu.index}: {gpu.name}" for gpu in machine.gpus[:num_gpus]]
    facts: list[Any] = [machine.driver, gpus]
    if variables := _nccl_variables():
        facts.append(variables)
    identity = json.dumps(facts)
    return cache_root() / "links" / f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"


def _nccl_variables() -> dict[str, str]:
    """What may change the way that NCCL takes: all of its variables but those that say what it logs."""
    names = sorted(name for name in os.environ if name.startswith("NCCL_") and not name.startswith("NCCL_DEBUG"))
    return {name: os.environ[name] for name in names}
