"""What planning knows about a base model: its sizes (part of the schema), and facts of its layers.

Users do not set the facts of its layers: `plan.architecture` asks transformers, and a run keeps them in
`architecture.json` next to its run.yaml.

Parts that text does not use, such as an image encoder, get no gradient and are not trained. They are found by a pass
without memory (`plan.architecture.build`) and stored by the names of their modules.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Set
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import MISSING, OmegaConf

from tunebook.config.book import book_root
from tunebook.config.choices import ModelPart
from tunebook.config.ranges import number

# Names of modules between a tower for images and the language model.
PROJECTORS = ("multi_modal_projector", "connector", "merger", "deepstack_merger_list")
ARCHITECTURE_FILE = "architecture.json"  # in a run folder
MASK, LENGTHS = "mask", "lengths"  # how attention can keep packed documents apart


@dataclass(kw_only=True)
class LayerFacts:
    """Facts of an architecture's decoder layers (see `plan.architecture`)."""

    num_layers: int  # the numbers below are sums over all of them
    parameters: int
    linear_parameters: int  # parameters in linear layers, which 4-bit quantization applies to
    active_parameters: int  # parameters used for one token: fewer than all if a router chooses among experts
    largest_parameter: int  # elements of the whole model's largest parameter, such as stacked experts
    unreached_parameters: int = 0  # elements of `ModelFacts.unreached`
    projector_parameters: int = 0  # those of them that are between a tower for images and the language model
    # Elements of embeddings besides the words', such as one for each layer: a token takes a row and computes no product
    looked_up_parameters: int = 0
    # Heads x head size, summed over the layers that attend to the whole document, and over those that attend to a
    # sliding window of so many tokens.
    attention_width: int = 0
    sliding_width: int = 0
    sliding_window: int = 0  # tokens
    attention: list[str] = field(default_factory=list)  # attention kernels that transformers accepts
    # Whether packed documents stay apart, by `MASK` and `LENGTHS`, as a small model showed; no entry: unknown
    isolates: dict[str, bool] = field(default_factory=dict)
    packing_packages: list[str] = field(default_factory=list)  # distributions that packed rows need on a GPU
    # Inputs and outputs of linear layers, and of stacked experts, by the names that `peft.target_modules` matches
    adapters: dict[str, list[int]] = field(default_factory=dict)
    expert_adapters: dict[str, list[int]] = field(default_factory=dict)
    vision_adapters: dict[str, list[int]] = field(default_factory=dict)  # of the tower for images
    projector_adapters: dict[str, list[int]] = field(default_factory=dict)


@dataclass(kw_only=True)
class ModelFacts:
    """What planning needs to know about an architecture without reading its config; checked against it at run time."""

    architecture: str = MISSING  # the class transformers loads, such as Qwen2ForCausalLM
    num_parameters: int = number(MISSING, at_least=1)  # all parameters; tied embeddings count once
    num_layers: int = number(MISSING, at_least=1)  # decoder layers
    hidden_size: int = number(MISSING, at_least=1)  # width of the hidden states
    intermediate_size: int = number(MISSING, at_least=1)  # width of the MLP
    num_attention_heads: int = number(MISSING, at_least=1)  # heads of the queries
    num_key_value_heads: int = number(MISSING, at_least=1)  # heads of the keys and values
    vocab_size: int = number(MISSING, at_least=2)  # rows of the embeddings
    max_position_embeddings: int = number(MISSING, at_least=2, unit="tokens")  # the longest document
    tie_word_embeddings: bool = MISSING  # whether the output head has the embeddings' weights
    dtype: str = MISSING  # of the published weights: float32, float16 or bfloat16
    # Modules that text never reaches and that are not trained, such as an image tower
    unreached: list[str] = field(default_factory=list)
    # Further keys of the model's config.json on which its layers depend, as they are written there: head_dim,
    # sliding_window, num_experts, num_experts_per_tok and the like. Other keys are at transformers' defaults. If a
    # model's text part is under `text_config` there, it is here too.
    config: dict[str, Any] = field(default_factory=dict)
    # Not a setting: hidden from OmegaConf and not written to run.yaml. None: unknown.
    measured: LayerFacts | None = field(default=None, metadata={"omegaconf_ignore": True, "identity": False})


def facts_from_json(answer: dict[str, Any]) -> ModelFacts:
    """Model facts with those of the layers. Raises: OmegaConfBaseException or KeyError if the JSON has another form."""
    facts: Any = OmegaConf.to_object(
        OmegaConf.merge(OmegaConf.structured(ModelFacts), {key: answer[key] for key in answer.keys() - {"measured"}})
    )
    facts.measured = layers_from_json(answer["measured"])
    return cast(ModelFacts, facts)


def layers_from_json(layers: dict[str, Any]) -> LayerFacts:
    """Facts of layers from plain values. Raises: OmegaConfBaseException if they have another form."""
    return cast(LayerFacts, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(LayerFacts), layers)))


def facts_of_hub_name(name: str) -> ModelFacts | None:
    """The book's facts of a model by its name on the hub; None if the book has no such model.

    A base model or a fine-tune with the same sizes has another name, and is not assumed to be the same.
    """
    facts = _named_on_hub(book_root() / "hydra_configs" / "model").get(name)
    return None if facts is None else ModelFacts(**copy.deepcopy(facts))


@lru_cache(maxsize=2)
def _named_on_hub(folder: Path) -> dict[str, dict[str, Any]]:
    models = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.yaml"))]
    return {
        model["name"]: model["facts"]
        for model in models
        if model.get("name") and model.get("facts") and not model.get("revision")
    }


def outermost_modules(unreached: Set[str], everything: Collection[str]) -> list[str]:
    """The outermost modules that have no other parameters than unreached ones; a parameter's name if there is none.

    `everything` has the names of all parameters.
    """
    reached = [name.split(".") for name in everything if name not in unreached]
    used = {".".join(parts[:length]) for parts in reached for length in range(1, len(parts) + 1)}
    outermost: set[str] = set()
    for name in unreached:
        parts = name.split(".")
        modules = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
        outermost.add(next(module for module in modules if module not in used))
    return sorted(outermost)


def modules_pattern(modules: Collection[str]) -> str:
    """A regular expression that matches the full names of the modules, and of all that is in them."""
    return rf"(?:{'|'.join(map(re.escape, modules))})(?:\..+)?"


def frozen_modules(unreached: Collection[str], trained: Collection[ModelPart]) -> str | None:
    """A regular expression for full names of modules and parameters in parts that are not trained; None: all are.

    What text does not reach is the tower for images, and the projector between it and the language model.
    """
    outside = modules_pattern(unreached) if unreached else "(?!)"
    projector = rf"(?:.*\.)?(?:{'|'.join(PROJECTORS)})(?:\..+)?"
    patterns = {
        ModelPart.language: rf"(?!{outside}$).+",
        ModelPart.vision: rf"(?!{projector}$){outside}",
        ModelPart.projector: rf"(?={projector}$){outside}",
    }
    frozen = [pattern for part, pattern in patterns.items() if part not in trained]
    return "|".join(frozen) if frozen and (unreached or ModelPart.language not in trained) else None


def is_in_modules(modules: Collection[str], name: str) -> bool:
    """True if a parameter is in one of the modules."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def unreached_of(facts: ModelFacts | None) -> list[str]:
    """The modules of a model that text does not reach; empty if they were never looked for."""
    return [] if facts is None else facts.unreached
