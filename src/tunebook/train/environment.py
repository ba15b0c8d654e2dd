"""The environment of the processes that train and evaluate: what must be set before torch is imported."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

from tunebook.config.choices import Generation
from tunebook.config.schema import RunConfig
from tunebook.hardware.detect import VISIBLE_VARIABLE
from tunebook.train.other_launchers import without_other_launchers

_HANDED_ON = (
    *("HF_HOME", "HF_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE"),
    *("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_MODE"),
    *("OMP_NUM_THREADS", "PYTHONPATH"),
)
_HANDED_ON_AS = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "TUNEBOOK_")
_OF_THE_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is its older name


def rank_environment(config: RunConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of the ranks of one node: what must be set before torch is imported, unless the user set it.

    Without the variables of other launchers: srun sets some for its tasks, Ray for its workers.
    """
    environment = without_other_launchers(inherited)
    # The tokenizers library warns about forks that the data loader may do; preparing is over by then.
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Threads that wait by spinning starve each other where something else runs on the same cores: with other work on
    # two cores a training step took 0.13 s with this and 0.95 to 3.2 s without.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    ranks = config.hardware.gpus_per_node
    assert ranks is not None
    if ranks > 1:  # torchrun would say 1, whatever the machine has
        environment.setdefault("OMP_NUM_THREADS", str(max(1, _num_cores() // ranks)))
    if config.hardware.generation is Generation.cpu:
        environment.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, once imported, warns that it found no GPU
    else:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(_gpus(config, environment))
        # Segments that grow leave hardly any pieces too small for what is asked for next. Without, two of twenty runs
        # that the plan had fill an H100 ran out of memory, 13 GiB of it in such pieces; no slower (h100_held_out).
        if not any(name in environment for name in _OF_THE_ALLOCATOR) and not _is_wsl():
            environment[_OF_THE_ALLOCATOR[0]] = "expandable_segments:True"
    # Where .venv is not activated its `ninja` is not found, without which DeepSpeed compiles none of its operators.
    environment["PATH"] = os.pathsep.join(filter(None, [str(Path(sys.executable).parent), environment.get("PATH")]))
    return environment


def handed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """What ranks need of the environment where nothing of it reaches them by itself."""
    return {name: text for name, text in environment.items() if name in _HANDED_ON or name.startswith(_HANDED_ON_AS)}


def _is_wsl() -> bool:
    """Whether this is Linux in Windows, where the first allocation in such a segment can fail (pytorch#192330)."""
    return "microsoft" in platform.release().lower()


def _num_cores() -> int:
    """The cores that this process may use: a scheduler may have given it some of the machine's only."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpus(config: RunConfig, environment: Mapping[str, str]) -> list[str]:
    """The GPUs that a run uses, of those it may see: a process that sees more would spread its model over them."""
    count = config.hardware.gpus_per_node
    assert count is not None
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[:count] if visible else [str(number) for number in range(count)]


def evaluation_environment(config: RunConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of a training's ranks, but with all visible GPUs, not only as many as it was trained on."""
    environment = rank_environment(config, inherited)
    environment.pop(VISIBLE_VARIABLE, None)
    return environment | {name: text for name, text in inherited.items() if name == VISIBLE_VARIABLE}
