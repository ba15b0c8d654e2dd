"""Rules about trained weights (all, LoRA, QLoRA), the optimizer, and the learning rate schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tunebook.config.choices import (
    Compute,
    Generation,
    Offload,
    PeftMethod,
    ScheduleName,
    Weights,
)
from tunebook.config.identity import default_of
from tunebook.config.override_text import typed_list
from tunebook.config.schema import FsdpConfig, RunConfig, ZeroConfig
from tunebook.errors import nearest
from tunebook.facts.generations import GENERATIONS
from tunebook.facts.optimizers import OPTIMIZERS, RUNS_EVERYWHERE
from tunebook.facts.strategies import COPIED, SPARING_THE_HOST, strategy_facts
from tunebook.model.parameters import (
    EMBEDDINGS,
    HEADS,
    PRODUCTS_OF,
    has_experts,
    is_named_like_llama,
    last_name,
    linear_layers,
)
from tunebook.plan.rules.frame import Finding, rule
from tunebook.plan.rules.quantized import quantizer_of

# Modules of a Llama-like model other than its linear layers.
_MODULES = ("embed_tokens", "lm_head", "norm", "self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
_MOST_LAYERS = 1000  # models with more layers are not listed by name
# Names by which PEFT 0.21 finds stacked experts (transformers_weight_conversion.py), and the least ratio of a rank-1
# adapter on them to the inputs of all linear layers: 25 for Mixtral, under 6 without experts.
_OF_EXPERTS = frozenset({"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
_EXPERTS_SHARE = 8
_ADAMW = f"optimizer.name={RUNS_EVERYWHERE.name}"


@rule("adapter-on-output-head", "peft.target_modules")
def adapter_on_output_head(config: RunConfig) -> Finding | None:
    """Refuse an output head among the target modules."""
    targets = config.peft.target_modules
    heads = [name for name in targets if last_name(name) in HEADS]
    if config.peft.method is PeftMethod.full or not heads:
        return None
    rest = [name for name in targets if name not in heads]
    return Finding(f"an adapter on {heads[0]} would never be trained", typed_list("peft.target_modules", rest))


@rule("adapter-module-unknown")
def adapter_module_unknown(config: RunConfig) -> Iterator[Finding]:
    """Check models with Llama's linear layers; others may have modules that no trace names."""
    facts, peft = config.model.facts, config.peft
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

    All modules are known for models with Llama's layers. For others, only modules in both lists are found.
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


@rule("adapter-dropout-on-experts", "peft.dropout")
def adapter_dropout_on_experts(config: RunConfig) -> Finding | None:
    """Refuse adapter dropout on stacked experts.

    They are recognized by the size of an adapter on every linear layer, which has inputs and outputs for each expert.
    """
    peft, facts = config.peft, config.model.facts
    if peft.method is PeftMethod.full or not peft.dropout or facts is None or facts.measured is None:
        return None
    layers = facts.measured
    if not has_experts(facts) or layers.adapter_parameters <= _EXPERTS_SHARE * layers.linear_inputs:
        return None
    if peft.target_modules and not {last_name(name) for name in peft.target_modules} & _OF_EXPERTS:
        return None
    message = f"adapters on the experts of {facts.architecture} have no dropout, and peft.dropout is {peft.dropout:g}"
    return Finding(message, "peft.dropout=0")


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
    """Refuse a tied head in `modules_to_save`; over 4-bit weights every rank reads it anyway."""
    # accelerate 1.15, fsdp2_prepare_model; transformers 5.23, tie_weights: "attribute 'weight' already exists" (H200).
    settings, facts = config.parallelism, config.model.facts
    is_tied = facts is not None and facts.tie_word_embeddings
    heads = [name for name in config.peft.modules_to_save if last_name(name) in HEADS]
    is_sent = isinstance(settings, FsdpConfig) and settings.cpu_ram_efficient_loading
    if config.peft.method is not PeftMethod.lora or not (is_tied and heads and is_sent):
        return None
    rest = typed_list("peft.modules_to_save", [name for name in config.peft.modules_to_save if name not in heads])
    return Finding(
        f"{heads[0]} is the embeddings, to which accelerate cannot tie PEFT's copy of it again",
        f"parallelism.cpu_ram_efficient_loading=false or {rest}",
    )


