"""Choose a run's kernels where they are left open: whether its blocks are compiled, and which attention.

Compiling is decided first, because not every attention can be part of a compiled block. If blocks are compiled, an open
attention becomes one that compiles with them. Only combinations that were seen working on GPUs are enabled. All others
stay disabled, with the reason; model.compile_layers=true requests them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tunebook.config.choices import Attention, Compute, Generation, PackingMode, PeftMethod, Source, WrapPolicy
from tunebook.config.schema import FsdpConfig, RunConfig
from tunebook.data.batch import solve_batch
from tunebook.data.mean_length import with_file_estimate
from tunebook.facts.architectures import (
    COMPILED_ARCHITECTURES,
    VARLEN_ARCHITECTURES,
    has_attention,
    without_flash_attn,
)
from tunebook.facts.attention import ATTENTIONS, BY_DOCUMENT, COMPILED, COMPILED_BETA, INSTALLED, MASKED, UNDECIDED
from tunebook.facts.compiling import COMPILE_SECONDS, largest_gain
from tunebook.facts.generations import GENERATIONS, can_run
from tunebook.facts.sharing import is_offloaded
from tunebook.facts.strategies import strategy_facts
from tunebook.model.parameters import adapts_parameters, has_dora
from tunebook.plan.rules import check
from tunebook.plan.speed import plan_time
from tunebook.train.packages import installed_version

# Kernels tested in compiled blocks with packed rows; `auto` takes the first.
_COMPILED_WITH, *_COMPILED_TOO = COMPILED, COMPILED_BETA
_UNKNOWN = "the model's architecture is not known before it is loaded"


def compiles_known_layers(config: RunConfig) -> bool | None:
    """Whether the blocks are compiled if their architecture was tested compiled; None: `decide_compiling` may do so."""
    asked = config.model.compile_layers
    return False if asked is None and any(why != _UNKNOWN for why in _reasons_against(config)) else asked


def decide_compiling(config: RunConfig, missing_for_triton: str | None) -> tuple[bool, str]:
    """Compile the blocks if that was seen working; otherwise return the first reason against it.

    `missing_for_triton`: what Triton needs and the launching machine lacks.
    """
    for reason in _reasons_against(config):
        return False, reason
    if missing_for_triton is not None:
        return False, f"Triton compiles a launcher for each kernel, and {missing_for_triton}"
    return True, "Qwen2.5-3B was 8% faster so than with Liger's kernels, in 5% less memory (one H200)"


def _reasons_against(config: RunConfig) -> Iterator[str]:
    """Why compiled blocks cannot work in a configuration or are untested there, most basic reason first."""
    generation, compute, facts = config.hardware.generation, config.precision.compute, config.model.facts
    kernel, settings = config.attention.implementation, config.parallelism
    if generation is Generation.cpu:
        yield "blocks were compiled on GPUs only; a CPU has other costs"
    elif not can_run(_COMPILED_WITH, generation):
        yield f"{_COMPILED_WITH.name}, which compiles with them, needs capability 8.0; {generation.name} is older"
    if compute not in (Compute.bf16, Compute.fp8):
        yield f"blocks were compiled in bf16 and fp8 only, and precision.compute={compute.name}"
    if config.model.liger_kernel:
        yield "blocks that call Liger's kernels cannot be compiled (model.liger_kernel=true)"
    if facts is None:
        yield _UNKNOWN
    elif facts.architecture not in COMPILED_ARCHITECTURES:
        seen = ", ".join(sorted({name.partition("For")[0] for name in COMPILED_ARCHITECTURES}))
        yield f"{facts.architecture} was not tested compiled; {seen} were"
    elif not has_attention(config, _COMPILED_WITH):
        yield f"{facts.architecture} cannot attend by {_COMPILED_WITH.name}, which compiles with the blocks"
    if config.packing.mode is PackingMode.padded:
        yield "blocks were compiled with packed rows only, and packing.mode=padded"
    if kernel not in (UNDECIDED, _COMPILED_WITH, *_COMPILED_TOO):
        known = " and ".join(one.name for one in (_COMPILED_WITH, *_COMPILED_TOO))
        yield f"blocks were compiled with {known} only, and {kernel.name} is asked for"
    if config.parallelism.sequence_group_size > 1 and not isinstance(settings, FsdpConfig):
        yield "blocks of rows that GPUs share (parallelism.sequence_group_size) were compiled under FSDP only"
    if config.activation.mlp_tile_tokens is not None:
        yield "blocks would be compiled once more for each number of tiles (activation.mlp_tile_tokens)"
    if config.training.deterministic:
        yield "training.deterministic=true, and compiled kernels were not seen to be bitwise deterministic"
    if not strategy_facts(config).may_compile:
        yield f"blocks were not seen to gain by it under parallelism={settings.strategy.name}"
    if isinstance(settings, FsdpConfig) and (settings.wrap_policy is WrapPolicy.size or settings.wrap_classes):
        yield "blocks were not compiled yet where FSDP's units are other ones than the blocks"
    if is_offloaded(config):
        yield "blocks were not compiled yet where weights, optimizer or activations are in host memory or on a disk"
    if has_dora(config):
        yield (
            "blocks are several graphs with DoRA: compiled, Qwen3-4B was 2.5 times as fast, with losses up to 0.2% "
            "apart in 16 steps (one H200; model.compile_layers=true)"
        )
    if adapts_parameters(config):
        yield "each step adds adapters to the weights of peft.target_parameters, which breaks compiled blocks apart"
    if config.peft.method is PeftMethod.qlora:
        yield "blocks were not compiled over a quantized base yet (peft=qlora)"


def why_not_worth_compiling(config: RunConfig) -> str | None:
    """Why compiling costs more time than the whole run can gain by it; None if it may gain, or nothing is known.

    `config` is the resolved run with compiled blocks. Its time is estimated from the data set's facts, and for local
    files without facts from their sizes.
    """
    # A few steps on generated documents measure the run that they stand for, which is longer.
    is_measurement = config.dataset.source is Source.synthetic
    facts = config.model.facts
    if facts is None or is_measurement or any(problem.is_error for problem in check(config)):
        return None
    config = replace(config, dataset=with_file_estimate(config.dataset))
    hours = plan_time(config, solve_batch(config, None)).hours
    if hours is None:
        return None
    saved = hours * 3600 * (largest_gain(facts.num_parameters) - 1)
    if saved >= COMPILE_SECONDS:
        return None
    return (
        f"compiling would cost at least {COMPILE_SECONDS:.0f} s, and save at most about {saved:.2g} s of the steps; "
        "model.compile_layers=true compiles anyway"
    )


def decide_head(config: RunConfig) -> tuple[bool, str]:
    """Compute the output head's gradients in the forward pass if that was seen working.

    On H200s, bf16, LoRA and fp8: h200_one_pass_head.jsonl. The losses of seven strategies: h200x2_parity.jsonl.
    """
    generation, compute = config.hardware.generation, config.precision.compute
    if generation is Generation.cpu:
        return False, "the head's gradients were made in the forward pass on GPUs only"
    if compute not in (Compute.bf16, Compute.fp8):
        return False, f"the head's gradients were made in the forward pass in bf16 and fp8 only, not in {compute.name}"
    return True, "the head's logits are computed once and not twice: Qwen2.5-3B was 3% faster in bf16 (one H200)"


def decide_attention(config: RunConfig, is_planned: bool) -> tuple[Attention, str]:
    """The fastest kernel, or else the one that the architecture supports: torch's varlen, or the nearest one."""
    kernel, why = _fastest_attention(config, is_planned)
    if has_attention(config, kernel):
        return kernel, why
    assert config.model.facts is not None
    other = without_flash_attn(config)
    return other, f"{config.model.facts.architecture} cannot attend by {kernel.name}, but by {other.name}"


