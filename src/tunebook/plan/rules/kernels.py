"""Rules about attention and packing, compiled blocks, the output head, and activations that are recomputed or tiled."""

from __future__ import annotations

from collections.abc import Iterator

from tunebook.config.choices import Checkpointing, Compute, PackingMode, PeftMethod
from tunebook.config.model_facts import LENGTHS, MASK
from tunebook.config.schema import RunConfig, data_ranks
from tunebook.facts.architectures import has_attention
from tunebook.facts.attention import attention_facts
from tunebook.facts.generations import GENERATIONS, can_run, capability_text
from tunebook.facts.strategies import strategy_facts
from tunebook.model.parameters import has_dora, has_experts
from tunebook.plan.rules.frame import rule

_KEY = "attention.implementation"
_AUTO = f"{_KEY}=auto"


def isolates(config: RunConfig) -> bool | None:
    """Whether a small model of this architecture kept packed documents apart, with this attention; None if unknown."""
    facts = config.model.facts
    if facts is None or facts.measured is None:
        return None
    return facts.measured.isolates.get(MASK if attention_facts(config).has_mask else LENGTHS)


@rule("packing-leaks", "packing.mode", "attention=auto packing=auto")
def packing_leaks(config: RunConfig) -> Iterator[str]:
    """Refuse isolated packing with an architecture that is known to leak.

    Documents are kept apart by positions and the attention mask. A model that takes no positions, makes its mask
    without them, or carries a state along the row lets a document see the one before it.
    """
    facts, kernel = config.model.facts, config.attention.implementation
    if config.packing.mode is PackingMode.isolated and facts is not None and isolates(config) is False:
        yield f"{facts.architecture} with {kernel.name} cannot keep packed documents apart"


@rule("attention-not-in-model", _KEY, _AUTO)
def attention_not_in_model(config: RunConfig) -> Iterator[str]:
    """Refuse a kernel that the architecture's code does not support.

    Some architectures cap logits, have sinks, or ask for dropout. transformers refuses a kernel without that feature,
    or silently takes another one.
    """
    kernel, facts = config.attention.implementation, config.model.facts
    if facts is not None and facts.measured is not None and not has_attention(config, kernel):
        yield f"{facts.architecture} does not support {kernel.name}; it supports {', '.join(facts.measured.attention)}"


@rule("flash-attention-below-ampere", _KEY, _AUTO)
def flash_attention_below_ampere(config: RunConfig) -> Iterator[str]:
    """Refuse flash attention if the generation cannot run it.

    flash-attn 2 needs compute capability 8.0, flash-attn 4 needs 9.0. An older GPU fails at the first step.
    """
    kernel, generation = config.attention.implementation, config.hardware.generation
    if generation in GENERATIONS and not can_run(kernel, generation):
        needed = capability_text(attention_facts(config).oldest or (0, 0))
        yield f"{kernel.name} needs a GPU of compute capability {needed}, and hardware.generation is {generation.name}"


@rule("flash-attention-in-fp32", _KEY, _AUTO)
def flash_attention_in_fp32(config: RunConfig) -> Iterator[str]:
    """Refuse flash attention in fp32: the kernels exist for fp16 and bf16 only."""
    if attention_facts(config).is_flash and config.precision.compute is Compute.fp32:
        yield f"{config.attention.implementation.name} computes in fp16 or bf16 only, and precision.compute is fp32"


@rule("flash-attention-not-deterministic", _KEY, f"{_KEY}=sdpa", is_error=False)
def flash_attention_not_deterministic(config: RunConfig) -> Iterator[str]:
    """Warn about deterministic training with flash attention.

    The backward pass adds the gradients of queries in the order in which blocks finish. flash-attn 2 has a
    deterministic way that is slower and needs more memory; others may differ in the last bits between runs.
    """
    if attention_facts(config).is_flash and config.training.deterministic:
        yield "its backward pass may differ in the last bits although training.deterministic is true"


@rule("varlen-attention-padded", _KEY, f"packing.mode=isolated or {_AUTO}")
def varlen_attention_padded(config: RunConfig) -> Iterator[str]:
    """Refuse varlen attention with rows that are not packed: it does not support padding."""
    if config.parallelism.sequence_group_size > 1:
        return  # see the rules about rows that several GPUs share
    if attention_facts(config).needs_lengths and config.packing.mode is not PackingMode.isolated:
        kernel, mode = config.attention.implementation.name, config.packing.mode.name
        yield f"{kernel} computes packed rows only, and packing.mode is {mode}"


