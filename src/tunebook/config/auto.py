"""What `auto` becomes: every decision left open is made here, from the base model and the machine, with its reason.

A user's explicit choice is never rewritten: it is listed "as asked", and `config.rules` refuses it if it cannot work.
The order matters: hardware decides precision, precision decides whether blocks are compiled and by that attention,
attention decides packing; with these the strategies are tried, and the strategy decides how long rows are and whether
activations must be recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tunebook.config.auto_hardware import decide_hardware
from tunebook.config.auto_kernels import decide_attention, decide_compiling, decide_head
from tunebook.config.auto_parallelism import decide_strategy
from tunebook.config.base_model import read_dtype, read_facts
from tunebook.config.choices import (
    Attention,
    Checkpointing,
    Compute,
    Generation,
    MasterWeights,
    PackingMode,
    PeftMethod,
    Strategy,
    Switch,
)
from tunebook.config.decisions import Choice, Decisions
from tunebook.config.estimate import USABLE_SHARE, estimate_memory, gib_text
from tunebook.config.rules.attention import FLASH, LEAKING_ARCHITECTURES, WITHOUT_MASK
from tunebook.config.rules.environment import hardware_problem, starts_elsewhere
from tunebook.config.rules.frame import world_size
from tunebook.config.schema import FsdpConfig, RunConfig
from tunebook.errors import Problem
from tunebook.hardware.detect import Machine
from tunebook.hardware.generations import GENERATIONS

__all__ = ["Choice", "Resolution", "resolve_auto"]

# Tokens of a packed row that give a GPU work enough. Measured on one H200, Qwen2.5-0.5B (tests/bench/results): rows of
# 1,024 are bound by launching kernels, 8,192 with flash attention are 5.6 x as fast; sdpa computes the whole square of
# a row, so a longer row than 4,096 (2.5 x) costs more than it brings.
_FULL_ROW_TOKENS = dict.fromkeys(FLASH, 8192) | {
    Attention.sdpa: 4096,
    Attention.sdpa_by_document: 4096,  # in fp32, where the products of a row keep a GPU busy
    Attention.flex_attention: 8192,
}
# Compiled blocks leave less between the matrix products, which a longer row makes larger: Qwen2.5-3B on one H200 had
# 25,079 tokens/s in rows of 8,192 and 27,062 in rows of 16,384 (h200x4_speed.jsonl), and computing norms and
# activation functions again 27,114 in those and 27,808 in rows of 32,768 (h200_selective.jsonl).
_FULL_COMPILED_ROW_TOKENS = 32_768
# Of the longest row that fits without that. A row twice as long was 8% faster so under FSDP (Llama 3 8B, two H200) and
# 1% on one GPU; that LoRA gains by it was not seen, and it lost twice as much in rows of one length.
_WORTH_COMPUTING_AGAIN = 1.5


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """A configuration without open decisions, the choices that were made, and whether it can start here."""

    config: RunConfig
    choices: list[Choice]
    is_runnable_here: bool
    where: str  # one sentence: where it runs, or why it cannot run here
    problem: Problem | None = None  # why it cannot run here
    host_memory_gib: float | None = None  # of one node; None: not known

    @property
    def why_not_runnable(self) -> str:
        """Why it cannot run here and what to type instead; empty where it can."""
        return f"{self.problem.message}; try {self.problem.fix}" if self.problem is not None else ""


def resolve_auto(config: RunConfig, machine: Machine) -> Resolution:
    """Decide everything that `config` leaves open. `config` itself is not changed.

    Two things stay open on purpose: `training.micro_batch_size` of padded batches, which the batch solver works out,
    and what the data decides once it is read (`dataset.format`, `dataset.train_on`).
    Raises: RequestError when the model's config.json cannot be read.
    """
    decisions = Decisions(config)
    resolved = decisions.config
    decide_hardware(decisions, machine)
    resolved.model.facts = read_facts(resolved.model)
    problem = hardware_problem(resolved, machine)
    decisions.decide("precision.compute", lambda: _compute(resolved))
    decisions.decide("precision.tf32", lambda: _tf32(resolved))
    is_planned = problem is not None or starts_elsewhere(resolved)
    missing = None if is_planned else machine.missing_for_triton
    decisions.decide("model.compile_layers", lambda: decide_compiling(resolved, missing))
    decisions.decide("model.one_pass_head", lambda: decide_head(resolved))
    decisions.decide("attention.implementation", lambda: decide_attention(resolved, is_planned))
    decisions.decide("packing.mode", lambda: _packing(resolved))
    decide_strategy(decisions, _decide_passes)
    _decide_passes(decisions)
    return Resolution(
        config=resolved,
        choices=decisions.choices,
        is_runnable_here=problem is None,
        where=problem.message if problem is not None else _where(resolved),
        problem=problem,
        host_memory_gib=_host_memory_gib(resolved, machine, problem),
    )


def _decide_passes(decisions: Decisions) -> None:
    """What depends on the memory that the strategy leaves: how much a pass computes, and what it keeps of it."""
    resolved = decisions.config
    decisions.decide("packing.row_length", lambda: _row_length(resolved))
    decisions.decide("training.micro_batch_size", lambda: _micro_batch_size(resolved))
    if resolved.parallelism.strategy is Strategy.hsdp and isinstance(resolved.parallelism, FsdpConfig):
        decisions.decide("parallelism.shard_group_size", lambda: _shard_group_size(resolved))
    decisions.decide("activation.checkpointing", lambda: _checkpointing(resolved))


def _host_memory_gib(config: RunConfig, machine: Machine, problem: Problem | None) -> float | None:
    """As set; else this machine's, where the ranks start here. It decides nothing, so it is no choice of the run's."""
    if config.hardware.host_memory_gib is not None:
        return config.hardware.host_memory_gib
    return None if problem is not None or starts_elsewhere(config) else machine.host_memory_gib


def _where(config: RunConfig) -> str:
    if starts_elsewhere(config):
        return f"started by {config.launcher.name.name} on other machines; this one only submits"
    if config.hardware.generation is Generation.cpu:
        return "runs here, on the CPU"
    return f"runs here, on {config.hardware.gpus_per_node} x {config.hardware.generation.name}"


def _compute(config: RunConfig) -> tuple[Compute, str]:
    """The base model's number format, or the nearest one that loses nothing and that the hardware computes."""
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


