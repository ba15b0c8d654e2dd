"""Choose a run's kernels where they are left open: compiled blocks, the output head, attention and packing.

Compiling is decided first, because not every attention can be part of a compiled block. Only combinations that were
seen working on GPUs are enabled. All others stay disabled, with the reason; model.compile_layers=true requests them.
"""

from __future__ import annotations

from tunebook.config.choices import Attention, Compute, Generation, PackingMode, PeftMethod
from tunebook.config.schema import FsdpConfig, RunConfig
from tunebook.facts.architectures import (
    COMPILED_ARCHITECTURES,
    SINK_ARCHITECTURES,
    VARLEN_ARCHITECTURES,
    has_attention,
    without_flash_attn,
)
from tunebook.facts.attention import ATTENTIONS, BY_DOCUMENT, COMPILED, INSTALLED, UNDECIDED
from tunebook.facts.generations import GENERATIONS, can_run
from tunebook.facts.sharing import is_offloaded
from tunebook.facts.strategies import strategy_facts
from tunebook.model.base_config import brings_code
from tunebook.model.parameters import adapts_parameters, has_dora
from tunebook.plan.rules.kernels import isolates
from tunebook.train.requirements import installed_version, missing_state_kernels

_FEW_PARAMETERS = 50_000_000  # compiling takes 20 s and more, which runs of a model so small hardly gain


def decide_compiling(config: RunConfig, missing_for_triton: str | None) -> tuple[bool, str]:
    """Compile the blocks if that was seen working.

    `missing_for_triton`: what Triton needs and the launching machine lacks.
    """
    why = uncompiled_reason(config)
    if why is None and missing_for_triton is not None:
        why = f"Triton compiles a launcher for each kernel, and {missing_for_triton}"
    return why is None, why or "Qwen2.5-3B was 8% faster so than with Liger's kernels, in 5% less memory (one H200)"


def uncompiled_reason(config: RunConfig) -> str | None:
    """The first reason why compiled blocks cannot work in a configuration or are untested there; None if they work."""
    compute, facts, settings = config.precision.compute, config.model.facts, config.parallelism
    is_fsdp, kernel = isinstance(settings, FsdpConfig), config.attention.implementation
    is_wrapped = isinstance(settings, FsdpConfig) and bool(settings.wrap_classes)
    architecture = "" if facts is None else facts.architecture
    reasons = [
        (not can_run(COMPILED, config.hardware.generation), "compiled blocks need a GPU of compute capability 8.0"),
        (compute not in (Compute.bf16, Compute.fp8), f"blocks were not compiled in {compute.name}"),
        (config.model.liger_kernel, "blocks that call Liger's kernels cannot be compiled"),
        (config.packing.mode is PackingMode.padded, "blocks were compiled with packed rows only"),
        (kernel not in (UNDECIDED, COMPILED), f"blocks were not compiled with {kernel.name}"),
        (settings.sequence_group_size > 1 and not is_fsdp, "blocks of shared rows were compiled under FSDP only"),
        (config.activation.mlp_tile_tokens is not None, "blocks would be compiled for each number of MLP tiles"),
        (config.training.deterministic, "compiled kernels were not seen to be bitwise deterministic"),
        (not strategy_facts(config).may_compile, f"blocks gained nothing by it under {settings.strategy.name}"),
        (is_wrapped, "blocks were not compiled where FSDP's units are not the blocks"),
        (is_offloaded(config), "blocks were not compiled with states or activations in host memory or on a disk"),
        (has_dora(config), "with DoRA compiled losses were up to 0.2% apart in 16 steps"),
        (adapts_parameters(config), "adapters on parameters break compiled blocks apart"),
        (config.peft.method is PeftMethod.qlora, "blocks were not compiled over a quantized base"),
        (facts is None, "the model's architecture is not known before it is loaded"),
        (facts is not None and facts.num_parameters < _FEW_PARAMETERS, "a small model gains less than compiling costs"),
        (architecture not in COMPILED_ARCHITECTURES, f"{architecture} was not tested compiled"),
        (not has_attention(config, COMPILED), f"{architecture} cannot attend by {COMPILED.name}"),
    ]
    return next((reason for is_against, reason in reasons if is_against), None)