@rule("compiled-layers-not-possible", "model.compile_layers", "model.compile_layers=false")
def compiled_layers_not_possible(config: RunConfig) -> Iterator[str]:
    """Refuse compiled blocks with Liger's kernels, flash-attn's packages, sdpa_by_document, or some adapters.

    torch cannot compile a block that calls Liger's kernels (torch 2.11, liger-kernel 0.8.5). transformers' function for
    flash-attn reads the number of the calling block, so torch compiles each block again and stops after eight.
    sdpa_by_document reads on the host how long the documents of a row are. Adapters in compiled blocks read weights
    that ZeRO-3 gathers in calls of their layers only. The scales of a base in 4 bits cannot be divided by FSDP, and
    DeepSpeed would cast them. The memory of compiled blocks with DoRA cannot be planned.
    """
    if config.model.compile_layers and config.model.liger_kernel:
        yield "blocks that call Liger's kernels cannot be compiled"
    if config.model.compile_layers and not attention_facts(config).compiles_with_blocks:
        yield f"blocks with attention.implementation={config.attention.implementation.name} cannot be compiled as one"
    strategy, method = strategy_facts(config), config.peft.method
    if config.model.compile_layers and method is not PeftMethod.full and strategy.is_zero3:
        yield "compiled blocks with adapters need whole weights, and ZeRO-3 divides them"
    if config.model.compile_layers and method is PeftMethod.qlora and not (strategy.is_copied or strategy.is_zero3):
        yield "blocks with a base in 4 bits are compiled on one GPU and with DDP only"
    if config.model.compile_layers and has_dora(config):
        yield "compiled blocks with DoRA cannot be planned, and had other losses"


@rule("one-pass-head-in-fp16", "model.one_pass_head", "model.one_pass_head=false")
def one_pass_head_in_fp16(config: RunConfig) -> Iterator[str]:
    """Refuse head gradients computed in the forward pass in a format that needs loss scaling.

    They are made before the loss is scaled, so what is below fp16's smallest number is lost.
    """
    if config.model.one_pass_head and config.precision.compute is Compute.fp16:
        yield "in fp16 the loss is scaled after the forward pass, too late for gradients that are computed in it"


@rule("memory-budget-not-possible", "activation.memory_budget", "activation.memory_budget=1")
def memory_budget_not_possible(config: RunConfig) -> Iterator[str]:
    """Refuse a memory budget below 1 where blocks are not compiled, or are recomputed whole.

    The compiler chooses which operations of a block are recomputed. activation=checkpointing recomputes layers whole,
    compiled or not, and keeps less than any budget.
    """
    budget = config.activation.memory_budget
    if budget is None or budget == 1:
        return
    if not config.model.compile_layers:
        yield "only compiled blocks can recompute some of their activations and keep the others"
    if config.activation.checkpointing is Checkpointing.enabled:
        yield "activation.checkpointing=enabled recomputes all activations of a layer"


@rule("mlp-tiles-not-possible", "activation.mlp_tile_tokens", "activation.mlp_tile_tokens=null")
def mlp_tiles_not_possible(config: RunConfig) -> Iterator[str]:
    """Refuse MLPs in tiles where layers are not recomputed whole, are compiled, or send tokens to experts.

    A tile keeps its input and computes the rest once more in the backward pass. Blocks would be compiled again for
    each number of tiles, and in fp8 each tile would have its own scale. Experts get the tokens of the whole row.
    ZeRO-3 gathers the weights of an MLP for each tile, and ranks with rows of their own have different numbers of them.
    """
    facts = config.model.facts
    if config.activation.mlp_tile_tokens is None:
        return
    if config.activation.checkpointing not in (Checkpointing.enabled, Checkpointing.auto):
        yield "tiles are for layers that are recomputed: activation.checkpointing=enabled"
    if config.model.compile_layers or config.precision.compute is Compute.fp8:
        yield "tiles cannot be combined with model.compile_layers=true or precision.compute=fp8"
    if facts is not None and has_experts(facts):
        yield f"the MLPs of {facts.architecture} are experts, which need the tokens of the whole row"
    if strategy_facts(config).is_zero3 and data_ranks(config) > 1:
        yield "ZeRO-3 gathers weights for each tile, and ranks have different numbers; parallelism=fsdp does not"
