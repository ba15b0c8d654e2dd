"""A valid configuration, and machines to resolve it for, without Hydra."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from omegaconf import OmegaConf

from tunebook.config.choices import (
    Attention,
    Checkpointing,
    Compute,
    Generation,
    MasterWeights,
    PackingMode,
    Source,
    Switch,
)
from tunebook.config.frozen import plain_config
from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import DatasetConfig, ModelConfig, OptimizerConfig, RunConfig, TrainingConfig
from tunebook.hardware.detect import Gpu, Machine
from tunebook.plan.architecture import with_layers

from ..record.conftest import run_config  # noqa: F401

QWEN_FACTS = {
    "architecture": "Qwen2ForCausalLM",
    "num_parameters": 494_032_768,
    "num_layers": 24,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def open_config() -> RunConfig:
    """Qwen2.5-0.5B on one GPU, with all optional settings unset."""
    return plain_config(
        model=ModelConfig(name="Qwen/Qwen2.5-0.5B", facts=with_layers(ModelFacts(**QWEN_FACTS))),
        dataset=DatasetConfig(source=Source.hub, name="organization/chats"),
        optimizer=OptimizerConfig(learning_rate=1e-5),
        training=TrainingConfig(global_samples=64, max_length=2048),
    )


@pytest.fixture
def undecided() -> RunConfig:
    """Everything at `auto`."""
    return open_config()


@pytest.fixture
def sound() -> RunConfig:
    """The same, resolved for one H200 without any problem."""
    config = open_config()
    config.hardware.generation = Generation.hopper
    config.hardware.gpus_per_node = 1
    config.hardware.memory_gib = 140.0
    config.precision.master_weights = MasterWeights.fp32
    config.precision.compute = Compute.bf16
    config.precision.tf32 = Switch.enabled
    config.model.compile_layers = False
    config.attention.implementation = Attention.flash_attention_2
    config.packing.mode = PackingMode.isolated
    config.packing.row_length = 2048
    config.training.micro_batch_size = 1
    config.activation.checkpointing = Checkpointing.disabled
    return config


Change = Callable[..., RunConfig]


@pytest.fixture
def changed() -> Change:
    """`changed(config, {"training.seed": 1, "parallelism": ZeroConfig(...)})`: a copy with other values.

    Only the groups with other values are checked and converted by OmegaConf, since all take 10 ms.
    """

    def change(config: RunConfig, values: dict[str, Any]) -> RunConfig:
        result, trees = copy.deepcopy(config), {}
        for key, value in values.items():
            group, _, rest = key.partition(".")
            if key == "model.facts.measured":
                continue
            if not rest:
                setattr(result, key, copy.deepcopy(value))
                trees.pop(key, None)
                continue
            if group not in trees:
                trees[group] = OmegaConf.structured(getattr(result, group))
            OmegaConf.update(trees[group], rest, value, merge=False, force_add=True)
        for group, tree in trees.items():
            setattr(result, group, OmegaConf.to_object(tree))
        if result.model.facts is not None and config.model.facts is not None:
            layers = values.get("model.facts.measured", config.model.facts.measured)  # no setting
            result.model.facts.measured = copy.deepcopy(layers)
        return result

    return change


def gpu(name: str = "NVIDIA H200", capability: tuple[int, int] = (9, 0), index: int = 0, memory: float = 140.4) -> Gpu:
    """A GPU as NVML would describe it."""
    from tunebook.facts.generations import generation_of

    generation = generation_of(capability)
    return Gpu(name=name, memory_gib=memory, compute_capability=capability, generation=generation, index=index)


@pytest.fixture
def machine() -> Callable[..., Machine]:
    """`machine(("NVIDIA H200", (9, 0)), ...)`: a machine with these GPUs; without any, a laptop."""

    def make(*gpus: tuple[str, tuple[int, int]], driver: str = "580.65.06", memory: float = 140.4) -> Machine:
        return Machine(
            gpus=[gpu(name, capability, index, memory) for index, (name, capability) in enumerate(gpus)],
            driver=driver if gpus else None,
            num_cpus=8,
            host_memory_gib=32.0,
            notes=[] if gpus else ["no NVIDIA driver answers here"],
        )

    return make