def decide_head(config: RunConfig) -> tuple[bool, str]:
    """Compute the output head's gradients in the forward pass if that was seen working.

    On H200s, bf16, LoRA and fp8: h200_one_pass_head.jsonl. The losses of seven strategies: h200x2_parity.jsonl.
    """
    if config.hardware.generation is Generation.cpu or config.precision.compute not in (Compute.bf16, Compute.fp8):
        return False, "the head's gradients were made in the forward pass on GPUs in bf16 and fp8 only"
    return True, "the head's logits are computed once and not twice: Qwen2.5-3B was 3% faster in bf16 (one H200)"


def decide_attention(config: RunConfig, is_planned: bool) -> tuple[Attention, str]:
    """The fastest kernel that the GPU, the precision, the blocks, the model and the installed packages allow.

    Without flash-attn it is torch's own kernel for packed rows if possible, else the nearest one. Runs planned for
    another machine use an image that has flash-attn.
    """
    fallback, generation, compute = without_flash_attn(config), config.hardware.generation, config.precision.compute
    if config.parallelism.sequence_group_size > 1:
        is_by_document = fallback is not COMPILED and has_attention(config, BY_DOCUMENT)
        return BY_DOCUMENT if is_by_document else fallback, "torch's own kernels for packed rows let GPUs share rows"
    if generation is not Generation.cpu and compute is Compute.fp32 and _goes_by_document(config):
        return BY_DOCUMENT, "in fp32 packed rows were 1.5 x as fast so as with the mask of a whole row (one H200)"
    if not can_run(INSTALLED, generation):
        return fallback, "flash attention needs a GPU of compute capability 8.0"
    if compute is Compute.fp32:
        return fallback, "flash attention computes in bf16 or fp16 only"
    if config.model.compile_layers:
        return fallback, "flash-attn's packages do not compile with the blocks"
    if not has_attention(config, INSTALLED):
        return fallback, f"the architecture cannot attend by {INSTALLED.name}"
    image, package = GENERATIONS[generation].image.name, str(ATTENTIONS[INSTALLED].package)
    if not is_planned and installed_version(package) is None:
        return fallback, f"the package {package} is not installed here; the {image} image has it"
    return INSTALLED, f"the fastest stable kernel on {generation.name}"


def _goes_by_document(config: RunConfig) -> bool:
    """Whether packed rows can go through sdpa one document at a time, which keeps no scores of a whole row."""
    facts = config.model.facts
    is_known = facts is not None and facts.architecture in VARLEN_ARCHITECTURES and has_attention(config, BY_DOCUMENT)
    is_packed = config.packing.mode is not PackingMode.padded
    # torch's kernel for this has no deterministic backward pass.
    return is_known and is_packed and not config.model.compile_layers and not config.training.deterministic


def decide_packing(config: RunConfig, is_planned: bool) -> tuple[PackingMode, str]:
    """Packed rows if kernel and architecture keep the documents of a row apart, with the packages that are there."""
    image = GENERATIONS[config.hardware.generation].image
    if isolates(config) is False:
        return PackingMode.padded, "the architecture cannot keep packed documents apart"
    version_of = image.state_kernels.__contains__ if is_planned else installed_version
    if missing := missing_state_kernels(config, version_of):
        where = f"is not in the {image.name} image" if is_planned else "is not installed here"
        return PackingMode.padded, f"packed documents are kept apart by {' and '.join(missing)}, which {where}"
    if brings_code(config.model):
        return PackingMode.padded, "the model brings code of its own, which may let packed documents see each other"
    facts = config.model.facts
    is_tested = facts is None or facts.measured is None or facts.architecture in SINK_ARCHITECTURES
    if isolates(config) is None and not is_tested:
        return PackingMode.padded, "no small model of the architecture showed that it keeps packed documents apart"
    return PackingMode.isolated, f"rows without padding; {config.attention.implementation.name} keeps documents apart"