def _tf32(config: RunConfig) -> tuple[Switch, str]:
    name, facts = config.hardware.generation.name, GENERATIONS[config.hardware.generation]
    if not facts.has_tf32:
        return Switch.disabled, f"{name} has no tf32"
    return Switch.enabled, f"{name} computes fp32 products on tensor cores, with 10 bits of mantissa"


def _packing(config: RunConfig) -> tuple[PackingMode, str]:
    """Packed wherever the kernel and the architecture keep the documents of a row apart."""
    kernel, facts = config.attention.implementation, config.model.facts
    if facts is not None and facts.architecture in LEAKING_ARCHITECTURES:
        return PackingMode.padded, f"{facts.architecture} cannot keep packed documents apart"
    way = "by their lengths (varlen)" if kernel in WITHOUT_MASK else "by a block mask"
    if kernel is Attention.sdpa_by_document:
        way = "by computing document by document"
    return PackingMode.isolated, f"rows without padding; {kernel.name} keeps documents apart {way}"


def _row_length(config: RunConfig) -> tuple[int, str]:
    length = config.training.max_length
    if config.packing.mode is PackingMode.padded:
        return length, "training.max_length: the longest a padded row can be"
    target = _FULL_ROW_TOKENS.get(config.attention.implementation)
    if config.model.compile_layers:
        target = _FULL_COMPILED_ROW_TOKENS
    if target is None or config.hardware.generation is Generation.cpu:
        return length, "training.max_length: the shortest row that holds every document"
    row, again = _longest_row(config, target, _kept(config)), ""
    if _may_compute_again(config) and config.peft.method is PeftMethod.full:
        longer = _longest_row(config, target, Checkpointing.selective)
        if longer >= _WORTH_COMPUTING_AGAIN * row:
            row, again = longer, " with norms and activation functions computed again"
    if row == length:
        return row, "training.max_length: a longer row would not divide the batch or not fit into memory"
    times = f"{row // length} x training.max_length"
    return row, f"{times}: a longer pass keeps the GPU busy, and is estimated to fit{again}"


