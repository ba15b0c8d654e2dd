"""Rules about attention kernels, packing, and kernels that need a GPU."""

from __future__ import annotations

from tunebook.config.choices import Attention, Checkpointing, Compute, Generation, PackingMode
from tunebook.config.model_facts import LENGTHS, MASK
from tunebook.config.schema import RunConfig
from tunebook.facts.architectures import (
    has_attention,
    nearest_attention,
    without_flash_attn,
)
from tunebook.facts.attention import (
    ATTENTIONS,
    BY_DOCUMENT,
    FLEX,
    INSTALLED,
    attention_facts,
)
from tunebook.facts.generations import GENERATIONS, can_run, capability_text
from tunebook.plan.rules.frame import Finding, needs_gpu, rule


def _is_on_cpu(config: RunConfig) -> bool:
    return config.hardware.generation is Generation.cpu


_UNPACKED = "packing.mode=padded packing.row_length=null"


def leaks(config: RunConfig) -> bool:
    """Whether documents of a packed row saw each other in a small model of this architecture, with this attention."""
    facts = config.model.facts
    if facts is None or facts.measured is None:
        return False
    return facts.measured.isolates.get(MASK if attention_facts(config).has_mask else LENGTHS) is False


def compiles(kernel: Attention) -> bool:
    """Whether blocks compile as one graph with this attention: see the rules `compiled-layers-...`."""
    return ATTENTIONS[kernel].compiles_with_blocks


@rule("attention-not-in-model", "attention.implementation")
def attention_not_in_model(config: RunConfig) -> Finding | None:
    """Refuse a kernel that the architecture's code does not support.

    Some architectures cap logits, have sinks, or ask for dropout. transformers refuses a kernel without that feature,
    or silently takes another one.
    """
    kernel, facts = config.attention.implementation, config.model.facts
    if facts is None or facts.measured is None or has_attention(config, kernel):
        return None
    message = f"{facts.architecture} cannot attend by {kernel.name}; it can by {', '.join(facts.measured.attention)}"
    return Finding(message, f"attention.implementation={without_flash_attn(config).name}")


@rule("flash-attention-below-ampere", "attention.implementation")
def flash_attention_below_ampere(config: RunConfig) -> Finding | None:
    """Refuse flash attention if the generation cannot run it.

    flash-attn 2 needs compute capability 8.0, flash-attn 4 needs 9.0. An older GPU fails at the first step.
    """
    kernel, generation = config.attention.implementation, config.hardware.generation
    if generation not in GENERATIONS or can_run(kernel, generation):
        return None
    oldest = GENERATIONS[generation].min_compute_capability
    hardware = f"{generation.name} has {capability_text(oldest)}" if oldest else "this is a CPU"
    needed = capability_text(ATTENTIONS[kernel].oldest or (0, 0))
    message = f"{kernel.name} needs compute capability {needed}; {hardware}"
    flash = INSTALLED
    best = flash if can_run(flash, generation) and has_attention(config, flash) else nearest_attention(config)
    return Finding(message, f"attention.implementation={best.name}")


@rule("flash-attention-in-fp32", "attention.implementation")
def flash_attention_in_fp32(config: RunConfig) -> Finding | None:
    """Refuse flash attention in fp32: the kernels exist for fp16 and bf16 only."""
    kernel = config.attention.implementation
    if not ATTENTIONS[kernel].is_flash or config.precision.compute is not Compute.fp32:
        return None
    message = f"{kernel.name} computes in fp16 or bf16 only, and precision.compute=fp32"
    return Finding(message, f"attention.implementation={nearest_attention(config).name}")


@rule("varlen-attention-padded", "attention.implementation")
def varlen_attention_padded(config: RunConfig) -> Finding | None:
    """Refuse varlen attention with rows that are not packed: it does not support padding."""
    kernel = config.attention.implementation
    if not ATTENTIONS[kernel].needs_lengths or config.packing.mode is PackingMode.isolated:
        return None
    message = f"{kernel.name} computes packed rows only, and packing.mode={config.packing.mode.name}"
    return Finding(message, f"packing.mode=isolated or attention.implementation={nearest_attention(config).name}")


@rule("compiled-layers-by-document", "model.compile_layers")
def compiled_layers_by_document(config: RunConfig) -> Finding | None:
    """Refuse compiled blocks with an attention that loops over documents.

    It reads on the host how long the documents of a row are, so a block cannot be compiled as one.
    """
    if not config.model.compile_layers or config.attention.implementation is not BY_DOCUMENT:
        return None
    better = without_flash_attn(config)
    message = "blocks with sdpa_by_document cannot be compiled as one"
    return Finding(message, f"attention.implementation={better.name}")


@rule("flex-attention-on-cpu", "attention.implementation")
def flex_attention_on_cpu(config: RunConfig) -> Finding | None:
    """Refuse flex_attention without a GPU: torch has no backward pass of it on a CPU."""
    if attention_facts(config).trains_on_cpu or not _is_on_cpu(config):
        return None
    message = "flex_attention cannot train on a CPU"
    return Finding(message, f"attention.implementation={nearest_attention(config).name}")


