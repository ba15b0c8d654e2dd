"""Resolve every decision left to `auto`, from the base model and the machine, with a reason for each.

A user's explicit choice is never rewritten: it is listed "as asked", and `plan.rules` refuses it if it cannot work. The
order matters: hardware decides precision, precision decides compiling and so the attention, attention decides packing.
With these, each strategy is tried. The strategy decides the row length and how much of a pass is kept or recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tunebook.config.choices import (
    Compute,
    Generation,
    MasterWeights,
    PackingMode,
    PeftMethod,
    Switch,
)
from tunebook.config.schema import RunConfig, starts_elsewhere, world_size
from tunebook.config.unreached import unreached_of
from tunebook.errors import Problem
from tunebook.facts.attention import ATTENTIONS, BY_DOCUMENT
from tunebook.facts.generations import GENERATIONS
from tunebook.facts.sharing import is_offloaded
from tunebook.facts.strategies import strategy_facts
from tunebook.hardware.detect import Machine
from tunebook.model.base_config import brings_code, read_dtype
from tunebook.plan.architecture.base_model import about_parameters, facts_of_book, read_facts
from tunebook.plan.auto.decisions import AS_ASKED, Choice, Decisions, is_open
from tunebook.plan.auto.hardware import decide_hardware
from tunebook.plan.auto.kernels import (
    compiles_known_layers,
    decide_attention,
    decide_compiling,
    decide_head,
    why_not_worth_compiling,
)
from tunebook.plan.auto.parallelism import decide_strategy
from tunebook.plan.auto.passes import decide_passes
from tunebook.plan.memory.kept import number_format_of
from tunebook.plan.rules.attention import leaks
from tunebook.plan.rules.numbers import require_ranges
from tunebook.train.packages import installed_version, missing_state_kernels
from tunebook.train.requirements import hardware_problem

__all__ = ["Choice", "Resolution", "resolve_auto"]

COMPILING = "model.compile_layers"
_STATES_IN_FP32, _STATES_IN_BF16 = 16, 8  # bytes of a trained weight, its gradient and AdamW's two moments
_FROZEN_IN_4_BITS = 0.5  # bytes of a weight
_SOME_DROPOUT = 0.05  # of advised adapters
_MOST_PARTS = 3  # most parts to list


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """A configuration without open decisions, and the choices made."""

    config: RunConfig
    choices: list[Choice]
    problem: Problem | None = None  # why it cannot run here; None if it can
    host_memory_gib: float | None = None  # of one node; None: unknown

    def choice(self, key: str) -> Choice:
        """The choice at a key."""
        (found,) = [choice for choice in self.choices if choice.key == key]
        return found

    @property
    def why_not_runnable(self) -> str:
        """Why it cannot run here and what to type instead; empty if it can run."""
        return f"{self.problem.message}; try {self.problem.fix}" if self.problem is not None else ""


def resolve_auto(config: RunConfig, machine: Machine) -> Resolution:
    """Resolve everything that `config` leaves open. `config` itself is not changed.

    Two things stay open on purpose: `training.micro_batch_size` of padded batches, which the batch solver computes, and
    values that depend on the data (`dataset.format`, `dataset.train_on`). Raises: RequestError if the model's
    config.json cannot be read, or for a number outside its range.
    """
    require_ranges(config)
    resolution = _resolve(config, machine)
    compiling = resolution.choice(COMPILING)
    if not compiling.value or compiling.why == AS_ASKED:
        return resolution
    why = why_not_worth_compiling(resolution.config)
    return resolution if why is None else _resolve(config, machine, why_not_compiled=why)


def _resolve(config: RunConfig, machine: Machine, *, why_not_compiled: str | None = None) -> Resolution:
    """Resolve everything, with `why_not_compiled` as the reason not to compile if that is left open."""
    decisions = Decisions(config)
    resolved = decisions.config
    decide_hardware(decisions, machine)
    before = Decisions(resolved)  # precision depends on the facts' dtype only, which a config.json has, too
    _decide_precision(before)
    resolved.model.facts = read_facts(
        resolved.model,
        ways=_ways(before.config, resolved),
        compiles=compiles_known_layers(before.config),
    )
    _note_facts_of_book(decisions, config)
    _note_unreached(decisions)
    problem = hardware_problem(resolved, machine)
    _decide_precision(decisions)
    is_planned = problem is not None or starts_elsewhere(resolved)
    missing = None if is_planned else machine.missing_for_triton
    decisions.decide(
        COMPILING,
        lambda: (False, why_not_compiled) if why_not_compiled is not None else decide_compiling(resolved, missing),
    )
    decisions.decide("model.one_pass_head", lambda: decide_head(resolved))
    decisions.decide("attention.implementation", lambda: decide_attention(resolved, is_planned))
    decisions.decide("packing.mode", lambda: _packing(resolved, is_planned))
    decide_strategy(decisions, decide_passes)
    decide_passes(decisions)
    return Resolution(
        config=resolved,
        choices=decisions.choices,
        problem=problem,
        host_memory_gib=_host_memory_gib(resolved, machine, problem),
    )


def _decide_precision(decisions: Decisions) -> None:
    config = decisions.config
    decisions.decide("precision.compute", lambda: _compute(config))
    decisions.decide("precision.master_weights", lambda: _master_weights(config))
    decisions.decide("precision.tf32", lambda: _tf32(config))


def _ways(decided: RunConfig, asked: RunConfig) -> list[str]:
    """The ways of `ALL_WAYS` that the run can go, and that advised adapters would go if it is too large.

    `decided`: its precision is known.
    """
    ways = _ways_of(decided)
    if decided.peft.method is PeftMethod.full and _adapters_are_advised(decided):
        other = replace(decided, peft=replace(decided.peft, method=PeftMethod.lora, dropout=_SOME_DROPOUT))
        if is_open(asked.precision.master_weights):
            weights, _ = _master_weights(other)
            other = replace(other, precision=replace(other.precision, master_weights=weights))
        ways += _ways_of(other)
    return ways


def _ways_of(config: RunConfig) -> list[str]:
    is_full = config.peft.method is PeftMethod.full
    method = "full" if is_full else "dropout" if config.peft.dropout > 0 else "adapter"
    # In fp32, autocast's for what offloading leaves of adapters; in bf16, the strategies differ in autocast.
    formats = {"fp32": ["fp32"] + ["autocast"] * (not is_full), "bf16": ["bf16", "cast"]}
    number_format = number_format_of(config)
    return [f"{each}/{method}" for each in formats.get(number_format, [number_format])]


def _adapters_are_advised(config: RunConfig) -> bool:
    """Whether a full fine-tune is too large for all GPUs together, by rough numbers, and a frozen base may fit."""
    memory_gib, precision = config.hardware.memory_gib, config.precision
    if memory_gib is None or is_offloaded(config):
        return False
    trained = _STATES_IN_BF16 if precision.master_weights is MasterWeights.bf16 else _STATES_IN_FP32
    memory = memory_gib * 2**30 * world_size(config) / max(1, about_parameters(config.model))
    return _FROZEN_IN_4_BITS < memory < trained


def _note_facts_of_book(decisions: Decisions, asked: RunConfig) -> None:
    """Record that the book's facts stand for those of a model that is named on the hub and is not cached here."""
    found = facts_of_book(asked.model) if asked.model.facts is None else None
    if found is None or decisions.config.model.facts != found[1]:
        return
    why = f"the book's model={found[0]} has this name; its sizes are compared with its config.json before training"
    decisions.choices.append(Choice(key="model.facts", value=found[0], why=why))