def _longest_row(config: RunConfig, target: int, checkpointing: Checkpointing) -> int:
    """Of the multiples of the longest document's length up to `target` tokens that fit and divide the batch."""
    length = config.training.max_length
    rows = (documents * length for documents in range(target // length, 1, -1))
    return next((row for row in rows if _divides_the_budget(config, row) and _fits(config, row, checkpointing)), length)


def _kept(config: RunConfig) -> Checkpointing:
    """How much is recomputed with rows as long as they may be: no more than is asked for, and no layer whole."""
    is_selective = config.activation.checkpointing is Checkpointing.selective
    return Checkpointing.selective if is_selective else Checkpointing.disabled


def _may_compute_again(config: RunConfig) -> bool:
    """Whether it is open what is kept of blocks, and they are compiled, which can keep parts."""
    return config.activation.checkpointing is Checkpointing.auto and bool(config.model.compile_layers)


def _divides_the_budget(config: RunConfig, row: int) -> bool:
    """A budget of tokens is counted in rows, which every rank needs equally many of."""
    budget = config.training.global_tokens
    return budget is None or budget % (row * world_size(config) * (config.training.micro_batch_size or 1)) == 0


def _fits(config: RunConfig, row: int, checkpointing: Checkpointing) -> bool:
    facts, memory = config.model.facts, config.hardware.memory_gib
    if facts is None or memory is None:
        return False
    longer = replace(config, packing=replace(config.packing, row_length=row))
    return estimate_memory(longer, facts, checkpointing=checkpointing).total_gib <= memory * USABLE_SHARE


def _micro_batch_size(config: RunConfig) -> tuple[int | None, str]:
    kernel, row = config.attention.implementation, config.packing.row_length
    if config.packing.mode is PackingMode.padded:
        return None, "the batch solver takes the largest that divides the batch evenly"
    if kernel in WITHOUT_MASK:
        return 1, f"one packed row of {row} tokens has work enough for a GPU; more is worth it only for short rows"
    return 1, f"{kernel.name} builds a mask of all tokens of a pass squared: one row of {row} keeps it smallest"


def _shard_group_size(config: RunConfig) -> tuple[int, str]:
    return config.hardware.gpus_per_node or 1, "the GPUs of one node, which have the fastest links"


def _checkpointing(config: RunConfig) -> tuple[Checkpointing, str]:
    """As little as the estimate fits with: whole layers cost up to a third of the speed, their parts 1 to 3%."""
    facts, memory = config.model.facts, config.hardware.memory_gib
    if facts is None:
        return Checkpointing.enabled, "the model's size is not known before it is loaded, and this is the safe side"
    if memory is None:
        return Checkpointing.enabled, "the memory is not known, and this is the safe side"
    estimate = estimate_memory(config, facts, checkpointing=Checkpointing.disabled)
    working = estimate.buffers_gib + estimate.activations_gib
    parts = f"{gib_text(estimate.states_gib)} of states and {gib_text(working)} of activations and buffers"
    usable, there = memory * USABLE_SHARE, f"{USABLE_SHARE:.0%} of {memory:g} GiB"
    if estimate.total_gib <= usable:
        return Checkpointing.disabled, f"estimated {parts} fit into {there}, and it is faster"
    if _may_compute_again(config):
        again = estimate_memory(config, facts, checkpointing=Checkpointing.selective)
        if again.total_gib <= usable:
            left = gib_text(again.buffers_gib + again.activations_gib)
            does = f"with norms and activation functions computed again {left} of the latter do"
            why = f"estimated {parts} do not fit into {there}; {does}, 1.4% slower (Qwen2.5-3B, one H200)"
            return Checkpointing.selective, why
    return Checkpointing.enabled, f"estimated {parts} do not fit into {there}"