@rule("flash-attention-not-deterministic", "attention.implementation", is_error=False)
def flash_attention_not_deterministic(config: RunConfig) -> Finding | None:
    """Warn about deterministic training with flash attention.

    The backward pass adds the gradients of queries in the order in which blocks finish. flash-attn 2 has a
    deterministic way that is slower and needs more memory; others may differ in the last bits between runs.
    """
    kernel = config.attention.implementation
    if not ATTENTIONS[kernel].is_flash or not config.training.deterministic:
        return None
    message = f"the backward pass of {kernel.name} may differ in the last bits although training.deterministic=true"
    return Finding(message, f"attention.implementation={nearest_attention(config).name}")


@rule("packing-leaks", "packing.mode")
def packing_leaks(config: RunConfig) -> Finding | None:
    """Refuse isolated packing with an architecture that is known to leak.

    Documents are kept apart by positions and the attention mask. A model that takes no positions, makes its mask
    without them, or carries a state along the row lets a document see the one before it.
    """
    facts = config.model.facts
    if config.packing.mode is not PackingMode.isolated or facts is None or not leaks(config):
        return None
    kernel, other = config.attention.implementation.name, without_flash_attn(config)
    has_other = attention_facts(config).has_mask and ATTENTIONS[other].needs_lengths
    by_lengths = has_other or (facts.measured is not None and facts.measured.isolates.get(LENGTHS))
    how = f" with {kernel}, whose mask does not know them" if by_lengths else ""
    message = f"{facts.architecture} cannot keep packed documents apart{how}"
    fix = (f"attention.implementation={other.name} or " if has_other else "") + _UNPACKED
    if attention_facts(config).needs_lengths:
        fix += f" attention.implementation={nearest_attention(config).name}"
    return Finding(message, fix)


liger_without_gpu = needs_gpu(id="liger-without-gpu", key="model.liger_kernel", message="Liger's kernels need a GPU")


one_pass_head_without_gpu = needs_gpu(
    id="one-pass-head-without-gpu",
    key="model.one_pass_head",
    message="the head's gradients can be made in the forward pass on a GPU only",
)


@rule("one-pass-head-in-fp16", "model.one_pass_head")
def one_pass_head_in_fp16(config: RunConfig) -> Finding | None:
    """Refuse head gradients computed in the forward pass in a format that needs loss scaling.

    They are made before the loss is scaled, so what is below fp16's smallest number is lost.
    """
    if not config.model.one_pass_head or config.precision.compute is not Compute.fp16:
        return None
    message = "in fp16 gradients are made after the loss is scaled, which is after the forward pass"
    return Finding(message, "model.one_pass_head=false")


@rule("compiled-layers-with-liger", "model.compile_layers")
def compiled_layers_with_liger(config: RunConfig) -> Finding | None:
    """Refuse compiled blocks with Liger's kernels: both fuse a block's small operations.

    torch cannot compile a block that calls Liger's kernels (torch 2.11, liger-kernel 0.8.5).
    """
    if not (config.model.compile_layers and config.model.liger_kernel):
        return None
    return Finding("blocks that call Liger's kernels cannot be compiled", "model.liger_kernel=false")


@rule("compiled-layers-with-flash-attn", "model.compile_layers")
def compiled_layers_with_flash_attn(config: RunConfig) -> Finding | None:
    """Refuse compiled blocks with an attention that makes each block compile separately.

    transformers' function for them reads the number of the calling block, so torch compiles each block again, stops
    after eight, and leaves the others uncompiled.
    """
    kernel = config.attention.implementation
    if not config.model.compile_layers or not ATTENTIONS[kernel].is_flash or compiles(kernel):
        return None
    message = f"with {kernel.name} every block would be compiled separately, and most not at all"
    better = without_flash_attn(config)
    return Finding(message, f"attention.implementation={better.name}")


@rule("selective-without-compiled-blocks", "activation.checkpointing")
def selective_without_compiled_blocks(config: RunConfig) -> Finding | None:
    """Refuse selective checkpointing without compiled blocks, which alone can be split."""
    if config.activation.checkpointing is not Checkpointing.selective or config.model.compile_layers:
        return None
    message = "only compiled blocks can recompute some of their activations and keep the others"
    return Finding(message, "activation.checkpointing=enabled")


activation_offload_without_gpu = needs_gpu(
    id="activation-offload-without-gpu", key="activation.offload", message="there is no GPU memory to free"
)


@rule("activation-offload-with-flex", "activation.offload")
def activation_offload_with_flex(config: RunConfig) -> Finding | None:
    """Refuse activation offload with flex_attention: failed on an H200 with torch 2.11 (gemma-2b).

    Tensors come back from the host contiguous, but its backward pass is compiled for the layout of the forward pass.
    """
    if not config.activation.offload or config.attention.implementation is not FLEX:
        return None
    message = "flex_attention's backward pass does not take what was offloaded"
    fix = "activation.offload=false activation.checkpointing=enabled"
    return Finding(message, fix)
