"""Rules about adapters (LoRA, DoRA and QLoRA), and about base models that are quantized."""

from __future__ import annotations

from collections.abc import Iterator

from tunebook.config.choices import ModelPart, PeftMethod, Weights
from tunebook.config.schema import RunConfig
from tunebook.facts.strategies import strategy_facts
from tunebook.model.base_config import read_quantizer
from tunebook.model.parameters import (
    EMBEDDINGS,
    HEADS,
    adapted_layers,
    adapters_of_parts,
    adapts_parameters,
    has_dora,
    last_name,
)
from tunebook.plan.architecture import OWN_QUANTIZER
from tunebook.plan.rules.frame import Finding, rule


@rule("adapter-on-output-head", "peft.target_modules", "peft.modules_to_save=[lm_head] to train the whole head")
def adapter_on_output_head(config: RunConfig) -> Iterator[str]:
    """Refuse an output head among the target modules.

    TRL computes the loss from the head's own weight, so an adapter there is never trained. To train the whole head,
    name it in `modules_to_save`.
    """
    heads = [name for name in config.peft.target_modules if last_name(name) in HEADS]
    if config.peft.method is not PeftMethod.full and heads:
        yield f"an adapter on {heads[0]} would never be trained"


@rule("trained-head-under-fsdp", "peft.modules_to_save", "parallelism=zero3, parallelism=ddp or peft=full")
def trained_head_under_fsdp(config: RunConfig) -> Iterator[str]:
    """Refuse an output head, and embeddings tied to one, in `modules_to_save` under FSDP.

    TRL computes the loss from the head's own weight. FSDP sums its gradient over the ranks only if the last norm is in
    the head's unit, and accelerate finds no norm behind an adapter: each rank would train a part of the head on its own
    documents alone. Of tied embeddings FSDP does not accept the copy.
    """
    facts, peft = config.model.facts, config.peft
    is_tied = facts is None or facts.tie_word_embeddings
    names = [name for name in peft.modules_to_save if last_name(name) in HEADS + EMBEDDINGS * is_tied]
    if peft.method is not PeftMethod.full and strategy_facts(config).is_fsdp and names:
        yield f"{config.parallelism.strategy.name} cannot train {names[0]} in addition to adapters"


@rule("adapter-module-unknown", fix="type one of these names, or peft.target_modules=[] for every linear layer")
def adapter_module_unknown(config: RunConfig) -> Iterator[Finding]:
    """Refuse names of layers that the model does not have, and ranks and alphas of layers without an adapter.

    PEFT does not report them if it finds others: the adapter would be smaller, or have another rank, than requested.
    """
    facts, peft = config.model.facts, config.peft
    if peft.method is PeftMethod.full or facts is None or facts.measured is None:
        return
    experts, parts = {*facts.measured.expert_adapters}, adapters_of_parts(config, facts.measured)
    of_images = {name for part, layers in parts.items() if part is not ModelPart.language for name in layers}
    layers = experts.union(facts.measured.adapters, of_images)
    adapted = experts.union(adapted_layers(config), of_images)
    for field, names, known in (
        ("target_modules", peft.target_modules, layers.union(EMBEDDINGS)),
        ("rank_pattern", peft.rank_pattern, adapted),
        ("alpha_pattern", peft.alpha_pattern, adapted),
    ):
        unknown = [name for name in names if last_name(name) not in known.union(HEADS) and not name[-1:].isdecimal()]
        if unknown:
            message = (
                f"{facts.architecture} has no {unknown[0]} to adapt; it has {', '.join(sorted(known - {*EMBEDDINGS}))}"
            )
            yield Finding(message, f"peft.{field}")


@rule("adapter-part-empty", "model.train", "'model.train=[language]', or peft=full")
def adapter_part_empty(config: RunConfig) -> Iterator[Finding]:
    """Refuse adapters for a part of the model that has no linear layer, such as Gemma 3's projector.

    It would stay as it is. A part in `modules_to_save` is trained whole.
    """
    facts, peft = config.model.facts, config.peft
    if peft.method is PeftMethod.full or peft.modules_to_save or facts is None or facts.measured is None:
        return
    for part, layers in adapters_of_parts(config, facts.measured).items():
        if facts.unreached and not layers and part is not ModelPart.language:
            message = f"{facts.architecture} has no linear layer in its {part.name}: an adapter trains nothing there"
            others = [other.name for other in config.model.train if other is not part] or ["language"]
            yield Finding(message, fix=f"'model.train=[{','.join(others)}]', or peft=full")


