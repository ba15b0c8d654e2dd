"""Choose a run's kernels where they are left open: compiled blocks, the output head, attention and packing.

Compiling is decided first, because not every attention can be part of a compiled block. Only combinations that were
seen working on GPUs are enabled. All others stay disabled, with the reason; model.compile_layers=true requests them.
"""

from __future__ import annotations

from tunebook.config.choices import Attention, Compute, Generation, PackingMode, PeftMethod
from tunebook.config.schema import FsdpConfig, RunConfig
from tunebook.data.sources import begins_with_images
from tunebook.facts.architectures import (
    COMPILED_ARCHITECTURES,
    IMAGE_MASK_ARCHITECTURES,
    SINK_ARCHITECTURES,
    VARLEN_ARCHITECTURES,
    has_attention,
    without_flash_attn,
)
from tunebook.facts.attention import ATTENTIONS, BY_DOCUMENT, COMPILED, INSTALLED, MASKED, UNDECIDED
from tunebook.facts.generations import GENERATIONS, can_run
from tunebook.facts.methods import method_facts
from tunebook.facts.sharing import offloaded_states
from tunebook.facts.strategies import ALONE, strategy_facts
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
        why = f"Triton needs a compiler: {missing_for_triton}"
    return why is None, why or "8% faster than Liger's kernels, in 5% less memory (Qwen2.5-3B, one H200)"


def uncompiled_reason(config: RunConfig) -> str | None:
    """The first reason why compiled blocks cannot work in a configuration or are untested there; None if they work."""
    compute, facts, settings = config.precision.compute, config.model.facts, config.parallelism
    is_fsdp, kernel = isinstance(settings, FsdpConfig), config.attention.implementation
    is_wrapped = isinstance(settings, FsdpConfig) and bool(settings.wrap_classes)
    architecture = "" if facts is None else facts.architecture
    is_seen_with_pairs = config.peft.method is not PeftMethod.qlora and settings.strategy is ALONE
    reasons = [
        (not can_run(COMPILED, config.hardware.generation), "compiled blocks need a GPU of compute capability 8.0"),
        (compute not in (Compute.bf16, Compute.fp8), f"not tested in {compute.name}"),
        (config.model.liger_kernel, "blocks that call Liger's kernels cannot be compiled"),
        (config.packing.mode is PackingMode.padded, "tested with packed rows only"),
        (
            method_facts(config).has_reference and not is_seen_with_pairs,
            f"method={config.method.name} was tested on one GPU only, and without peft=qlora",
        ),
        (kernel not in (UNDECIDED, COMPILED), f"not tested with {kernel.name}"),
        (settings.sequence_group_size > 1 and not is_fsdp, "rows shared by several GPUs were tested under FSDP only"),
        (config.activation.mlp_tile_tokens is not None, "blocks would be compiled again for each number of MLP tiles"),
        (config.training.deterministic, "compiled kernels are not known to be deterministic"),
        (not strategy_facts(config).may_compile, f"not faster under {settings.strategy.name}"),
        (is_wrapped, "not tested with parallelism.wrap_classes"),
        (bool(offloaded_states(config)), "not tested with offloaded states"),
        (has_dora(config), "with DoRA, losses differed by up to 0.2% in 16 steps"),
        (adapts_parameters(config), "adapters on parameters split compiled blocks"),
        (
            config.peft.method is PeftMethod.qlora and not strategy_facts(config).is_copied,
            "a quantized base model is compiled on one GPU and with DDP only",
        ),
        (facts is None, "the architecture is not known before the model is loaded"),
        (
            facts is not None and facts.num_parameters < _FEW_PARAMETERS,
            "compiling takes longer than it saves with a small model",
        ),
        (architecture not in COMPILED_ARCHITECTURES, f"not tested with {architecture}"),
        (not has_attention(config, COMPILED), f"{architecture} does not support {COMPILED.name}"),
    ]
    return next((reason for is_against, reason in reasons if is_against), None)


def decide_head(config: RunConfig) -> tuple[bool, str]:
    """Compute the output head's gradients in the forward pass if that was seen working.

    On H200s, bf16, LoRA and fp8: h200_one_pass_head.jsonl. The losses of seven strategies: h200x2_parity.jsonl.
    """
    if config.hardware.generation is Generation.cpu or config.precision.compute not in (Compute.bf16, Compute.fp8):
        return False, "tested on GPUs in bf16 and fp8 only"
    if not method_facts(config).has_equal_tokens:
        return False, f"method={config.method.name} weights each answer's tokens by its loss"
    return True, "logits are computed once instead of twice: 3% faster (Qwen2.5-3B, one H200)"


def decide_attention(config: RunConfig, is_planned: bool) -> tuple[Attention, str]:
    """The fastest kernel that the GPU, the precision, the blocks, the model and the installed packages allow.

    Without flash-attn it is torch's own kernel for packed rows if possible, else the nearest one. Runs planned for
    another machine use an image that has flash-attn.
    """
    fallback, generation, compute = without_flash_attn(config), config.hardware.generation, config.precision.compute
    facts = config.model.facts
    if facts is not None and facts.architecture in IMAGE_MASK_ARCHITECTURES and begins_with_images(config.dataset):
        return MASKED, "the tokens of an image see each other, which needs a mask"
    if config.parallelism.sequence_group_size > 1:
        is_by_document = fallback is not COMPILED and has_attention(config, BY_DOCUMENT)
        return BY_DOCUMENT if is_by_document else fallback, "GPUs can share rows with torch's kernels for packed rows"
    if generation is not Generation.cpu and compute is Compute.fp32 and _goes_by_document(config):
        return BY_DOCUMENT, "in fp32, 1.5 times as fast as one mask over a packed row (one H200)"
    if not can_run(INSTALLED, generation):
        return fallback, "flash attention needs a GPU of compute capability 8.0"
    if compute is Compute.fp32:
        return fallback, "flash attention computes in bf16 or fp16 only"
    if config.model.compile_layers:
        return fallback, "flash-attn's packages do not compile with the blocks"
    if not has_attention(config, INSTALLED):
        return fallback, f"the architecture does not support {INSTALLED.name}"
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
    if begins_with_images(config.dataset):
        return PackingMode.padded, "the documents have images; for some models packing=isolated packs them"
    if isolates(config) is False:
        return PackingMode.padded, "the architecture cannot keep packed documents apart"
    version_of = image.state_kernels.__contains__ if is_planned else installed_version
    if missing := missing_state_kernels(config, version_of):
        where = f"is not in the {image.name} image" if is_planned else "is not installed here"
        return PackingMode.padded, f"packing needs {' and '.join(missing)}, which {where}"
    if brings_code(config.model):
        return PackingMode.padded, "the model's own code may let packed documents see each other"
    facts = config.model.facts
    is_tested = facts is None or facts.measured is None or facts.architecture in SINK_ARCHITECTURES
    if isolates(config) is None and not is_tested:
        return PackingMode.padded, "the architecture was not shown to keep packed documents apart"
    return PackingMode.isolated, f"no padding; {config.attention.implementation.name} keeps documents apart"
