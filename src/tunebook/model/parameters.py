"""The numbers of parameters in the parts of a model, how many are trained, and their format in the computation."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunebook.config.choices import Compute, ModelPart, PeftMethod
from tunebook.config.model_facts import LayerFacts, ModelFacts
from tunebook.config.schema import RunConfig

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Numbers of parameters."""

    trained: int
    frozen: int
    layers: int  # of all decoder layers together, without adapters
    linear: int  # those of the layers that are in linear layers, which are quantized to 4 bits
    embeddings: int  # one matrix (vocab_size, hidden_size)
    trained_embeddings: int  # the same if it is trained
    trained_head: int  # of an output head with its own weight, or one that an adapter trains completely


# Names of the embeddings and the output head in transformers' models.
EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings")
HEADS = ("lm_head", "embed_out")
# The linear layers of an MLP, from the hidden size to its inner numbers and back. GPT-2's attention also has a c_proj.
MLP_INPUT_LAYERS = frozenset({"gate_proj", "up_proj", "gate_up_proj", "dense_h_to_4h", "fc1", "fc_in", "c_fc"})
MLP_OUTPUT_LAYERS = frozenset({"down_proj", "dense_4h_to_h", "fc2", "fc_out", "c_proj"})


def known_facts(config: RunConfig) -> ModelFacts | None:
    """The model's facts if its layers are known, so that memory can be estimated; else None."""
    facts = config.model.facts
    return None if facts is None or facts.measured is None else facts


def has_dora(config: RunConfig) -> bool:
    """Whether adapters also train the length of each output's weights."""
    return config.peft.method is not PeftMethod.full and config.peft.use_dora


def adapts_parameters(config: RunConfig) -> bool:
    """Whether adapters are also put on parameters that are no linear layer, such as some stacked experts."""
    return config.peft.method is not PeftMethod.full and bool(config.peft.target_parameters)


def count_parameters(config: RunConfig, facts: ModelFacts) -> Parameters:
    """Count a configuration's parameters."""
    embeddings = facts.vocab_size * facts.hidden_size
    if config.peft.method is PeftMethod.full:
        projector = facts.measured.projector_parameters if facts.measured is not None else 0
        parts = {
            ModelPart.language: facts.num_parameters - _unreached(facts),
            ModelPart.vision: _unreached(facts) - projector,
            ModelPart.projector: projector,
        }
        trained = sum(number for part, number in parts.items() if part in config.model.train)
        return Parameters(
            trained=trained,
            frozen=facts.num_parameters - trained,
            layers=_in_layers(facts),
            linear=_in_linear_layers(facts),
            embeddings=embeddings,
            trained_embeddings=embeddings,
            trained_head=embeddings,
        )
    saved = {last_name(module) for module in config.peft.modules_to_save}  # PEFT trains a copy of each
    saved_embeddings, saved_head = (embeddings * bool(saved & {*names}) for names in (EMBEDDINGS, HEADS))
    adapter = _adapter_parameters(config, facts, without=saved)
    saved_layers = round(facts.num_layers * sum(size for name, size in weight_sizes(facts).items() if name in saved))
    return Parameters(
        trained=adapter + saved_layers + saved_embeddings + saved_head,
        frozen=facts.num_parameters,
        layers=_in_layers(facts),
        linear=_in_linear_layers(facts),
        embeddings=embeddings,
        trained_embeddings=saved_embeddings,
        trained_head=saved_head,
    )


def active_parameters(facts: ModelFacts) -> int:
    """Parameters that compute one token, without experts that it is not routed to and without unreached parts."""
    reached = facts.num_parameters - _unreached(facts) - looked_up_parameters(facts)
    if facts.measured is None:
        return reached
    return reached - round(of_layers(facts, facts.measured.parameters - facts.measured.active_parameters))


def looked_up_parameters(facts: ModelFacts) -> int:
    """Parameters of embeddings besides the words'."""
    return facts.measured.looked_up_parameters if facts.measured is not None else 0


def largest_parameter(facts: ModelFacts) -> int:
    """Elements of the largest parameter, which is moved as a whole: usually the embeddings, or stacked experts."""
    return facts.vocab_size * facts.hidden_size if facts.measured is None else facts.measured.largest_parameter


def has_experts(facts: ModelFacts) -> bool:
    """Whether a router sends each token to some of several experts."""
    return facts.measured is not None and facts.measured.active_parameters < facts.measured.parameters


def _unreached(facts: ModelFacts) -> int:
    return facts.measured.unreached_parameters if facts.measured is not None else 0


def last_name(module: str) -> str:
    """The last part of a module's dotted name, by which PEFT matches it."""
    return module.rpartition(".")[2]


def of_layers(facts: ModelFacts, measured: float) -> float:
    """Scale a number of all layers to the planned number of layers, since a run may use fewer."""
    return measured * facts.num_layers / max(1, facts.measured.num_layers if facts.measured else facts.num_layers)