def _adapts_experts(config: RunConfig) -> bool:
    facts, named = config.model.facts, {last_name(name) for name in config.peft.target_modules}
    if config.peft.method is PeftMethod.full or facts is None or facts.measured is None:
        return False
    experts = facts.measured.expert_adapters
    return bool(experts) and (not named or not named.isdisjoint(experts))


@rule("adapter-dropout-on-experts", "peft.dropout", "peft.dropout=0")
def adapter_dropout_on_experts(config: RunConfig) -> Iterator[str]:
    """Refuse adapter dropout on stacked experts and other parameters.

    PEFT adapts stacked experts as one parameter, which has no input to apply dropout to.
    """
    if config.peft.dropout and (adapts_parameters(config) or _adapts_experts(config)):
        yield "adapters on stacked experts and peft.target_parameters have no dropout"


@rule("dora-not-tested", "peft.use_dora", "peft.use_dora=false or parallelism=ddp")
def dora_not_tested(config: RunConfig) -> Iterator[str]:
    """Refuse DoRA where PEFT has none, or where it reads weights that its layer does not have.

    DoRA reads the weights of a layer outside of the layer. ZeRO-3 gathers them only for the layer, and under FSDP it
    was not trained. PEFT has no DoRA for stacked experts.
    """
    if has_dora(config) and strategy_facts(config).divides_weights:
        yield f"DoRA reads weights that parallelism={config.parallelism.strategy.name} divides over the ranks"
    elif has_dora(config) and _adapts_experts(config):
        yield "PEFT has no DoRA for stacked experts"


@rule("adapter-on-parameters", "peft.target_parameters", "parallelism=ddp peft=lora model.compile_layers=false")
def adapter_on_parameters(config: RunConfig) -> Iterator[str]:
    """Refuse adapters on parameters where PEFT has none, or where they were not trained.

    PEFT adds such an adapter to the whole weight in each pass. Compiled blocks, and weights that are divided over
    ranks or have 4 bits, do not allow the exchange of a weight. PEFT has no DoRA for them.
    """
    if not adapts_parameters(config):
        return
    conflicts = {
        "peft.use_dora": config.peft.use_dora,
        "peft=qlora": config.peft.method is PeftMethod.qlora,
        f"parallelism={config.parallelism.strategy.name}": strategy_facts(config).divides_weights,
        "model.compile_layers": bool(config.model.compile_layers),
    }
    if found := [name for name, is_set in conflicts.items() if is_set]:
        yield f"adapters on parameters cannot be combined with {', '.join(found)}"


@rule("qlora-random-weights", "peft.method", "model.weights=pretrained or peft=full")
def qlora_random_weights(config: RunConfig) -> Iterator[str]:
    """Refuse a quantized base with random weights: it is frozen, so it would teach nothing."""
    if config.peft.method is PeftMethod.qlora and config.model.weights is Weights.random:
        yield "qlora freezes and quantizes a base model, and model.weights=random has none"


@rule("quantized-base", "peft.method", "the model without quantization, or peft=qlora over bitsandbytes' 4 bits")
def quantized_base(config: RunConfig) -> Iterator[str]:
    """Refuse a base model with quantized weights, except for peft=qlora over the 4 bits of bitsandbytes.

    Quantized weights are whole numbers of a few bits with scales of their own: no gradient changes them. Adapters
    over other quantizers need packages that no image has, or were never trained here.
    """
    is_qlora, quantizer = config.peft.method is PeftMethod.qlora, None
    if config.model.weights is not Weights.random:
        quantizer = read_quantizer(config.model)
    if quantizer is not None and not (is_qlora and quantizer == OWN_QUANTIZER):
        yield f"the weights are quantized by {quantizer}, and peft={config.peft.method.name} cannot train on these"
