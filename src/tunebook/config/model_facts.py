"""What planning knows of a base model: its sizes, which are part of the schema, and what was traced of its layers.

The traced numbers are no setting: nobody types them. For the book's models they are files beside the model's YAML
(`hydra_configs/model/NAME.architecture.json`, made by `python -m tunebook.plan.architecture.measure --book`), for
others `plan.architecture` traces them, and a run keeps them in `architecture.json` beside its run.yaml.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from tunebook.config.book import book_root

ARCHITECTURE_FILE = "architecture.json"  # in a run folder
SHIPPED_SUFFIX = ".architecture.json"  # of the files beside the book's models
CAST = "cast/"  # what the keys of modes without autocast begin with
OFFLOADED = "offloaded"  # what the keys of bytes that activation offloading leaves end with
# The sizes that decide what a layer keeps. The number of layers is not one: runs may cut a model to fewer.
_LAYER_SIZES = ("architecture", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


@dataclass(kw_only=True)
class MeasuredLayers:
    """Numbers of an architecture's decoder layers, traced on the meta device (see `plan.architecture`)."""

    num_layers: int  # traced; the numbers below are sums over all of them
    parameters: int
    linear_inputs: int  # numbers that go into the linear layers for one token
    adapter_parameters: int  # of LoRA of rank 1 on all linear layers
    linear_parameters: int  # in linear layers, which are what is quantized to 4 bits
    active_parameters: int  # that one token is computed with: fewer than all where a router chooses among experts
    largest_parameter: int  # of the whole model: numbers in the largest parameter, such as stacked experts
    unreached_parameters: int = 0  # numbers in `ModelFacts.unreached`
    attention: list[str] = field(default_factory=list)  # the kernels that transformers lets it attend with
    # By the names that `peft.target_modules` finds: inputs and outputs of linear layers, and of stacked experts
    adapters: dict[str, list[int]] = field(default_factory=dict)
    expert_adapters: dict[str, list[int]] = field(default_factory=dict)
    # By "format/method/kernels" (fp32, autocast, bf16; full, adapter, dropout; sdpa, flash, eager, compiled,
    # selective), and with "/offloaded" for what activation offloading leaves on the GPU, six numbers: the bytes that
    # all layers keep of a row, of each token, and of each pair of tokens; and the same three of the largest layer
    saved: dict[str, list[int]] = field(default_factory=dict)
    # The same by "cast/method/kernels": layers in bf16 with adapters in bf16, without autocast
    saved_without_autocast: dict[str, list[int]] = field(default_factory=dict)
    # The same with adapters on all linear layers but stacked experts; empty where there are none
    saved_beside_experts: dict[str, list[int]] = field(default_factory=dict)
    is_of_the_book: bool = False  # one of the shipped traces


@dataclass(kw_only=True)
class ModelFacts:
    """What planning needs to know of an architecture without reading its config; checked against it at run time."""

    architecture: str = MISSING  # the class transformers loads, such as Qwen2ForCausalLM
    num_parameters: int = MISSING  # all of them, tied embeddings counted once
    num_layers: int = MISSING
    hidden_size: int = MISSING
    intermediate_size: int = MISSING
    num_attention_heads: int = MISSING
    num_key_value_heads: int = MISSING
    vocab_size: int = MISSING
    max_position_embeddings: int = MISSING  # tokens
    tie_word_embeddings: bool = MISSING
    dtype: str = MISSING  # of the published weights: float32, float16 or bfloat16
    # What no text reaches, such as a tower for images, by names as `config.unreached` writes them: it is not trained
    unreached: list[str] = field(default_factory=list)
    # No setting: OmegaConf does not see it, and it is not written to run.yaml. None: not known.
    measured: MeasuredLayers | None = field(default=None, metadata={"omegaconf_ignore": True, "identity": False})

    def __post_init__(self) -> None:
        """Take the shipped trace of a model whose layers have these sizes."""
        if self.measured is None:
            self.measured = _shipped_layers(self)


def facts_from_json(answer: dict[str, Any]) -> ModelFacts:
    """Facts with traced layers, as `plan.architecture.measure` describes a model.

    Raises: ValueError, TypeError, KeyError or AttributeError where the answer is not one.
    """
    kinds = {"architecture": str, "dtype": str, "tie_word_embeddings": bool}
    names = [each.name for each in fields(ModelFacts) if each.name not in ("measured", "unreached")]
    measured = dict(answer["measured"])
    unreached = [str(name) for name in measured.pop("unreached", [])]
    layers = layers_from_json(measured)
    return ModelFacts(
        **{name: kinds.get(name, int)(answer[name]) for name in names}, unreached=unreached, measured=layers
    )


def layers_from_json(measured: dict[str, Any]) -> MeasuredLayers:
    """Traced layers from their JSON. Raises: as `facts_from_json`."""
    lengths = {"adapters": 2, "expert_adapters": 2, "saved": 6, "saved_without_autocast": 6, "saved_beside_experts": 6}
    values: dict[str, Any] = {}
    for each in fields(MeasuredLayers):
        if each.name not in measured:
            continue
        value = measured[each.name]
        if each.name in lengths:
            values[each.name] = _numbers(value, lengths[each.name])
        elif each.name == "attention":
            values[each.name] = [str(name) for name in value]
        else:
            values[each.name] = type(value)(value) if isinstance(value, bool) else int(value)
    return MeasuredLayers(**values)


def layers_to_json(layers: MeasuredLayers) -> dict[str, Any]:
    """Plain values that `layers_from_json` reads back equal."""
    return asdict(layers)


def _numbers(found: dict[str, Any], length: int) -> dict[str, list[int]]:
    by_name = {str(name): [int(number) for number in numbers] for name, numbers in found.items()}
    if any(len(numbers) != length for numbers in by_name.values()):
        raise ValueError(f"not {length} numbers")
    return by_name


def shipped_answers() -> list[dict[str, Any]]:
    """The traces of the book's models, as `plan.architecture.measure` wrote them."""
    return _read_shipped(book_root() / "hydra_configs" / "model")


@lru_cache(maxsize=2)
def _read_shipped(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob(f"*{SHIPPED_SUFFIX}"))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def _shipped_layers(facts: ModelFacts) -> MeasuredLayers | None:
    for answer in shipped_answers():
        if all(answer[name] == getattr(facts, name) for name in _LAYER_SIZES):
            return layers_from_json(answer["measured"] | {"is_of_the_book": True})
    return None