def _note_unreached(decisions: Decisions) -> None:
    """Record which parts of the model text-only training leaves untrained. The choice has no key to type."""
    facts, parts = decisions.config.model.facts, unreached_of(decisions.config.model.facts)
    if facts is None or facts.measured is None or not parts:
        return
    named = ", ".join(parts[:_MOST_PARTS]) + (" and others" if len(parts) > _MOST_PARTS else "")
    number = facts.measured.unreached_parameters
    why = f"text reaches none of these {number:,} of {facts.num_parameters:,} parameters: they are not trained"
    decisions.choices.append(Choice(key="model.facts.unreached", value=named, why=why))


def _host_memory_gib(config: RunConfig, machine: Machine, problem: Problem | None) -> float | None:
    """The configured host memory; else this machine's, if the ranks start here.

    No decision depends on it, so it is not one of the choices.
    """
    if config.hardware.host_memory_gib is not None:
        return config.hardware.host_memory_gib
    return None if problem is not None or starts_elsewhere(config) else machine.host_memory_gib


def _compute(config: RunConfig) -> tuple[Compute, str]:
    """The base model's number format, or the nearest lossless one that the hardware computes."""
    name, facts = config.hardware.generation.name, GENERATIONS[config.hardware.generation]
    dtype = read_dtype(config.model)
    base = f"the base model is {dtype}" if dtype else "the base model's dtype is not known before it is loaded"
    if config.hardware.generation is Generation.cpu:
        return Compute.fp32, f"{base}, and a CPU computes fp32 fastest"
    if config.precision.master_weights is MasterWeights.bf16 and facts.has_bf16:
        return Compute.bf16, f"{base}, and precision.master_weights=bf16"
    if facts.has_bf16:
        reasons = {
            "bfloat16": f"{base}, and {name} computes bf16",
            "float16": f"{base}; bf16 on {name} has fp16's range and more, and needs no loss scaling",
            "float32": f"{base}; bf16 products on {name} have fp32's range, and the weights stay in fp32",
        }
        return Compute.bf16, reasons.get(dtype or "", f"{base}; {name} computes bf16, which has fp32's range")
    if dtype == "float16":
        return Compute.fp16, f"{base}, and {name} has tensor cores for fp16; the weights stay in fp32"
    overflow = "; fp16 would overflow" if dtype == "bfloat16" else ""
    return Compute.fp32, f"{base}, and {name} has no bf16{overflow}"


