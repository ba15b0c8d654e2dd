"""Rules about attention kernels, packing, and kernels that need a GPU."""

from __future__ import annotations

from dataclasses import replace

from tunebook.config.choices import Attention, Checkpointing, Compute, Generation, PackingMode
from tunebook.config.schema import AttentionConfig, RunConfig
from tunebook.facts.architectures import (
    LEAKING_ARCHITECTURES,
    LEAKING_THROUGH_MASKS,
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
from tunebook.plan.rules.batch import in_padded_documents
from tunebook.plan.rules.frame import Finding, Level, Rule, rule


def _is_on_cpu(config: RunConfig) -> bool:
    return config.hardware.generation is Generation.cpu


def leaks(config: RunConfig) -> bool:
    """Whether documents of a packed row are known to reach each other, with the model and the attention as they are."""
    facts = config.model.facts
    if facts is None:
        return False
    has_mask = attention_facts(config).has_mask
    return facts.architecture in LEAKING_ARCHITECTURES or (has_mask and facts.architecture in LEAKING_THROUGH_MASKS)


def compiles(kernel: Attention) -> bool:
    """Whether blocks with this attention are compiled as one: see the rules `compiled-layers-...`."""
    return ATTENTIONS[kernel].compiles_with_blocks


@rule(
    "attention-not-in-model",
    summary="An attention kernel that the model's architecture cannot use in transformers.",
    why="Some architectures do more than attend: Gemma 2 caps its logits, GPT-OSS has sinks, and some configs ask for "
    "dropout of the attention. transformers refuses the kernels that cannot, when the model is made, or goes on with "
    "another one.",
    advice="Leave attention open, or take one that the message names.",
)
def attention_not_in_model(config: RunConfig) -> Finding | None:
    """A kernel that the architecture's code says it cannot use."""
    kernel, facts = config.attention.implementation, config.model.facts
    if facts is None or facts.measured is None or has_attention(config, kernel):
        return None
    message = f"{facts.architecture} cannot attend by {kernel.name}; it can by {', '.join(facts.measured.attention)}"
    nearest = nearest_attention(config)
    fix = f"attention.implementation={nearest.name}"
    if config.packing.mode is PackingMode.isolated and leaks(
        replace(config, attention=AttentionConfig(implementation=nearest))
    ):
        fix += f" {_unpacked(config)}"
    return Finding(key="attention.implementation", message=message, fix=fix)


def _unpacked(config: RunConfig) -> str:
    """What to type to train the same batch in padded rows."""
    return f"packing.mode=padded packing.row_length=null {in_padded_documents(config)}".rstrip()


@rule(
    "flash-attention-below-ampere",
    summary="A flash attention kernel on a GPU that is too old for it, or on a CPU.",
    why="flash-attn 2 is written for compute capability 8.0 and later, flash-attn 4 for 9.0 and later. An older GPU "
    "fails at the first step, after the data was prepared and the model loaded.",
    advice="Use sdpa, which torch brings along and which isolates packed documents as well.",
)
def flash_attention_below_ampere(config: RunConfig) -> Finding | None:
    """Any flash attention where the generation cannot run it."""
    kernel, generation = config.attention.implementation, config.hardware.generation
    if generation not in GENERATIONS or can_run(kernel, generation):
        return None
    oldest = GENERATIONS[generation].min_compute_capability
    hardware = f"{generation.name} has {capability_text(oldest)}" if oldest else "this is a CPU"
    needed = capability_text(ATTENTIONS[kernel].oldest or (0, 0))
    message = f"{kernel.name} needs compute capability {needed}; {hardware}"
    flash = INSTALLED
    best = flash if can_run(flash, generation) and has_attention(config, flash) else nearest_attention(config)
    return Finding(key="attention.implementation", message=message, fix=f"attention.implementation={best.name}")


@rule(
    "flash-attention-in-fp32",
    summary="A flash attention kernel with fp32 computation.",
    why="The kernels exist for fp16 and bf16 only; transformers would cast, or the kernel would fail.",
    advice="Use sdpa for fp32, or compute in bf16.",
)
def flash_attention_in_fp32(config: RunConfig) -> Finding | None:
    """Flash attention and fp32."""
    kernel = config.attention.implementation
    if not ATTENTIONS[kernel].is_flash or config.precision.compute is not Compute.fp32:
        return None
    message = f"{kernel.name} computes in fp16 or bf16 only, and precision.compute=fp32"
    return Finding(
        key="attention.implementation",
        message=message,
        fix=f"attention.implementation={nearest_attention(config).name}",
    )


@rule(
    "varlen-attention-padded",
    summary="attention=varlen_attention, varlen_attention_4 or sdpa_by_document with padded rows.",
    why="They are told where documents begin and end, and know no padding between them.",
    advice="Pack the rows, or take sdpa or flash_attention_2, which know both.",
)
def varlen_attention_padded(config: RunConfig) -> Finding | None:
    """Attention by documents' lengths, and rows that are not packed."""
    kernel = config.attention.implementation
    if not ATTENTIONS[kernel].needs_lengths or config.packing.mode is PackingMode.isolated:
        return None
    message = f"{kernel.name} computes packed rows only, and packing.mode={config.packing.mode.name}"
    return Finding(
        key="attention.implementation",
        message=message,
        fix=f"packing.mode=isolated or attention.implementation={nearest_attention(config).name}",
    )


@rule(
    "flex-attention-on-cpu",
    summary="flex_attention on a CPU.",
    why="torch has no backward pass of flex attention on a CPU.",
    advice="Use attention.implementation=sdpa.",
)
def flex_attention_on_cpu(config: RunConfig) -> Finding | None:
    """flex_attention and no GPU."""
    if attention_facts(config).trains_on_cpu or not _is_on_cpu(config):
        return None
    message = "flex_attention cannot train on a CPU"
    return Finding(
        key="attention.implementation",
        message=message,
        fix=f"attention.implementation={nearest_attention(config).name}",
    )


@rule(
    "flash-attention-not-deterministic",
    level=Level.warning,
    summary="training.deterministic with a flash attention kernel.",
    why="The backward pass adds the gradients of the queries in the order in which blocks finish. flash-attn 2 has a "
    "deterministic way that is slower and needs more memory; the others may differ in the last bits between runs.",
    advice="Use sdpa where the same bits in every run matter more than speed.",
)
def flash_attention_not_deterministic(config: RunConfig) -> Finding | None:
    """Determinism asked for with flash attention."""
    kernel = config.attention.implementation
    if not ATTENTIONS[kernel].is_flash or not config.training.deterministic:
        return None
    message = f"the backward pass of {kernel.name} may differ in the last bits although training.deterministic=true"
    return Finding(
        key="attention.implementation",
        message=message,
        fix=f"attention.implementation={nearest_attention(config).name}",
    )


@rule(
    "packing-leaks",
    summary="Packing a model in which documents of one row reach each other.",
    why="Packed documents are kept apart through their positions and the attention mask. A model that takes no "
    "positions, or makes its mask without them, or carries a state along the row, lets one document see the one before "
    "it.",
    advice="Train it padded: one document a row.",
)
def packing_leaks(config: RunConfig) -> Finding | None:
    """Isolated packing of an architecture that is known to leak."""
    facts = config.model.facts
    if config.packing.mode is not PackingMode.isolated or facts is None or not leaks(config):
        return None
    kernel = config.attention.implementation.name
    how = "" if facts.architecture in LEAKING_ARCHITECTURES else f" with {kernel}, whose mask does not know them"
    message = f"{facts.architecture} cannot keep packed documents apart{how}"
    fix = _unpacked(config)
    if attention_facts(config).needs_lengths:
        fix += f" attention.implementation={nearest_attention(config).name}"
    return Finding(key="packing.mode", message=message, fix=fix)


@rule(
    "row-length-without-packing",
    level=Level.warning,
    summary="packing.row_length is set, but nothing is packed.",
    why="A padded row holds one document and is as long as the longest of its batch.",
    advice="Remove packing.row_length, or pack.",
)
def row_length_without_packing(config: RunConfig) -> Finding | None:
    """A row length in padded mode, other than the one `auto` fills in."""
    row = config.packing.row_length
    if row is None or config.packing.mode is not PackingMode.padded or row == config.training.max_length:
        return None
    return Finding(key="packing.row_length", message=f"{row} is not used when padding", fix="packing.row_length=null")


@rule(
    "liger-without-gpu",
    summary="model.liger_kernel without a GPU.",
    why="Liger's kernels are written in Triton, which compiles for GPUs.",
    advice="Leave model.liger_kernel off on a CPU.",
)
def liger_without_gpu(config: RunConfig) -> Finding | None:
    """Liger kernels on a CPU."""
    if not config.model.liger_kernel or not _is_on_cpu(config):
        return None
    return Finding(key="model.liger_kernel", message="Liger's kernels need a GPU", fix="model.liger_kernel=false")


@rule(
    "one-pass-head-without-gpu",
    summary="model.one_pass_head without a GPU.",
    why="It relies on every token that the output head sees counting in the loss alike. On a CPU TRL's head computes "
    "the others too, and leaves them out afterwards.",
    advice="Leave model.one_pass_head off on a CPU.",
)
def one_pass_head_without_gpu(config: RunConfig) -> Finding | None:
    """The head's gradients made in the forward pass, on a CPU."""
    if not config.model.one_pass_head or not _is_on_cpu(config):
        return None
    message = "the head's gradients can be made in the forward pass on a GPU only"
    return Finding(key="model.one_pass_head", message=message, fix="model.one_pass_head=false")


@rule(
    "one-pass-head-in-fp16",
    summary="model.one_pass_head with precision=fp16.",
    why="The gradients of the logits are made before the loss is scaled: what is below fp16's smallest number, as the "
    "probability of most words is, would be lost.",
    advice="Leave model.one_pass_head off in fp16.",
)
def one_pass_head_in_fp16(config: RunConfig) -> Finding | None:
    """The head's gradients made in the forward pass, in a format that needs its loss scaled."""
    if not config.model.one_pass_head or config.precision.compute is not Compute.fp16:
        return None
    message = "in fp16 gradients are made after the loss is scaled, which is after the forward pass"
    return Finding(key="model.one_pass_head", message=message, fix="model.one_pass_head=false")


@rule(
    "compiled-layers-with-liger",
    summary="model.compile_layers together with model.liger_kernel.",
    why="torch cannot compile a block that calls Liger's kernels (tried with torch 2.11 and liger-kernel 0.8.5), and "
    "fuses by itself what they fuse.",
    advice="Take one of the two. Compiled blocks were 8% faster and took 5% less memory (Qwen2.5-3B, one H200).",
)
def compiled_layers_with_liger(config: RunConfig) -> Finding | None:
    """Both ways to fuse a block's small operations."""
    if not (config.model.compile_layers and config.model.liger_kernel):
        return None
    message = "blocks that call Liger's kernels cannot be compiled"
    return Finding(key="model.compile_layers", message=message, fix="model.liger_kernel=false")


@rule(
    "compiled-layers-with-flash-attn",
    summary="model.compile_layers with one of flash-attn's packages.",
    why="transformers' function for them looks at the number of the block that calls it, so torch compiles each block "
    "anew, gives up after eight, and leaves the rest as they are. With flash_attention_4, which compiles as well, the "
    "first step had not come after 250 s (one H200).",
    advice="Take torch's own kernels for packed rows, which compile once for all blocks, or "
    "attention=varlen_attention_4, which calls flash-attn 4's so that they do, too: 3% faster with Qwen2.5-3B on one "
    "H200.",
)
def compiled_layers_with_flash_attn(config: RunConfig) -> Finding | None:
    """Compiled blocks and an attention that makes each of them another one."""
    kernel = config.attention.implementation
    if not config.model.compile_layers or not ATTENTIONS[kernel].is_flash or compiles(kernel):
        return None
    message = f"with {kernel.name} every block would be compiled by itself, and most not at all"
    better = without_flash_attn(config)
    return Finding(key="model.compile_layers", message=message, fix=f"attention.implementation={better.name}")


@rule(
    "selective-without-compiled-blocks",
    summary="activation=selective without model.compile_layers.",
    why="What is kept of a block, and what is computed again, is decided where the block is compiled.",
    advice="Leave model.compile_layers open, and the plan says why blocks are not compiled; or recompute every layer "
    "whole: activation=checkpointing.",
)
def selective_without_compiled_blocks(config: RunConfig) -> Finding | None:
    """Recomputing parts of blocks that nothing divides into parts."""
    if config.activation.checkpointing is not Checkpointing.selective or config.model.compile_layers:
        return None
    message = "only compiled blocks can compute some of their activations again and keep the others"
    return Finding(key="activation.checkpointing", message=message, fix="activation.checkpointing=enabled")


@rule(
    "activation-offload-without-gpu",
    summary="activation.offload without a GPU.",
    why="It moves activations from GPU memory to host memory; on a CPU they are there already.",
    advice="Leave activation.offload off on a CPU.",
)
def activation_offload_without_gpu(config: RunConfig) -> Finding | None:
    """Activation offload on a CPU."""
    if not config.activation.offload or not _is_on_cpu(config):
        return None
    return Finding(key="activation.offload", message="there is no GPU memory to free", fix="activation.offload=false")


@rule(
    "activation-offload-with-flex",
    summary="activation.offload with attention=flex_attention.",
    why="What comes back from the host is laid out in one piece, and the backward pass of flex_attention was compiled "
    "for queries, keys and values as the forward pass had them: it stops at the first step.",
    advice="Let another kernel attend, or compute activations again: activation=checkpointing.",
)
def activation_offload_with_flex(config: RunConfig) -> Finding | None:
    """Met on an H200 with torch 2.11 (gemma-2b)."""
    if not config.activation.offload or config.attention.implementation is not FLEX:
        return None
    message = "flex_attention's backward pass does not take what was offloaded"
    fix = "activation.offload=false activation.checkpointing=enabled"
    return Finding(key="activation.offload", message=message, fix=fix)


@rule(
    "compiled-layers-by-document",
    summary="model.compile_layers with attention=sdpa_by_document.",
    why="It reads on the host how long the documents of a row are, so a block cannot be compiled as one.",
    advice="Compile the blocks with varlen_attention, or with sdpa where that does not run.",
)
def compiled_layers_by_document(config: RunConfig) -> Finding | None:
    """Compiled blocks and an attention that looks at each document."""
    if not config.model.compile_layers or config.attention.implementation is not BY_DOCUMENT:
        return None
    better = without_flash_attn(config)
    message = "blocks with sdpa_by_document cannot be compiled as one"
    return Finding(key="model.compile_layers", message=message, fix=f"attention.implementation={better.name}")


RULES: tuple[Rule, ...] = (
    attention_not_in_model,
    flash_attention_below_ampere,
    flash_attention_in_fp32,
    varlen_attention_padded,
    compiled_layers_by_document,
    flex_attention_on_cpu,
    flash_attention_not_deterministic,
    packing_leaks,
    row_length_without_packing,
    liger_without_gpu,
    one_pass_head_without_gpu,
    one_pass_head_in_fp16,
    compiled_layers_with_liger,
    compiled_layers_with_flash_attn,
    selective_without_compiled_blocks,
    activation_offload_without_gpu,
    activation_offload_with_flex,
)