def _fastest_attention(config: RunConfig, is_planned: bool) -> tuple[Attention, str]:
    """The fastest kernel for the GPU, the precision and the installed packages.

    Compiled blocks: a kernel that compiles with them. Otherwise flash-attn 2 if GPU and precision allow it and it is
    installed; else torch's own kernel for packed rows. In fp32, sdpa document by document. Runs planned for another
    machine use an image that has flash-attn.
    """
    flash, generation, compute = INSTALLED, config.hardware.generation, config.precision.compute
    if config.parallelism.sequence_group_size > 1:
        kernel = _of_torch(config)
        shares = "torch's own kernels for packed rows let GPUs share rows (parallelism.sequence_group_size)"
        return (kernel if kernel is _COMPILED_WITH else BY_DOCUMENT), shares
    if generation is Generation.cpu:
        return MASKED, "flash attention needs a GPU"
    if compute is Compute.fp32 and _goes_by_document(config):
        return BY_DOCUMENT, (
            "flash attention computes in bf16 or fp16 only; in fp32 packed rows were 1.5 x as fast so as with the mask "
            "of a whole row (one H200)"
        )
    if not can_run(flash, generation):
        return MASKED, f"flash attention needs compute capability 8.0, and {generation.name} is older"
    if compute is Compute.fp32:
        return MASKED, "flash attention computes in bf16 or fp16 only, and precision.compute=fp32"
    if config.model.compile_layers:
        kernel = _of_torch(config)
        return kernel, f"flash-attn's packages do not compile with the blocks; {kernel.name}, torch's own, does"
    if is_planned:
        return flash, f"the fastest stable kernel on {generation.name}; the {_image(config)} image has it"
    package = str(ATTENTIONS[flash].package)
    version = installed_version(package)
    if version is None:
        missing = f"the package {package} is not installed here; the {_image(config)} image has it"
        kernel = _of_torch(config)
        return kernel, missing if kernel is MASKED else f"torch brings it along; {missing}"
    return flash, f"the fastest stable kernel on {generation.name} ({package} {version})"


def _of_torch(config: RunConfig) -> Attention:
    """torch's kernel for packed rows if possible, else sdpa; the caller checks whether the model supports it."""
    kernel = without_flash_attn(config)
    return kernel if kernel is _COMPILED_WITH else MASKED


def _goes_by_document(config: RunConfig) -> bool:
    """Whether packed rows can go through sdpa one document at a time.

    In fp32 this avoids keeping the attention scores of a whole row.
    """
    is_known = config.model.facts is not None and config.model.facts.architecture in VARLEN_ARCHITECTURES
    is_known = is_known and has_attention(config, BY_DOCUMENT)
    is_packed = config.packing.mode is not PackingMode.padded
    # torch's kernel for this has no deterministic backward pass.
    return is_known and is_packed and not config.model.compile_layers and not config.training.deterministic


def _image(config: RunConfig) -> str:
    return GENERATIONS[config.hardware.generation].image.name