def _master_weights(config: RunConfig) -> tuple[MasterWeights, str]:
    """fp32 for trained weights.

    A frozen base under fp32 adapters is kept in bf16 if it is published in 16 bits. Products in bf16 round float16
    weights in the same way, so only norms, biases and embeddings lose the three further bits of float16's mantissa.
    """
    compute, dtype = config.precision.compute, read_dtype(config.model)
    if config.peft.method is PeftMethod.full:
        return MasterWeights.fp32, "a weight in bf16 would lose updates that are small relative to it"
    if compute is not Compute.bf16:
        return MasterWeights.fp32, f"bf16 weights are for products in bf16, and these are in {compute.name}"
    if dtype not in ("bfloat16", "float16"):
        return MasterWeights.fp32, f"the base model is {dtype or 'of a dtype not known before it is loaded'}"
    if strategy_facts(config).is_zero:
        return MasterWeights.fp32, "with bf16 weights DeepSpeed would compute with adapters in bf16, too"
    if dtype == "float16":
        why = "the frozen base is float16, which products in bf16 round in any case: half of fp32's memory; adapters "
        return MasterWeights.bf16, why + "are fp32"
    return MasterWeights.bf16, "the frozen base stays as it is published, in half of fp32's memory; adapters are fp32"


def _tf32(config: RunConfig) -> tuple[Switch, str]:
    name, facts = config.hardware.generation.name, GENERATIONS[config.hardware.generation]
    if not facts.has_tf32:
        return Switch.disabled, f"{name} has no tf32"
    return Switch.enabled, f"{name} computes fp32 products on tensor cores, with 10 bits of mantissa"


def _packing(config: RunConfig, is_planned: bool) -> tuple[PackingMode, str]:
    """Packed rows if kernel and architecture keep the documents of a row apart, with the packages that are there."""
    kernel, facts = config.attention.implementation, config.model.facts
    if facts is not None and leaks(config):
        return PackingMode.padded, f"{facts.architecture} cannot keep packed documents apart"
    image = GENERATIONS[config.hardware.generation].image
    is_there = (lambda package: package in image.state_kernels) if is_planned else installed_version
    if facts is not None and (missing := missing_state_kernels(config, is_there)):
        where = f"the {image.name} image does not have" if is_planned else "is not installed here"
        why = f"{facts.architecture} keeps packed documents apart by {' and '.join(missing)} on a GPU, which {where}"
        return PackingMode.padded, why
    if brings_code(config.model):
        return PackingMode.padded, "the model brings code of its own, which may let packed documents see each other"
    way = "by their lengths (varlen)" if not ATTENTIONS[kernel].has_mask else "by a block mask"
    if kernel is BY_DOCUMENT:
        way = "by computing document by document"
    needed = facts.measured.packing_packages if facts is not None and facts.measured is not None else []
    states = ""
    if needed:
        by = "torch" if config.hardware.generation is Generation.cpu else " and ".join(needed)
        states = f", and {by} the states of its layers"
    return PackingMode.isolated, f"rows without padding; {kernel.name} keeps documents apart {way}{states}"
