"""The environment of training and evaluation processes: variables that must be set before torch is imported."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

from tunebook.config.choices import Generation
from tunebook.config.schema import RunConfig
from tunebook.hardware.detect import VISIBLE_VARIABLE
from tunebook.processes import own_cores
from tunebook.train.other_launchers import without_other_launchers

_HANDED_ON = (
    *("HF_HOME", "HF_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE", "HF_ENDPOINT"),
    *("HUGGING_FACE_HUB_TOKEN", "TRANSFORMERS_OFFLINE"),  # older names, which the hub's library reads too
    *("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_MODE"),
    *("OMP_NUM_THREADS", "PYTHONPATH"),
)
_HANDED_ON_AS = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "TUNEBOOK_")
_OF_THE_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is the older name


def rank_environment(config: RunConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of the ranks of one node, with variables that must be set before torch is imported.

    The user's variables take precedence. Variables of other launchers are removed: srun sets some for its tasks, Ray
    for its workers.
    """
    environment = without_other_launchers(inherited)
    # The tokenizers library warns about forks by the data loader; data preparation has ended by then.
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Threads that spin while waiting starve each other if other work runs on the same cores.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    ranks = config.hardware.gpus_per_node
    assert ranks is not None
    if ranks > 1:  # torchrun would set 1 on every machine
        environment.setdefault("OMP_NUM_THREADS", str(max(1, len(own_cores()) // ranks)))
    if config.hardware.generation is Generation.cpu:
        environment.setdefault("DS_ACCELERATOR", "cpu")  # without it, DeepSpeed warns on import that it found no GPU
    else:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(_gpus(config, environment))
        # Growing segments leave hardly any pieces that are too small for later requests, and are no slower.
        if not any(name in environment for name in _OF_THE_ALLOCATOR) and not _is_wsl():
            environment[_OF_THE_ALLOCATOR[0]] = "expandable_segments:True"
    # If .venv is not activated, its `ninja` is not found, and DeepSpeed cannot compile its operators without it.
    environment["PATH"] = os.pathsep.join(filter(None, [str(Path(sys.executable).parent), environment.get("PATH")]))
    return environment


def handed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that must be passed to ranks that do not inherit the environment."""
    return {name: text for name, text in environment.items() if name in _HANDED_ON or name.startswith(_HANDED_ON_AS)}


def _is_wsl() -> bool:
    """Whether this is Linux in Windows (WSL), where the first such allocation can fail (pytorch#192330)."""
    return "microsoft" in platform.release().lower()


def _gpus(config: RunConfig, environment: Mapping[str, str]) -> list[str]:
    """The GPUs of a run, among the visible ones: a process that sees more would spread its model over them."""
    count = config.hardware.gpus_per_node
    assert count is not None
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[:count] if visible else [str(number) for number in range(count)]


def evaluation_environment(config: RunConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of a training's ranks, but with all visible GPUs instead of the number used for training."""
    environment = rank_environment(config, inherited)
    environment.pop(VISIBLE_VARIABLE, None)
    return environment | {name: text for name, text in inherited.items() if name == VISIBLE_VARIABLE}
