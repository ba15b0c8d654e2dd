"""Rules about adapters: LoRA, DoRA and QLoRA."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tunebook.config.choices import Compute, PeftMethod, Weights
from tunebook.config.override_text import typed_list, typed_mapping
from tunebook.config.schema import FsdpConfig, RunConfig
from tunebook.errors import nearest
from tunebook.facts.strategies import strategy_facts
from tunebook.model.parameters import (
    HEADS,
    PRODUCTS_OF,
    adapted_layers,
    adapts_parameters,
    is_named_like_llama,
    last_name,
    linear_layers,
)
from tunebook.plan.rules.frame import Finding, rule, without
from tunebook.plan.rules.quantized import quantizer_of

# Modules of a Llama-like model other than its linear layers.
_MODULES = ("embed_tokens", "lm_head", "norm", "self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
_ALL_LINEAR = "all-linear"  # PEFT's word for them, as the whole value and not in a list
_PATTERNS = ("rank_pattern", "alpha_pattern")
_MOST_LAYERS = 1000  # models with more layers are not listed by name
# Names by which PEFT 0.21 finds stacked experts (transformers_weight_conversion.py).
_OF_EXPERTS = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})


@rule("adapter-on-output-head", "peft.target_modules")
def adapter_on_output_head(config: RunConfig) -> Finding | None:
    """Refuse an output head among the target modules.

    TRL computes the loss from the head's own weight, so an adapter there is never trained. To train the whole head,
    name it in `modules_to_save`.
    """
    targets = config.peft.target_modules
    heads = [name for name in targets if last_name(name) in HEADS]
    if config.peft.method is PeftMethod.full or not heads:
        return None
    fix = without("peft.target_modules", targets, heads)
    return Finding(f"an adapter on {heads[0]} would never be trained", fix)


@rule("adapter-module-unknown")
def adapter_module_unknown(config: RunConfig) -> Iterator[Finding]:
    """Refuse modules that the model does not have.

    PEFT does not report them if it finds others: the adapter would be smaller than requested. Only models with
    Llama's linear layers are checked; others may have modules that no trace names.
    """
    facts, peft = config.model.facts, config.peft
    if peft.method is not PeftMethod.full and _ALL_LINEAR in peft.target_modules:
        message = f"{_ALL_LINEAR} is no module; an empty list means every linear layer but the output head"
        yield Finding(message, "peft.target_modules=[]", key="peft.target_modules")
        return
    if peft.method is PeftMethod.full or facts is None or not is_named_like_llama(facts):
        return
    linear = (*linear_layers(facts), "embed_tokens")
    for field, known in (("target_modules", linear), ("modules_to_save", (*linear, *_MODULES))):
        asked: list[str] = getattr(peft, field)
        unknown = [name for name in asked if last_name(name) not in (*known, *HEADS) and not name[-1:].isdecimal()]
        if unknown:
            meant = (nearest(name, known) if name in unknown else name for name in asked)
            message = f"{facts.architecture} has no {unknown[0]}; it has {', '.join(sorted({*known}))}"
            sound = [*dict.fromkeys(name for name in meant if name)]
            all_linear = "; an empty list means every linear layer" if field == "target_modules" and not sound else ""
            yield Finding(message + all_linear, typed_list(f"peft.{field}", sound), key=f"peft.{field}")


@rule("adapter-without-targets", "peft.modules_to_save")
def adapter_without_targets(config: RunConfig) -> Finding | None:
    """Refuse module lists that leave no module for an adapter.

    What `modules_to_save` names is trained whole and gets no adapter. All modules are known for models with Llama's
    layers. For others, only modules in both lists are found.
    """
    peft = config.peft
    if peft.method is PeftMethod.full or not peft.modules_to_save:
        return None
    targets = _targets(config)
    if not targets or not all(any(_is_within(target, saved) for saved in peft.modules_to_save) for target in targets):
        return None
    rest = [saved for saved in peft.modules_to_save if not any(_is_within(target, saved) for target in targets)]
    message = f"{', '.join(peft.modules_to_save)} leave no module for an adapter: what they hold is trained whole"
    fix = typed_list("peft.modules_to_save", rest) + ("" if quantizer_of(config) else " or peft=full")
    return Finding(message, fix)


@rule("adapter-module-refused", "peft.target_modules")
def adapter_module_refused(config: RunConfig) -> Finding | None:
    """Refuse linear layers that PEFT cannot adapt in this architecture.

    PEFT stops at the output projection of some Mamba layers, whose kernel reads its weight directly. It adapts
    routers that return the chosen experts in addition to a product, and fails in the first pass.
    """
    peft, facts = config.peft, config.model.facts
    if peft.method is PeftMethod.full or facts is None or facts.measured is None:
        return None
    refused = facts.measured.not_adapted
    named = [name for name in peft.target_modules if last_name(name) in refused] if peft.target_modules else refused
    if not named:
        return None
    message = f"PEFT has no adapter for {', '.join(named)} of {facts.architecture}"
    rest = [name for name in peft.target_modules if name not in named]
    return Finding(message, typed_list("peft.target_modules", rest or list(facts.measured.adapters)))


@rule("adapter-dropout-on-experts", "peft.dropout")
def adapter_dropout_on_experts(config: RunConfig) -> Finding | None:
    """Refuse adapter dropout on stacked experts and other parameters.

    PEFT adapts stacked experts as one parameter, which has no input to apply dropout to.
    """
    peft, facts = config.peft, config.model.facts
    if adapts_parameters(config) and peft.dropout:
        message = (
            f"adapters on parameters (peft.target_parameters) have no dropout, and peft.dropout is {peft.dropout:g}"
        )
        return Finding(message, "peft.dropout=0")
    if peft.method is PeftMethod.full or not peft.dropout or facts is None or facts.measured is None:
        return None
    if not _adapts_experts(config):
        return None
    message = f"adapters on the experts of {facts.architecture} have no dropout, and peft.dropout is {peft.dropout:g}"
    return Finding(message, "peft.dropout=0")


@rule("adapter-pattern-unmatched")
def adapter_pattern_unmatched(config: RunConfig) -> Iterator[Finding]:
    """Refuse a rank or an alpha for what gets no adapter.

    PEFT ignores such a key, and the layer that was meant has the rank and alpha of all others. Layers of unknown
    names are checked when they are made.
    """
    if config.peft.method is PeftMethod.full:
        return
    for field in _PATTERNS:
        pattern: dict[str, float] = getattr(config.peft, field)
        layers = adapted_layers(config)
        unmatched = [name for name in pattern if not name.isidentifier() or (layers and name not in layers)]
        if not unmatched:
            continue
        known = f"one of {', '.join(sorted(layers))}" if layers else "such as q_proj"
        message = f"{unmatched[0]} is the name of no linear layer that gets an adapter; a key is {known}"
        meant = {nearest(name, layers) if name in unmatched else name: value for name, value in pattern.items()}
        fix = typed_mapping(f"peft.{field}", {name: value for name, value in meant.items() if name})
        yield Finding(message, fix, key=f"peft.{field}")


@rule("dora-not-tested", "peft.use_dora")
def dora_not_tested(config: RunConfig) -> Finding | None:
    """Refuse DoRA where PEFT has none, or where it reads weights that its layer does not have.

    DoRA reads the weights of a layer outside of the layer. ZeRO-3 gathers them only for the layer, and under FSDP it
    was not trained. PEFT has no DoRA for stacked experts.
    """
    peft, facts = config.peft, config.model.facts
    if peft.method is PeftMethod.full or not peft.use_dora:
        return None
    if strategy_facts(config).divides_weights:
        # DeepSpeed gathers the weights of a linear layer for its own forward pass only. FSDP gathers those of a block,
        # which may do; it was not trained.
        message = f"DoRA reads weights that parallelism={config.parallelism.strategy.name} divides over the ranks"
        return Finding(message, "peft.use_dora=false or parallelism=zero2")
    if facts is not None and facts.measured is not None and _adapts_experts(config):
        message = f"PEFT has no DoRA for the stacked experts of {facts.architecture}"
        names = [name for name in facts.measured.adapters if name not in _OF_EXPERTS]
        return Finding(message, f"peft.use_dora=false or {typed_list('peft.target_modules', names)}")
    return None


@rule("adapter-on-parameters", "peft.target_parameters")
def adapter_on_parameters(config: RunConfig) -> Finding | None:
    """Refuse adapters on parameters where PEFT has none, or where they were not trained.

    PEFT adds such an adapter to the whole weight in each pass. Compiled blocks, and weights that are divided over
    ranks, do not allow the exchange of a weight.
    """
    peft, none = config.peft, "peft.target_parameters=[]"
    if not adapts_parameters(config):
        return None
    number = config.model.facts.num_layers if config.model.facts is not None else None
    if number and (beyond := [name for name in peft.target_parameters if _layer_in(name) >= number]):
        message = f"{beyond[0]} is of no layer: the model has {number} layers, from 0 to {number - 1}"
        return Finding(message, without("peft.target_parameters", peft.target_parameters, beyond))
    if peft.use_dora:
        return Finding("PEFT has no DoRA for parameters that are no linear layer", f"peft.use_dora=false or {none}")
    if peft.method is PeftMethod.qlora:
        return Finding("adapters on parameters were not trained over a base in 4 bits yet", f"peft=lora or {none}")
    if strategy_facts(config).divides_weights:
        message = (
            f"adapters are added to whole weights, and parallelism={config.parallelism.strategy.name} divides them"
        )
        return Finding(message, f"parallelism=zero2 or {none}")
    if config.model.compile_layers:
        message = (
            "in each step PEFT exchanges the weights of peft.target_parameters, which compiled blocks do not allow"
        )
        return Finding(message, f"model.compile_layers=false or {none}")
    return None


def _layer_in(name: str) -> int:
    """The number of the layer in a parameter's name; -1 if it names none, as for those of all layers."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), -1)


