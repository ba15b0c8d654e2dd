"""Rules about compiled blocks, the output head, and activations that are recomputed, offloaded or tiled."""

from __future__ import annotations

from collections.abc import Iterator

from tunebook.config.choices import Checkpointing, Compute
from tunebook.config.schema import RunConfig
from tunebook.facts.attention import FLEX, attention_facts
from tunebook.model.parameters import has_experts
from tunebook.plan.rules.frame import rule


@rule("compiled-layers-not-possible", "model.compile_layers", "model.compile_layers=false")
def compiled_layers_not_possible(config: RunConfig) -> Iterator[str]:
    """Refuse compiled blocks with Liger's kernels, with flash-attn's packages, or with sdpa_by_document.

    torch cannot compile a block that calls Liger's kernels (torch 2.11, liger-kernel 0.8.5). transformers' function
    for flash-attn reads the number of the calling block, so torch compiles each block again and stops after eight.
    sdpa_by_document reads on the host how long the documents of a row are.
    """
    if config.model.compile_layers and config.model.liger_kernel:
        yield "blocks that call Liger's kernels cannot be compiled"
    if config.model.compile_layers and not attention_facts(config).compiles_with_blocks:
        yield f"blocks with attention.implementation={config.attention.implementation.name} cannot be compiled as one"


@rule("one-pass-head-in-fp16", "model.one_pass_head", "model.one_pass_head=false")
def one_pass_head_in_fp16(config: RunConfig) -> Iterator[str]:
    """Refuse head gradients computed in the forward pass in a format that needs loss scaling.

    They are made before the loss is scaled, so what is below fp16's smallest number is lost.
    """
    if config.model.one_pass_head and config.precision.compute is Compute.fp16:
        yield "in fp16 gradients are made after the loss is scaled, which is after the forward pass"


@rule("selective-without-compiled-blocks", "activation.checkpointing", "activation.checkpointing=enabled")
def selective_without_compiled_blocks(config: RunConfig) -> Iterator[str]:
    """Refuse selective checkpointing without compiled blocks, which alone can be split."""
    if config.activation.checkpointing is Checkpointing.selective and not config.model.compile_layers:
        yield "only compiled blocks can recompute some of their activations and keep the others"


@rule(
    "activation-offload-with-flex",
    "activation.offload",
    "activation.offload=false activation.checkpointing=enabled",
)
def activation_offload_with_flex(config: RunConfig) -> Iterator[str]:
    """Refuse activation offload with flex_attention: failed on an H200 with torch 2.11 (gemma-2b).

    Tensors come back from the host contiguous, but its backward pass is compiled for the layout of the forward pass.
    """
    if config.activation.offload and config.attention.implementation is FLEX:
        yield "flex_attention's backward pass does not take what was offloaded"


@rule("mlp-tiles-not-possible", "activation.mlp_tile_tokens", "activation.mlp_tile_tokens=null")
def mlp_tiles_not_possible(config: RunConfig) -> Iterator[str]:
    """Refuse MLPs in tiles where layers are not recomputed whole, are compiled, or send tokens to experts.

    A tile keeps its input and computes the rest once more in the backward pass. Blocks would be compiled again for
    each number of tiles, and in fp8 each tile would have its own scale. Experts get the tokens of the whole row.
    """
    facts = config.model.facts
    if config.activation.mlp_tile_tokens is None:
        return
    if config.activation.checkpointing not in (Checkpointing.enabled, Checkpointing.auto):
        yield "tiles are for layers that are recomputed: activation.checkpointing=enabled"
    if config.model.compile_layers or config.precision.compute is Compute.fp8:
        yield "tiles do not go with model.compile_layers=true or precision.compute=fp8"
    if facts is not None and has_experts(facts):
        yield f"{facts.architecture} sends tokens to experts"
