"""Rules about number formats: what the GPU can compute, and the base model's format."""

from __future__ import annotations

from tunebook.config.choices import Compute, Fp8Scaling, Generation, MasterWeights, PeftMethod, Switch, Weights
from tunebook.config.schema import RunConfig, ZeroConfig
from tunebook.facts.generations import GENERATIONS, GenerationFacts, capability_text
from tunebook.plan.rules.frame import Finding, rule

_IN_FP32 = "precision.compute=fp32"


def _facts(config: RunConfig) -> GenerationFacts | None:
    return GENERATIONS.get(config.hardware.generation)  # None while the generation is still `auto`


def _hardware_text(config: RunConfig, facts: GenerationFacts) -> str:
    oldest = facts.min_compute_capability
    name = config.hardware.generation.name
    return f"{name} (compute capability {capability_text(oldest)})" if oldest else "a CPU"


def _instead_of_fp8(config: RunConfig) -> str:
    """The override for the number format nearest to fp8 that the hardware supports."""
    facts = _facts(config)
    return "precision.compute=bf16" if facts is None or facts.has_bf16 else _IN_FP32


@rule("bf16-on-volta", "precision.compute")
def bf16_on_volta(config: RunConfig) -> Finding | None:
    """Refuse bf16 compute if the generation lacks it; a CPU is slow but correct.

    V100 and T4 have tensor cores for fp16 only. torch emulates bf16 there, many times slower than fp32, and some
    kernels fail to compile in the middle of a run.
    """
    facts = _facts(config)
    if config.precision.compute is not Compute.bf16 or facts is None or facts.has_bf16:
        return None
    if config.hardware.generation is Generation.cpu:
        return None
    return Finding(f"bf16 cannot run on {_hardware_text(config, facts)}; bf16 starts at 8.0", _IN_FP32)


@rule("fp16-with-bf16-base", "precision.compute")
def fp16_with_bf16_base(config: RunConfig) -> Finding | None:
    """Refuse fp16 for published bf16 weights; random weights have no range yet.

    fp16 ends at 65,504. Activations of a model trained in bf16 exceed that, and the loss becomes infinite or NaN,
    often only after hours.
    """
    facts, model = _facts(config), config.model
    if config.precision.compute is not Compute.fp16 or model.facts is None or model.weights is Weights.random:
        return None
    if model.facts.dtype != "bfloat16":
        return None
    has_bf16 = facts is not None and facts.has_bf16
    message = f"fp16 overflows on {model.facts.architecture}, whose weights are bfloat16"
    fix = "precision.compute=bf16" if has_bf16 else _IN_FP32
    return Finding(message, fix)


@rule("fp16-on-cpu", "precision.compute")
def fp16_on_cpu(config: RunConfig) -> Finding | None:
    """Refuse fp16 on a CPU: loss scaling and most fp16 kernels exist for GPUs only."""
    if config.precision.compute is not Compute.fp16 or config.hardware.generation is not Generation.cpu:
        return None
    return Finding("fp16 needs a GPU", _IN_FP32)


@rule("fp8-without-hardware", "precision.compute")
def fp8_without_hardware(config: RunConfig) -> Finding | None:
    """Refuse fp8 below compute capability 8.9: ada, hopper and blackwell have fp8 tensor cores."""
    facts = _facts(config)
    if config.precision.compute is not Compute.fp8 or facts is None or facts.has_fp8:
        return None
    return Finding(f"fp8 cannot run on {_hardware_text(config, facts)}; fp8 starts at 8.9", _instead_of_fp8(config))


@rule("fp8-with-adapters", "precision.compute")
def fp8_with_adapters(config: RunConfig) -> Finding | None:
    """Refuse fp8 with any method that trains adapters over frozen linear layers.

    torchao's fp8 layers compute the gradient of a frozen weight, too, so what fp8 saves is lost. QLoRA replaces the
    same layers by 4-bit ones.
    """
    if config.precision.compute is not Compute.fp8 or config.peft.method is PeftMethod.full:
        return None
    message = f"fp8 saves nothing where the linear layers are frozen (peft.method={config.peft.method.name})"
    return Finding(message, _instead_of_fp8(config))


@rule("fp8-with-deepspeed", "precision.compute")
def fp8_with_deepspeed(config: RunConfig) -> Finding | None:
    """Refuse fp8 with DeepSpeed.

    torchao's fp8 layers keep a view of their weight until the backward pass. ZeRO-3 gathers the weight into other
    memory, so every gathered weight would stay on the GPU. ZeRO-1 and ZeRO-2 have not been run with fp8.
    """
    settings = config.parallelism
    if config.precision.compute is not Compute.fp8 or not isinstance(settings, ZeroConfig):
        return None
    return Finding(f"fp8 does not run under {settings.strategy.name}", f"parallelism=fsdp or {_instead_of_fp8(config)}")


@rule("fp8-scaling-ignored", "precision.fp8_scaling", is_error=False)
def fp8_scaling_ignored(config: RunConfig) -> Finding | None:
    """Warn about fp8 scaling settings without fp8."""
    precision = config.precision
    if precision.compute is Compute.fp8 or precision.fp8_scaling is Fp8Scaling.tensorwise:
        return None
    message = f"fp8_scaling={precision.fp8_scaling.name} changes nothing with compute={precision.compute.name}"
    return Finding(message, "precision.fp8_scaling=tensorwise")


@rule("tf32-without-hardware", "precision.tf32")
def tf32_without_hardware(config: RunConfig) -> Finding | None:
    """Refuse tf32 on a CPU or below compute capability 8.0 (ampere), where its tensor cores start."""
    facts = _facts(config)
    if config.precision.tf32 is not Switch.enabled or facts is None or facts.has_tf32:
        return None
    return Finding(f"tf32 cannot run on {_hardware_text(config, facts)}; it starts at 8.0", "precision.tf32=auto")


@rule("bf16-weights-without-bf16", "precision.master_weights")
def bf16_weights_without_bf16(config: RunConfig) -> Finding | None:
    """Refuse bf16 weights with fp32 or fp16 compute; fp8 computes on bf16.

    fp32 products would lose what they gain, and fp16's loss scaling does not work on bf16 weights.
    """
    compute = config.precision.compute
    if config.precision.master_weights is not MasterWeights.bf16 or compute not in (Compute.fp32, Compute.fp16):
        return None
    return Finding(f"bf16 weights do not work with precision.compute={compute.name}", "precision.master_weights=fp32")