def _adapts_experts(config: RunConfig) -> bool:
    facts, named = config.model.facts, {last_name(name) for name in config.peft.target_modules}
    assert facts is not None and facts.measured is not None
    return bool(facts.measured.expert_adapters) and (not named or bool(named & {*facts.measured.expert_adapters}))


def _targets(config: RunConfig) -> list[str]:
    """Dotted names of the modules that would get an adapter; as typed, if the modules are unknown."""
    facts, asked = config.model.facts, config.peft.target_modules
    if facts is None or not is_named_like_llama(facts):
        return list(asked)
    in_layer = [
        f"{part}.{name}" for part, names in PRODUCTS_OF.items() for name in linear_layers(facts) if name in names
    ]
    layers = range(min(facts.num_layers, _MOST_LAYERS))
    linear = [f"model.layers.{number}.{name}" for number in layers for name in in_layer]
    if not asked:
        return linear
    return [name for name in (*linear, "model.embed_tokens") if any(f".{name}".endswith(f".{end}") for end in asked)]


def _is_within(module: str, saved: str) -> bool:
    """Whether a module is a fully trained one, or inside one, judged by its dotted name."""
    return f".{saved}." in f".{module}."


@rule("whole-tied-head-under-fsdp", "peft.modules_to_save")
def whole_tied_head_under_fsdp(config: RunConfig) -> Finding | None:
    """Refuse a tied head in `modules_to_save`; over 4-bit weights every rank reads it anyway.

    If one rank reads the weights for all, accelerate ties the head to the embeddings again. That fails if PEFT has
    replaced the head by a copy.
    """
    # accelerate 1.15, fsdp2_prepare_model; transformers 5.23, tie_weights: "attribute 'weight' already exists" (H200).
    settings, facts = config.parallelism, config.model.facts
    is_tied = facts is not None and facts.tie_word_embeddings
    heads = [name for name in config.peft.modules_to_save if last_name(name) in HEADS]
    is_sent = isinstance(settings, FsdpConfig) and settings.cpu_ram_efficient_loading
    if config.peft.method is not PeftMethod.lora or not (is_tied and heads and is_sent):
        return None
    rest = without("peft.modules_to_save", config.peft.modules_to_save, heads)
    return Finding(
        f"{heads[0]} is the embeddings, to which accelerate cannot tie PEFT's copy of it again",
        f"parallelism.cpu_ram_efficient_loading=false or {rest}",
    )


