"""Resolve every decision left to `auto`, from the base model and the machine, with a reason for each.

A user's explicit choice is never rewritten: it is listed "as asked", and `plan.rules` refuses it if it cannot work. The
order matters: hardware decides precision, precision decides compiling and so the attention, attention decides packing.
With these, each strategy is tried. The strategy decides the row length and how much of a pass is kept or recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass

from tunebook.config.choices import Compute, Generation, MasterWeights, ModelPart, PeftMethod, Switch
from tunebook.config.model_facts import unreached_of
from tunebook.config.schema import RunConfig, starts_elsewhere
from tunebook.data.sources import begins_with_images
from tunebook.errors import Problem, RulesError
from tunebook.facts.generations import GENERATIONS
from tunebook.facts.strategies import strategy_facts
from tunebook.hardware.detect import Machine
from tunebook.model.base_config import read_dtype
from tunebook.model.positions import positions_of
from tunebook.plan.architecture import read_facts
from tunebook.plan.auto.decisions import Choice, Decisions
from tunebook.plan.auto.hardware import decide_hardware
from tunebook.plan.auto.kernels import (
    decide_attention,
    decide_compiling,
    decide_head,
    decide_packing,
)
from tunebook.plan.auto.parallelism import assume_copies, decide_strategy
from tunebook.plan.auto.passes import decide_passes
from tunebook.plan.rules import check
from tunebook.plan.rules.settings import require_ranges
from tunebook.train.requirements import hardware_problem

GLOBAL_SAMPLES = 64  # documents of an optimizer step, if nobody names a size

__all__ = ["Choice", "Resolution", "resolve_auto"]


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
    def not_runnable_reason(self) -> str:
        """Why it cannot run here and what to type instead; empty if it can run."""
        return f"{self.problem.message}; try {self.problem.fix}" if self.problem is not None else ""


def resolve_auto(config: RunConfig, machine: Machine, *, is_default_length: bool = False) -> Resolution:
    """Resolve everything that `config` leaves open. `config` itself is not changed.

    Two things stay open on purpose: `training.micro_batch_size` of padded batches, which the batch solver computes, and
    values that depend on the data (`dataset.format`, `dataset.train_on`). With `is_default_length` nobody chose
    `training.max_length`, and a model of fewer positions takes all of them. Raises: RequestError if the model's
    config.json cannot be read, or for a number outside its range.
    """
    require_ranges(config)
    decisions = Decisions(config)
    resolved = decisions.config
    decide_hardware(decisions, machine)
    resolved.model.facts = read_facts(resolved.model)
    _note_unreached(decisions)
    _decide_size(decisions, is_default_length=is_default_length)
    problem = hardware_problem(resolved, machine)
    is_planned = problem is not None or starts_elsewhere(resolved)
    _decide_precision(decisions)
    missing = None if is_planned else machine.missing_for_triton
    has_images = begins_with_images(resolved.dataset)
    if has_images:  # compiling and attention depend on it
        decisions.decide("packing.mode", lambda: decide_packing(resolved, is_planned))
    decisions.decide("model.compile_layers", lambda: decide_compiling(resolved, missing))
    decisions.decide("model.one_pass_head", lambda: decide_head(resolved))
    decisions.decide("attention.implementation", lambda: decide_attention(resolved, is_planned))
    if not has_images:
        decisions.decide("packing.mode", lambda: decide_packing(resolved, is_planned))
    try:
        decide_strategy(decisions)
        decide_passes(decisions)
    except Exception:
        # The planned step computes as the run would, and a rule may say why that is not possible.
        assume_copies(resolved)
        problems = check(resolved)
        if any(problem.is_error for problem in problems):
            raise RulesError(problems) from None
        raise
    here = None if is_planned else machine.host_memory_gib
    return Resolution(
        config=resolved,
        choices=decisions.choices,
        problem=problem,
        host_memory_gib=resolved.hardware.host_memory_gib or here,
    )


def _decide_size(decisions: Decisions, *, is_default_length: bool) -> None:
    """Decide the size of a step and the longest document where nobody chose them."""
    training, positions = decisions.config.training, positions_of(decisions.config.model)
    if training.global_samples is None and training.global_tokens is None:
        decisions.decide("training.global_samples", lambda: (GLOBAL_SAMPLES, "documents a step, the default"))
    if is_default_length and positions is not None and positions < training.max_length:
        training.max_length = positions
        choice = Choice(key="training.max_length", value=positions, why="the model has no more positions")
        decisions.choices.append(choice)


def _note_unreached(decisions: Decisions) -> None:
    """Record which parts of the model are not trained: text does not reach them, and `model.train` names none."""
    facts = decisions.config.model.facts
    is_language = decisions.config.model.train == [ModelPart.language]
    if facts is not None and facts.measured is not None and is_language and (parts := unreached_of(facts)):
        number = f"{facts.measured.unreached_parameters:,} of {facts.num_parameters:,}"
        why = f"not trained: text does not reach these {number} parameters"
        decisions.choices.append(Choice(key="model.facts.unreached", value=", ".join(parts), why=why))


def _decide_precision(decisions: Decisions) -> None:
    config = decisions.config
    decisions.decide("precision.compute", lambda: _compute(config))
    decisions.decide("precision.master_weights", lambda: _master_weights(config))
    decisions.decide("precision.tf32", lambda: _tf32(config))


def _compute(config: RunConfig) -> tuple[Compute, str]:
    """The base model's number format, or the nearest lossless one that the hardware computes."""
    generation, dtype = config.hardware.generation, read_dtype(config.model)
    base = f"the base model is {dtype}" if dtype else "the base model's dtype is not known before it is loaded"
    if generation is Generation.cpu:
        return Compute.fp32, f"{base}, and CPUs compute fp32 fastest"
    if GENERATIONS[generation].has_bf16:
        return Compute.bf16, f"{base}, and {generation.name} computes bf16, which has fp32's range"
    if dtype == "float16":
        return Compute.fp16, f"{base}, and {generation.name} has tensor cores for fp16"
    return Compute.fp32, f"{base}, {generation.name} has no bf16, and fp16 could overflow"


def _master_weights(config: RunConfig) -> tuple[MasterWeights, str]:
    """fp32 for trained weights.

    A frozen base under fp32 adapters is kept in bf16 if it is published in 16 bits. Products in bf16 round float16
    weights in the same way, so only norms, biases and embeddings lose the three further bits of float16's mantissa.
    """
    if config.peft.method is PeftMethod.full:
        return MasterWeights.fp32, "in bf16, weights would lose small updates"
    if config.precision.compute not in (Compute.bf16, Compute.fp8):
        return MasterWeights.fp32, "bf16 weights are only used with bf16 compute"
    if read_dtype(config.model) not in ("bfloat16", "float16"):
        return MasterWeights.fp32, "the base model is not known to be published in 16 bits"
    if strategy_facts(config).is_zero:
        return MasterWeights.fp32, "DeepSpeed would keep the adapters in bf16, too"
    return MasterWeights.bf16, "the frozen base takes half of fp32's memory; adapters are fp32"


def _tf32(config: RunConfig) -> tuple[Switch, str]:
    name = config.hardware.generation.name
    if not GENERATIONS[config.hardware.generation].has_tf32:
        return Switch.disabled, f"{name} has no tf32"
    return Switch.enabled, f"{name} multiplies fp32 on tensor cores, with 10 bits of mantissa"
