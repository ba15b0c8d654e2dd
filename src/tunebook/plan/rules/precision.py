"""Rules about number formats, and about what needs a GPU or a newer one."""

from __future__ import annotations

from collections.abc import Iterator

from tunebook.config.choices import Compute, Generation, MasterWeights, PeftMethod, Switch, Weights
from tunebook.config.schema import RunConfig, ZeroConfig
from tunebook.facts.attention import attention_facts
from tunebook.facts.generations import GENERATIONS
from tunebook.facts.optimizers import OPTIMIZERS
from tunebook.facts.strategies import strategy_facts
from tunebook.model.parameters import adapts_parameters
from tunebook.plan.rules.frame import Finding, rule


@rule("needs-gpu")
def needs_gpu(config: RunConfig) -> Iterator[Finding]:
    """Refuse on a CPU what runs on GPUs only.

    fp16's loss scaling, flex_attention's backward pass, Liger's and bitsandbytes' kernels have no CPU version. Under
    FSDP accelerate would silently train with DDP.
    """
    if config.hardware.generation is not Generation.cpu:
        return
    uses = (
        ("precision.compute", config.precision.compute is Compute.fp16, "precision.compute=fp32"),
        ("attention.implementation", not attention_facts(config).trains_on_cpu, "attention.implementation=sdpa"),
        ("model.liger_kernel", config.model.liger_kernel, "model.liger_kernel=false"),
        ("model.one_pass_head", config.model.one_pass_head, "model.one_pass_head=false"),
        ("activation.offload", config.activation.offload, "activation.offload=false"),
        ("optimizer.name", OPTIMIZERS[config.optimizer.name].needs_gpu, "optimizer.name=adamw"),
        ("peft.method", config.peft.method is PeftMethod.qlora, "peft.method=lora"),
        ("parallelism.strategy", strategy_facts(config).is_fsdp, "parallelism=auto"),
    )
    for key, is_used, fix in uses:
        if is_used:
            yield Finding("this needs a GPU, and hardware.generation is cpu", key, fix)


@rule("bf16-on-volta", "precision.compute", "precision.compute=fp32")
def bf16_on_volta(config: RunConfig) -> Iterator[str]:
    """Refuse bf16 compute if the generation lacks it; a CPU is slow but correct.

    V100 and T4 have tensor cores for fp16 only. torch emulates bf16 there, many times slower than fp32, and some
    kernels fail to compile in the middle of a run.
    """
    generation = config.hardware.generation
    facts = GENERATIONS.get(generation) if generation is not Generation.cpu else None
    if config.precision.compute is Compute.bf16 and facts is not None and not facts.has_bf16:
        yield f"{generation.name} has no bf16; it starts at compute capability 8.0"


@rule("fp16-with-bf16-base", "precision.compute", "precision.compute=auto")
def fp16_with_bf16_base(config: RunConfig) -> Iterator[str]:
    """Refuse fp16 for published bf16 weights; random weights have no range yet.

    fp16 ends at 65,504. Activations of a model trained in bf16 exceed that, and the loss becomes infinite or NaN,
    often only after hours.
    """
    facts = config.model.facts
    if config.precision.compute is not Compute.fp16 or config.model.weights is Weights.random:
        return
    if facts is not None and facts.dtype == "bfloat16":
        yield f"fp16 overflows on {facts.architecture}, whose weights are bfloat16"


@rule("fp8-without-hardware", "precision.compute", "precision.compute=auto")
def fp8_without_hardware(config: RunConfig) -> Iterator[str]:
    """Refuse fp8 below compute capability 8.9: ada, hopper and blackwell have fp8 tensor cores."""
    facts = GENERATIONS.get(config.hardware.generation)
    if config.precision.compute is Compute.fp8 and facts is not None and not facts.has_fp8:
        yield f"{config.hardware.generation.name} has no fp8; it starts at compute capability 8.9"


@rule("fp8-with-adapters")
def fp8_with_adapters(config: RunConfig) -> Iterator[Finding]:
    """Refuse a frozen base in fp8 with strategies that were not tested with it, and adapters that need its weights.

    Every rank converts the whole base once. FSDP and DeepSpeed would send the fp8 numbers or convert them to bf16.
    QLoRA has the base in 4 bits. DoRA and adapters on parameters compute with the base's weights themselves.
    """
    peft, strategy = config.peft, config.parallelism.strategy.name
    if config.precision.compute is not Compute.fp8 or peft.method is PeftMethod.full:
        return
    if peft.method is PeftMethod.qlora:
        yield Finding("qlora has its frozen base in 4 bits, not in fp8", "peft.method", "peft=lora or precision=bf16")
    if peft.use_dora:
        message, fix = "DoRA needs the weights of the frozen base in 16 bits", "peft.use_dora=false or precision=bf16"
        yield Finding(message, "peft.use_dora", fix)
    if adapts_parameters(config):
        message, fix = "adapters on parameters need a base in 16 bits", "peft.target_parameters=[] or precision=bf16"
        yield Finding(message, "peft.target_parameters", fix)
    if not strategy_facts(config).is_copied:
        message = f"a frozen base in fp8 was not tested with {strategy}"
        yield Finding(message, "parallelism.strategy", "parallelism=ddp or precision=bf16")


@rule("fp8-with-deepspeed", "precision.compute", "parallelism=fsdp or precision.compute=bf16")
def fp8_with_deepspeed(config: RunConfig) -> Iterator[str]:
    """Refuse a full fine-tune in fp8 with DeepSpeed.

    torchao's fp8 layers keep a view of their weight until the backward pass. ZeRO-3 gathers the weight into other
    memory, so every gathered weight would stay on the GPU. ZeRO-1 and ZeRO-2 have not been run with fp8.
    """
    is_full = config.peft.method is PeftMethod.full  # else the rule fp8-with-adapters
    if config.precision.compute is Compute.fp8 and is_full and isinstance(config.parallelism, ZeroConfig):
        yield f"fp8 does not run under {config.parallelism.strategy.name}"


@rule("tf32-without-hardware", "precision.tf32", "precision.tf32=auto")
def tf32_without_hardware(config: RunConfig) -> Iterator[str]:
    """Refuse tf32 on a CPU or below compute capability 8.0 (ampere), where its tensor cores start."""
    facts = GENERATIONS.get(config.hardware.generation)
    if config.precision.tf32 is Switch.enabled and facts is not None and not facts.has_tf32:
        yield f"{config.hardware.generation.name} has no tf32; it starts at compute capability 8.0"


@rule("bf16-weights-not-possible", "precision.master_weights", "precision.master_weights=fp32")
def bf16_weights_not_possible(config: RunConfig) -> Iterator[str]:
    """Refuse bf16 weights with fp32 or fp16 compute, and in a full fine-tune under ZeRO.

    fp32 products would lose what they gain, and fp16's loss scaling does not work on bf16 weights. DeepSpeed's
    optimizer always keeps fp32 weights and casts them, so the setting would save nothing.
    """
    compute = config.precision.compute
    if config.precision.master_weights is not MasterWeights.bf16:
        return
    if compute in (Compute.fp32, Compute.fp16):
        yield f"bf16 weights do not work with precision.compute={compute.name}"
    if config.peft.method is PeftMethod.full and strategy_facts(config).is_zero:
        yield f"{config.parallelism.strategy.name} keeps fp32 weights whatever precision.master_weights says"