@rule("adapter-settings-ignored", is_error=False)
def adapter_settings_ignored(config: RunConfig) -> Iterator[Finding]:
    """Warn about settings of adapters that a full fine-tune does not use."""
    if config.peft.method is not PeftMethod.full:
        return
    other = " or peft=lora" if _lora_goes(config) else ""
    unset = {
        "target_modules": "[]",
        "modules_to_save": "[]",
        "target_parameters": "[]",
        **dict.fromkeys(_PATTERNS, "{}"),
    }
    unset |= {"use_dora": "false", "use_rslora": "false"}
    for field, nothing in unset.items():
        if getattr(config.peft, field):
            key = f"peft.{field}"
            yield Finding("it is not used by peft.method=full", f"{key}={nothing}{other}", key=key)


def _lora_goes(config: RunConfig) -> bool:
    """Whether the rules would accept the run with its adapter settings instead of a full fine-tune."""
    with_adapter = replace(config, peft=replace(config.peft, method=PeftMethod.lora))
    refusing = (
        *(adapter_on_output_head, adapter_module_unknown, adapter_without_targets, adapter_dropout_on_experts),
        *(adapter_pattern_unmatched, dora_not_tested, adapter_on_parameters, adapter_module_refused),
    )
    if any(rule.problems(with_adapter) for rule in refusing):
        return False
    return config.precision.compute is not Compute.fp8 and quantizer_of(config) is None


@rule("qlora-random-weights", "peft.method")
def qlora_random_weights(config: RunConfig) -> Finding | None:
    """Refuse a quantized base with random weights: it is frozen, so it would teach nothing."""
    if config.peft.method is not PeftMethod.qlora or config.model.weights is not Weights.random:
        return None
    message = "qlora freezes and quantizes a base model, and model.weights=random has none"
    return Finding(message, "model.weights=pretrained or peft=full")
