"""What planning knows about a base model: its sizes (part of the schema) and traced numbers of its layers.

Users do not set the traced numbers. For the shipped models they are in files next to the model's YAML
(`hydra_configs/model/NAME.architecture.json`, made by `python -m tunebook.plan.architecture.measure --book`). For other
models `plan.architecture` traces them, and a run keeps them in `architecture.json` next to its run.yaml.
"""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING

from tunebook.config.book import book_root
from tunebook.config.ranges import number

ARCHITECTURE_FILE = "architecture.json"  # in a run folder
SHIPPED_SUFFIX = ".architecture.json"  # suffix of the files next to the shipped models
CAST = "cast/"  # prefix of the keys of modes without autocast
OFFLOADED = "offloaded"  # suffix of the keys for bytes that stay on the GPU with activation offloading
TILED = "tiled"  # suffix of the keys for bytes that are kept if MLPs are computed in tiles
# The sizes that decide what a layer keeps. The number of layers is not one of them: a run may use fewer layers.
_LAYER_SIZES = ("architecture", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
_NOT_STATED = ("measured", "unreached", "config")  # fields that an answer has no key of the same form for
MASK, LENGTHS = "mask", "lengths"  # how attention can keep packed documents apart


@dataclass(kw_only=True)
class MeasuredLayers:
    """Numbers of an architecture's decoder layers, traced on the meta device (see `plan.architecture`)."""

    num_layers: int  # number of traced layers; the numbers below are sums over all of them
    parameters: int
    linear_inputs: int  # input elements of all linear layers for one token
    adapter_parameters: int  # of LoRA of rank 1 on all linear layers
    linear_parameters: int  # parameters in linear layers, which 4-bit quantization applies to
    active_parameters: int  # parameters used for one token: fewer than all if a router chooses among experts
    largest_parameter: int  # elements of the whole model's largest parameter, such as stacked experts
    unreached_parameters: int = 0  # elements of `ModelFacts.unreached`
    # Elements of embeddings besides the words', such as one for each layer: a token takes a row and computes no product
    looked_up_parameters: int = 0
    per_layer_inputs: int = 0  # numbers of a token that are computed once for all layers, each of which takes its share
    # Heads x head size, summed over the layers that attend to the whole document, and over those that attend to a
    # sliding window of so many tokens.
    attention_width: int = 0
    sliding_width: int = 0
    sliding_window: int = 0  # tokens
    # Experts that a router chooses for each token, and the inner size of one; 0 if there are none.
    experts_per_token: int = 0
    expert_size: int = 0
    has_expert_biases: bool = False
    attention: list[str] = field(default_factory=list)  # attention kernels that transformers accepts
    # Whether packed documents stay apart, by `MASK` and `LENGTHS`, as a small model showed; no entry: unknown
    isolates: dict[str, bool] = field(default_factory=dict)
    packing_packages: list[str] = field(default_factory=list)  # distributions that packed rows need on a GPU
    # Inputs and outputs of linear layers, and of stacked experts, by the names that `peft.target_modules` matches
    adapters: dict[str, list[int]] = field(default_factory=dict)
    expert_adapters: dict[str, list[int]] = field(default_factory=dict)
    not_adapted: list[str] = field(default_factory=list)  # names of linear layers that PEFT cannot adapt
    # Six numbers by "format/method/kernels" (fp32, autocast, bf16; full, adapter, dropout; sdpa, flash, eager,
    # compiled, selective): the bytes that all layers keep per row, per token and per pair of tokens, then the same
    # three for the largest layer. With "/offloaded": the bytes that stay on the GPU with activation offloading. With
    # "/tiled": the bytes that are kept if MLPs are computed in tiles, which keep their inputs only.
    saved: dict[str, list[int]] = field(default_factory=dict)
    # The same by "cast/method/kernels": layers in bf16 with adapters in bf16, without autocast
    saved_without_autocast: dict[str, list[int]] = field(default_factory=dict)
    # The same with adapters on all linear layers except stacked experts; empty if there are none
    saved_beside_experts: dict[str, list[int]] = field(default_factory=dict)
    is_of_the_book: bool = False  # one of the shipped traces


@dataclass(kw_only=True)
class ModelFacts:
    """What planning needs to know about an architecture without reading its config; checked against it at run time."""

    architecture: str = MISSING  # the class transformers loads, such as Qwen2ForCausalLM
    num_parameters: int = number(MISSING, at_least=1)  # all parameters; tied embeddings count once
    num_layers: int = number(MISSING, at_least=1)
    hidden_size: int = number(MISSING, at_least=1)
    intermediate_size: int = number(MISSING, at_least=1)
    num_attention_heads: int = number(MISSING, at_least=1)
    num_key_value_heads: int = number(MISSING, at_least=1)
    vocab_size: int = number(MISSING, at_least=2)
    max_position_embeddings: int = number(MISSING, at_least=2)  # tokens
    tie_word_embeddings: bool = MISSING
    dtype: str = MISSING  # of the published weights: float32, float16 or bfloat16
    # Parts that text never reaches and that are not trained, such as an image tower, named as in `config.unreached`
    unreached: list[str] = field(default_factory=list)
    # Further keys of the model's config.json on which its layers depend, as they are written there: head_dim,
    # sliding_window, num_experts, num_experts_per_tok and the like. Other keys are at transformers' defaults. If a
    # model's text part is under `text_config` there, it is here too.
    config: dict[str, Any] = field(default_factory=dict)
    # Not a setting: hidden from OmegaConf and not written to run.yaml. None: unknown.
    measured: MeasuredLayers | None = field(default=None, metadata={"omegaconf_ignore": True, "identity": False})

    def __post_init__(self) -> None:
        """Use the shipped trace of a model whose layers have these sizes."""
        if self.measured is None:
            self.measured = _shipped_layers(self)


def facts_from_json(answer: dict[str, Any]) -> ModelFacts:
    """Build model facts with traced layers from the JSON of `plan.architecture.measure`.

    Raises: ValueError, TypeError, KeyError or AttributeError if the JSON has another form.
    """
    kinds = {"architecture": str, "dtype": str, "tie_word_embeddings": bool}
    names = [each.name for each in fields(ModelFacts) if each.name not in _NOT_STATED]
    measured = dict(answer["measured"])
    unreached = [str(name) for name in measured.pop("unreached", [])]
    layers = layers_from_json(measured)
    return ModelFacts(
        **{name: kinds.get(name, int)(answer[name]) for name in names},
        unreached=unreached,
        config=dict(answer.get("config", {})),
        measured=layers,
    )


def layers_from_json(measured: dict[str, Any]) -> MeasuredLayers:
    """Traced layers from their JSON. Raises: the same errors as `facts_from_json`."""
    lengths = {"adapters": 2, "expert_adapters": 2, "saved": 6, "saved_without_autocast": 6, "saved_beside_experts": 6}
    values: dict[str, Any] = {}
    for each in fields(MeasuredLayers):
        if each.name not in measured:
            continue
        value = measured[each.name]
        if each.name in lengths:
            values[each.name] = _numbers(value, lengths[each.name])
        elif each.name in ("attention", "packing_packages", "not_adapted"):
            values[each.name] = [str(name) for name in value]
        elif each.name == "isolates":
            values[each.name] = {str(way): bool(found) for way, found in value.items()}
        else:
            values[each.name] = type(value)(value) if isinstance(value, bool) else int(value)
    return MeasuredLayers(**values)


def layers_to_json(layers: MeasuredLayers) -> dict[str, Any]:
    """Plain values from which `layers_from_json` restores equal layers."""
    return asdict(layers)


def _numbers(found: dict[str, Any], length: int) -> dict[str, list[int]]:
    by_name = {str(name): [int(number) for number in numbers] for name, numbers in found.items()}
    if any(len(numbers) != length for numbers in by_name.values()):
        raise ValueError(f"not {length} numbers")
    return by_name


def shipped_answers() -> list[dict[str, Any]]:
    """The traces of the shipped models, as `plan.architecture.measure` wrote them."""
    return _read_shipped(book_root() / "hydra_configs" / "model")


@lru_cache(maxsize=2)
def _read_shipped(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob(f"*{SHIPPED_SUFFIX}"))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def facts_of_hub_name(name: str) -> tuple[str, ModelFacts] | None:
    """The model group file for a model's name on the hub, and its facts; None if the book has no such model.

    A base model or a fine-tune with the same sizes has another name, and is not assumed to be the same.
    """
    group = _named_on_hub(book_root() / "hydra_configs" / "model").get(name)
    if group is None:
        return None
    stem, facts = group
    return stem, ModelFacts(**copy.deepcopy(facts))


@lru_cache(maxsize=2)
def _named_on_hub(folder: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    models = {file.stem: yaml.safe_load(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.yaml"))}
    return {
        model["name"]: (stem, model["facts"])
        for stem, model in models.items()
        if model.get("name") and model.get("facts") and not model.get("revision")
    }


def _shipped_layers(facts: ModelFacts) -> MeasuredLayers | None:
    """The shipped trace of such layers, of the model with this vocabulary if there are several."""
    found = [answer for answer in shipped_answers() if _has_layers(answer, facts)]
    if not found:
        return None
    answer = max(found, key=lambda answer: bool(answer["vocab_size"] == facts.vocab_size))
    return layers_from_json(answer["measured"] | {"is_of_the_book": True})


def _has_layers(answer: dict[str, Any], facts: ModelFacts) -> bool:
    sizes = all(answer[name] == getattr(facts, name) for name in _LAYER_SIZES)
    return sizes and answer.get("config", {}) == facts.config
