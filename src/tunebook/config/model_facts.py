"""What planning needs to know of a base model: part of the schema, under `model.facts`."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

CAST = "cast/"  # what the keys of `MeasuredLayers.saved_without_autocast` begin with


@dataclass(kw_only=True)
class MeasuredLayers:
    """What formulas do not know of an architecture's decoder layers: found on the meta device, see there."""

    num_layers: int = MISSING  # that were measured, and that the numbers below are of together
    parameters: int = MISSING
    linear_inputs: int = MISSING  # numbers that go into their linear layers for one token, all added up
    adapter_parameters: int = MISSING  # of an adapter of rank 1 on all of them
    # Of the parameters: those in linear layers, which 4 bits are made of, and those that a token is computed with: not
    # all where a router chooses among experts. Null where nobody has looked: all of them
    linear_parameters: int | None = None
    active_parameters: int | None = None
    # Of the whole model's: numbers in the largest, such as all experts of a layer where they are stacked. Null where
    # nobody has looked: a matrix of layers like Llama's, or the embeddings
    largest_parameter: int | None = None
    unreached_parameters: int = 0  # numbers in `ModelFacts.unreached`
    # What transformers lets the architecture attend with, by the names of `Attention`; empty where nobody has looked
    attention: list[str] = field(default_factory=list)
    # By the names that `peft.target_modules` finds them by: numbers that go in and come out, all added up, of the
    # linear layers that PEFT puts an adapter on, and of stacked experts and their router. Empty where nobody has looked
    adapters: dict[str, list[int]] = field(default_factory=dict)
    expert_adapters: dict[str, list[int]] = field(default_factory=dict)
    # By "format/method/kernels" (fp32, autocast, bf16; full, adapter, dropout; sdpa, flash, eager, compiled,
    # selective): bytes that all layers keep of a row whatever its length, of each token, and of each token for each
    # token of its row; the same three of the layer that keeps most. "dropout" is an adapter with it, in compiled layers
    saved: dict[str, list[int]] = field(default_factory=dict)
    # The same by "cast/method/kernels" of layers in bf16, adapters too, without autocast; empty where nobody has looked
    saved_without_autocast: dict[str, list[int]] = field(default_factory=dict)
    # The same with adapters on all but stacked experts; empty where there are none, or nobody has looked
    saved_beside_experts: dict[str, list[int]] = field(default_factory=dict)


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
    # null: layers as Llama has them, for which there are formulas
    measured: MeasuredLayers | None = field(default=None, metadata={"identity": False})
