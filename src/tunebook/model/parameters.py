"""How many parameters a model has where, and how many of them are trained."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from tunebook.config.choices import PeftMethod
from tunebook.config.model_facts import MeasuredLayers, ModelFacts
from tunebook.config.schema import RunConfig


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Numbers of parameters."""

    trained: int
    frozen: int
    layers: int  # of all decoder layers together, adapters not counted
    linear: int  # of these, those in linear layers: what 4 bits are made of
    embeddings: int  # one matrix (vocab_size, hidden_size)
    trained_embeddings: int  # the same where it is trained
    trained_head: int  # of an output head with a weight of its own, or one that an adapter trains whole


# What the embeddings and the output head are called in transformers' models.
EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings")
HEADS = ("lm_head", "embed_out")
# The products of a layer of Llama's, and of those that name its parts alike, by the part that holds them: PEFT trains
# a copy of a whole part, and puts no adapter inside.
PRODUCTS_OF = {
    "self_attn": frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "dense"}),
    "mlp": frozenset({"gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2"}),
}


def count_parameters(config: RunConfig, facts: ModelFacts) -> Parameters:
    """Count a configuration's parameters."""
    embeddings = facts.vocab_size * facts.hidden_size
    if config.peft.method is PeftMethod.full:
        unreached = _unreached(facts)
        return Parameters(
            trained=facts.num_parameters - unreached,
            frozen=unreached,
            layers=_in_layers(facts),
            linear=_in_linear_layers(facts),
            embeddings=embeddings,
            trained_embeddings=embeddings,
            trained_head=embeddings,
        )
    saved = {last_name(module) for module in config.peft.modules_to_save}  # PEFT trains a copy of each
    saved_embeddings, saved_head = (embeddings * bool(saved & {*names}) for names in (EMBEDDINGS, HEADS))
    products = saved.union(*(PRODUCTS_OF.get(module, ()) for module in saved))
    adapter = config.peft.rank * _adapter_of_rank_one(facts, config.peft.target_modules, without=products)
    sizes = product_sizes(facts)
    saved_layers = facts.num_layers * sum(sizes[product] for product in products if product in sizes)
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
    """Those that a token is computed with: not those of experts that it is not sent to, or of a tower for images."""
    reached = facts.num_parameters - _unreached(facts)
    if facts.measured is None or facts.measured.active_parameters is None:
        return reached
    return reached - round(of_layers(facts, facts.measured.parameters - facts.measured.active_parameters))


def largest_parameter(facts: ModelFacts) -> int:
    """Numbers in the largest of them, which is moved whole: the embeddings as a rule, or a layer's stacked experts."""
    if facts.measured is not None and facts.measured.largest_parameter is not None:
        return facts.measured.largest_parameter
    return max(facts.vocab_size, facts.intermediate_size) * facts.hidden_size


def has_experts(facts: ModelFacts) -> bool:
    """Whether a router sends each token to some of several experts."""
    layers = facts.measured
    return layers is not None and layers.active_parameters is not None and layers.active_parameters < layers.parameters


def _unreached(facts: ModelFacts) -> int:
    return facts.measured.unreached_parameters if facts.measured is not None else 0


def last_name(module: str) -> str:
    """Of a module's dotted name, by which PEFT finds it."""
    return module.rpartition(".")[2]


def of_layers(facts: ModelFacts, measured: float) -> float:
    """A number measured of all layers, for as many as are planned with: some runs cut a model to fewer."""
    return measured * facts.num_layers / max(1, facts.measured.num_layers if facts.measured else facts.num_layers)


def _in_layers(facts: ModelFacts) -> int:
    """Without the embeddings and the output head, which may be the same matrix."""
    if facts.measured is not None:
        return round(of_layers(facts, facts.measured.parameters))
    return max(0, facts.num_parameters - facts.vocab_size * facts.hidden_size * (1 if facts.tie_word_embeddings else 2))


def _in_linear_layers(facts: ModelFacts) -> int:
    if facts.measured is not None and facts.measured.linear_parameters is not None:
        return round(of_layers(facts, facts.measured.linear_parameters))
    return _in_layers(facts)


def trained_sizes(config: RunConfig, facts: ModelFacts) -> list[int]:
    """Of each large parameter that is trained, in the model's own order: embeddings, layers and head.

    Of a layer seven matrices; where adapters are trained these are small, and stand for one.
    """
    parameters = count_parameters(config, facts)
    if config.peft.method is PeftMethod.full:
        head = 0 if facts.tie_word_embeddings else parameters.embeddings
        return [parameters.embeddings, *[*product_sizes(facts).values()] * facts.num_layers, *filter(None, [head])]
    saved = [parameters.trained_embeddings, parameters.trained_head]
    layers = max(1, facts.num_layers)
    return [*filter(None, saved[:1]), *[(parameters.trained - sum(saved)) // layers] * layers, *filter(None, saved[1:])]


def product_sizes(facts: ModelFacts) -> dict[str, int]:
    """Of the seven matrices of one layer, in the model's own order.

    Layers of another kind are divided as Llama's are, into as much as was counted of them.
    """
    hidden, inner = facts.hidden_size, facts.intermediate_size
    keys = hidden * facts.num_key_value_heads // max(1, facts.num_attention_heads)
    sizes = {"q_proj": hidden**2, "k_proj": hidden * keys, "v_proj": hidden * keys, "o_proj": hidden**2}
    sizes |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), hidden * inner)
    whole = sum(sizes.values())
    if facts.measured is None or not whole:
        return sizes
    scale = _in_layers(facts) / max(1, facts.num_layers) / whole
    return {name: round(scale * size) for name, size in sizes.items()}


def linear_layers(facts: ModelFacts) -> dict[str, int]:
    """Of a decoder layer that the formulas are for: inputs and outputs of each linear layer, by its name."""
    hidden, inner = facts.hidden_size, facts.intermediate_size
    keys = hidden * facts.num_key_value_heads // max(1, facts.num_attention_heads)
    attention = {"q_proj": 2 * hidden, "k_proj": hidden + keys, "v_proj": hidden + keys, "o_proj": 2 * hidden}
    return attention | dict.fromkeys(("gate_proj", "up_proj", "down_proj"), hidden + inner)


def _adapter_of_rank_one(facts: ModelFacts, target_modules: list[str], *, without: Set[str]) -> int:
    """Inputs and outputs of the layers that an adapter is put on: of all linear ones where a name is not known."""
    named = {last_name(module) for module in target_modules}
    if facts.measured is not None and facts.measured.adapters:
        return _adapter_by_name(facts, facts.measured, named, without=without)
    layers = linear_layers(facts)
    chosen = named if named and named <= {*layers} else {*layers}
    adapted = sum(layers[name] for name in chosen - without)
    if facts.measured is None:
        return adapted * facts.num_layers
    share = sum(layers[name] for name in {*layers} - without) / max(1, sum(layers.values()))
    return round(share * of_layers(facts, facts.measured.adapter_parameters))


def _adapter_by_name(facts: ModelFacts, measured: MeasuredLayers, named: Set[str], *, without: Set[str]) -> int:
    """The same of layers whose names were found: PEFT passes over other names beside them."""
    sizes = measured.adapters | measured.expert_adapters
    beside = sum(bool(named & {*names} - without) for names in (EMBEDDINGS, HEADS))  # alike, words and hidden numbers
    chosen = named & {*sizes} if beside or named & {*sizes} else {*sizes}
    in_layers = sum(sum(sizes[name]) for name in chosen - without)
    return beside * (facts.vocab_size + facts.hidden_size) + round(of_layers(facts, in_layers))