@rule("tied-matrix-trained-apart", is_error=False)
def tied_matrix_trained_apart(config: RunConfig) -> Iterator[Finding]:
    """Warn about tied embeddings or a tied head in either module list."""
    facts, peft = config.model.facts, config.peft
    if peft.method is PeftMethod.full or facts is None or not facts.tie_word_embeddings:
        return
    if whole_tied_head_under_fsdp.find(config) is not None:  # an error already
        return
    for field in ("modules_to_save", "target_modules"):
        asked: list[str] = getattr(peft, field)
        # Another rule refuses an adapter on the head.
        heads = HEADS if field == "modules_to_save" else ()
        named = [name for name in asked if last_name(name) in (*heads, *EMBEDDINGS)]
        if named:
            key, rest = f"peft.{field}", [name for name in asked if name not in named]
            size = facts.vocab_size * facts.hidden_size / 1e6
            message = (
                f"{' and '.join(named)}: embeddings and output head are one matrix in this model, and two of "
                f"{size:,.1f} million weights after training"
            )
            yield Finding(message, typed_list(key, rest), key=key)


@rule("adapter-settings-ignored", is_error=False)
def adapter_settings_ignored(config: RunConfig) -> Iterator[Finding]:
    """Warn about module lists that a full fine-tune does not use."""
    if config.peft.method is not PeftMethod.full:
        return
    other = " or peft=lora" if _lora_goes(config) else ""
    for field in ("target_modules", "modules_to_save"):
        if getattr(config.peft, field):
            key = f"peft.{field}"
            yield Finding("it is not used by peft.method=full", f"{key}=[]{other}", key=key)


def _lora_goes(config: RunConfig) -> bool:
    """Whether the rules would accept the run with its adapter settings instead of a full fine-tune."""
    with_adapter = replace(config, peft=replace(config.peft, method=PeftMethod.lora))
    refusing = (adapter_on_output_head, adapter_without_targets, adapter_dropout_on_experts)
    if any(rule.find(with_adapter) for rule in refusing) or adapter_module_unknown.problems(with_adapter):
        return False
    return config.precision.compute is not Compute.fp8 and quantizer_of(config) is None


@rule("qlora-random-weights", "peft.method")
def qlora_random_weights(config: RunConfig) -> Finding | None:
    """Refuse a quantized base with random weights."""
    if config.peft.method is not PeftMethod.qlora or config.model.weights is not Weights.random:
        return None
    message = "qlora freezes and quantizes a base model, and model.weights=random has none"
    return Finding(message, "model.weights=pretrained or peft=full")


@rule("optimizer-without-gpu", "optimizer.name")
def optimizer_without_gpu(config: RunConfig) -> Finding | None:
    """Refuse a GPU optimizer on a CPU."""
    name = config.optimizer.name
    if not OPTIMIZERS[name].needs_gpu or config.hardware.generation is not Generation.cpu:
        return None
    return Finding(f"{name.name} needs a GPU", _ADAMW)


@rule("optimizer-without-bf16", "optimizer.name")
def optimizer_without_bf16(config: RunConfig) -> Finding | None:
    """Refuse an optimizer that needs bf16 on a GPU without it; CPUs compute bf16 slowly but correctly."""
    name, generation = config.optimizer.name, config.hardware.generation
    has_bf16 = generation in (Generation.auto, Generation.cpu) or GENERATIONS[generation].has_bf16
    if not OPTIMIZERS[name].needs_bf16 or has_bf16:
        return None
    return Finding(f"{name.name} needs bf16, which {generation.name} lacks", _ADAMW)


@rule("optimizer-with-fsdp", "optimizer.name")
def optimizer_with_fsdp(config: RunConfig) -> Finding | None:
    """Refuse an optimizer without DTensor support under FSDP."""
    name, strategy = config.optimizer.name, config.parallelism.strategy
    facts = OPTIMIZERS[name]
    if facts.takes_dtensors or not strategy_facts(config).is_fsdp:
        return None
    message = f"{name.name} does not work on the sharded tensors of {strategy.name}"
    may_use_zero = facts.takes_flat_pieces and config.precision.compute is not Compute.fp8  # see fp8-with-deepspeed
    return Finding(message, _ADAMW + (" or parallelism=zero3" if may_use_zero else ""))


@rule("optimizer-with-zero", "optimizer.name")
def optimizer_with_zero(config: RunConfig) -> Finding | None:
    """Refuse an optimizer of matrices with ZeRO's flat slices."""
    name, strategy = config.optimizer.name, config.parallelism.strategy
    facts = OPTIMIZERS[name]
    if facts.takes_flat_pieces or not strategy_facts(config).is_zero:
        return None
    message = f"{name.name} needs whole matrices, and {strategy.name} passes it flat slices of them"
    other = SPARING_THE_HOST if facts.takes_dtensors else COPIED
    return Finding(message, f"{_ADAMW} or parallelism={other.name}")