def attention_width(facts: ModelFacts) -> float:
    """Heads x head size of a decoder layer, on average; the hidden size if no trace says so."""
    measured = facts.measured
    width = 0 if measured is None else measured.attention_width + measured.sliding_width
    return of_layers(facts, width) / max(1, facts.num_layers) or facts.hidden_size


def _in_layers(facts: ModelFacts) -> int:
    """Parameters of all decoder layers, without the embeddings and the output head."""
    if facts.measured is not None:
        return round(of_layers(facts, facts.measured.parameters))
    return max(0, facts.num_parameters - facts.vocab_size * facts.hidden_size * (1 if facts.tie_word_embeddings else 2))


def _in_linear_layers(facts: ModelFacts) -> int:
    return _in_layers(facts) if facts.measured is None else round(of_layers(facts, facts.measured.linear_parameters))


def linear_layers(facts: ModelFacts) -> dict[str, tuple[float, float]]:
    """Mean inputs and outputs of each linear layer in a decoder layer, by name; empty if unknown."""
    if facts.measured is None:
        return {}
    layers = max(1, facts.measured.num_layers)
    return {name: (inputs / layers, outputs / layers) for name, (inputs, outputs) in facts.measured.adapters.items()}


def weight_sizes(facts: ModelFacts) -> dict[str, float]:
    """Weight elements of each linear layer in a decoder layer, in the order of computation."""
    sizes = {name: inputs * outputs for name, (inputs, outputs) in linear_layers(facts).items()}
    # Two layers with one name, such as GPT-2's c_proj, are one entry, whose product is too large.
    scale = _in_linear_layers(facts) / max(1, facts.num_layers) / max(1.0, sum(sizes.values()))
    return {name: size * scale for name, size in sizes.items()}


def trained_sizes(config: RunConfig, facts: ModelFacts) -> list[int]:
    """Elements of each large trained parameter in the model's order: embeddings, layers and head.

    The adapters of one layer are small and count as one parameter.
    """
    parameters, layers = count_parameters(config, facts), max(1, facts.num_layers)
    if config.peft.method is PeftMethod.full:
        matrices = [round(size) for size in weight_sizes(facts).values()]
        experts = [parameters.layers // layers - sum(matrices)] if has_experts(facts) else []  # norms are small
        in_layers = [*matrices, *experts] * facts.num_layers
        head = 0 if facts.tie_word_embeddings else parameters.embeddings
        return [parameters.embeddings, *filter(None, [looked_up_parameters(facts)]), *in_layers, *filter(None, [head])]
    saved = [parameters.trained_embeddings, parameters.trained_head]
    return [*filter(None, saved[:1]), *[(parameters.trained - sum(saved)) // layers] * layers, *filter(None, saved[1:])]


def adapted_layers(config: RunConfig) -> set[str]:
    """Names of the linear layers of decoder layers that get an adapter, without stacked experts; empty if unknown."""
    facts, named = config.model.facts, {last_name(module) for module in config.peft.target_modules}
    if facts is None or facts.measured is None:
        return named - {*EMBEDDINGS}
    every = {*facts.measured.adapters}
    return named & every if named & {*every, *facts.measured.expert_adapters, *EMBEDDINGS} else every


def adapters_of_parts(config: RunConfig, measured: LayerFacts) -> dict[ModelPart, dict[str, list[int]]]:
    """Inputs and outputs of what can be adapted in each trained part, by name."""
    parts = {
        ModelPart.language: measured.adapters | measured.expert_adapters,
        ModelPart.vision: measured.vision_adapters,
        ModelPart.projector: measured.projector_adapters,
    }
    return {part: layers for part, layers in parts.items() if part in config.model.train}


def _adapter_parameters(config: RunConfig, facts: ModelFacts, *, without: Set[str]) -> int:
    """Parameters of the adapters in trained parts: on all linear layers if no target name matches.

    PEFT ignores a name that the model lacks if another target name matches. An adapter has rank x (inputs + outputs)
    parameters, and with DoRA one more for each output.
    """
    if facts.measured is None:
        return 0
    peft = config.peft
    named = {last_name(module) for module in peft.target_modules}
    sizes = adapters_of_parts(config, facts.measured)
    known = {name for layers in sizes.values() for name in layers}
    others = sum(bool(named & {*names} - without) for names in (EMBEDDINGS, HEADS))  # of the same size
    chosen = named & known if others or named & known else known
    in_part = {
        part: sum(
            peft.rank_pattern.get(name, peft.rank) * sum(layers[name]) + peft.use_dora * layers[name][1]
            for name in (chosen & {*layers}) - without
        )
        for part, layers in sizes.items()
    }
    in_layers = in_part.pop(ModelPart.language, 0)
    outside = peft.rank * (facts.vocab_size + facts.hidden_size) + peft.use_dora * facts.hidden_size
    return others * outside + round(of_layers(facts, in_layers)) + sum(in_part.values())


def compute_dtype(config: RunConfig) -> torch.dtype:
    """The number format of the forward pass; fp8 runs keep bf16 around the fp8 products."""
    import torch

    return {Compute.fp32: torch.float32, Compute.fp16: torch.float16}.get(config.precision.compute, torch.bfloat16)