@rule("optimizer-offloaded", "optimizer.name")
def optimizer_offloaded(config: RunConfig) -> Finding | None:
    """Refuse an optimizer on the GPU with parameters or states on the host."""
    name, settings = config.optimizer.name, config.parallelism
    if OPTIMIZERS[name].can_be_offloaded:
        return None
    field = "offload_optimizer" if isinstance(settings, ZeroConfig) else "offload_parameters"
    if getattr(settings, field, Offload.none) is Offload.none or optimizer_with_fsdp.find(config) is not None:
        return None
    message = f"{name.name} runs on the GPU, and parallelism.{field} moves its states to the host"
    return Finding(message, f"{_ADAMW} or parallelism.{field}=none")


@rule("optimizer-settings-ignored", is_error=False)
def optimizer_settings_ignored(config: RunConfig) -> Iterator[Finding]:
    """Settings that the optimizer does not use and that differ from their defaults."""
    optimizer = config.optimizer
    for field in ("beta1", "beta2", "epsilon"):
        default = default_of(f"optimizer.{field}")
        if field not in OPTIMIZERS[optimizer.name].settings and getattr(optimizer, field) != default:
            message = f"{optimizer.name.name} does not use {field}"
            yield Finding(message, f"optimizer.{field}={default:g} or {_ADAMW}", key=f"optimizer.{field}")


@rule("two-warm-ups", "schedule.warmup_steps")
def two_warm_ups(config: RunConfig) -> Finding | None:
    """Allow at most one of the two warm-up settings."""
    steps, share = config.schedule.warmup_steps, config.schedule.warmup_share
    if steps is None or share is None:
        return None
    message = f"warmup_steps={steps} and warmup_share={share:g} both set the warm-up"
    return Finding(message, "schedule.warmup_share=null or schedule.warmup_steps=null")


@rule("two-floors", "schedule.min_learning_rate")
def two_floors(config: RunConfig) -> Finding | None:
    """Allow at most one of the two floor settings."""
    floor, share = config.schedule.min_learning_rate, config.schedule.min_learning_rate_share
    if floor is None or share is None:
        return None
    message = f"min_learning_rate={floor:g} and min_learning_rate_share={share:g} both set the floor"
    return Finding(message, "schedule.min_learning_rate=null")


@rule("floor-without-its-schedule")
def floor_without_its_schedule(config: RunConfig) -> Iterator[Finding]:
    """Refuse floors of other schedules."""
    name = config.schedule.name
    if name is ScheduleName.cosine_with_min_lr:
        return
    for field in ("min_learning_rate", "min_learning_rate_share"):
        if getattr(config.schedule, field) is not None:
            key = f"schedule.{field}"
            fix = f"{key}=null or schedule.name=cosine_with_min_lr"
            yield Finding(f"schedule.name={name.name} has no floor", fix, key=key)


@rule("schedule-without-floor", "schedule.min_learning_rate")
def schedule_without_floor(config: RunConfig) -> Finding | None:
    """Require the floor that the schedule needs."""
    schedule = config.schedule
    if schedule.name is not ScheduleName.cosine_with_min_lr:
        return None
    if schedule.min_learning_rate is not None or schedule.min_learning_rate_share is not None:
        return None
    return Finding("cosine_with_min_lr needs the learning rate it ends at", "schedule.min_learning_rate_share=0.1")


@rule("floor-above-peak", "schedule.min_learning_rate")
def floor_above_peak(config: RunConfig) -> Finding | None:
    """Compare the floor with the optimizer's learning rate."""
    floor, peak = config.schedule.min_learning_rate, config.optimizer.learning_rate
    if floor is None or floor <= peak:
        return None
    return Finding(f"the floor {floor:g} is above optimizer.learning_rate={peak:g}", "schedule.min_learning_rate=0")


@rule("warm-up-longer-than-run", "schedule.warmup_steps", is_error=False)
def warm_up_longer_than_run(config: RunConfig) -> Finding | None:
    """Compare the warm-up with the run's length, if `max_steps` gives it."""
    steps, total = config.schedule.warmup_steps, config.training.max_steps
    if steps is None or total is None or steps < total:
        return None
    message = f"{steps} steps of warm-up do not fit into training.max_steps={total}"
    return Finding(message, f"schedule.warmup_steps={max(0, total // 10)}")


@rule("warm-up-ignored", is_error=False)
def warm_up_ignored(config: RunConfig) -> Iterator[Finding]:
    """Warn about a warm-up that the schedule does not use."""
    if config.schedule.name is not ScheduleName.constant:
        return
    for field in ("warmup_steps", "warmup_share"):
        if getattr(config.schedule, field):
            key = f"schedule.{field}"
            fix = f"schedule.name=constant_with_warmup or {key}=null"
            yield Finding("schedule.name=constant has no warm-up", fix, key=key)
