"""Rules about base models whose published weights are already quantized: which training methods work over them.

PEFT has adapters for the layers of several quantizers. gptq and awq need gptqmodel, and aqlm, hqq and eetq need their
own packages; no image has these. Images have bitsandbytes, whose 4-bit format peft=qlora uses. Training over its 8-bit
format is untested: it would be planned as fp32, loaded wrongly under a sharding strategy, and TRL would cast the
adapters over it to bf16.
"""

from __future__ import annotations

from tunebook.config.choices import Compute, Generation, PeftMethod, Weights
from tunebook.config.schema import RunConfig
from tunebook.model.base_config import read_quantizer
from tunebook.plan.architecture.base_model import OWN_QUANTIZER
from tunebook.plan.rules.frame import Finding, another_model, rule


def quantizer_of(config: RunConfig) -> str | None:
    """The quantizer of the base; None for random weights."""
    return None if config.model.weights is Weights.random else read_quantizer(config.model)


def _base(config: RunConfig) -> str:
    return str(config.model.path or config.model.name)


def _is_for_qlora(config: RunConfig, quantizer: str) -> bool:
    """Whether peft=qlora trains over the base as it is; not on a CPU, see `qlora-without-gpu`."""
    return quantizer == OWN_QUANTIZER and config.hardware.generation is not Generation.cpu


def _by_qlora(config: RunConfig) -> str:
    """Overrides to train an adapter over a base as it is."""
    in_fp8 = config.precision.compute is Compute.fp8
    return "peft=qlora" + (" precision.compute=bf16" if in_fp8 else "")


@rule("quantized-base-in-full", "peft.method")
def quantized_base_in_full(config: RunConfig) -> Finding | None:
    """Refuse peft=full over a config.json with a `quantization_config`.

    Quantized weights are whole numbers of a few bits, or have scales of their own: no gradient changes them.
    """
    quantizer = quantizer_of(config)
    if config.peft.method is not PeftMethod.full or quantizer is None:
        return None
    is_for_qlora = _is_for_qlora(config, quantizer)
    instead = ", and only an adapter can be trained" if is_for_qlora else "; name the model without quantization"
    message = f"the weights of {_base(config)} are quantized by {quantizer}{instead}"
    return Finding(message, _by_qlora(config) if is_for_qlora else another_model(config))


@rule("quantized-base-not-trainable", "peft.method")
def quantized_base_not_trainable(config: RunConfig) -> Finding | None:
    """Refuse peft=lora over any quantizer.

    peft=qlora trains over the 4 bits of bitsandbytes. Other quantizers need packages that no image here has, have
    layers without a gradient, or were never trained over here.
    """
    quantizer = quantizer_of(config)
    if config.peft.method is not PeftMethod.lora or quantizer is None:
        return None
    if _is_for_qlora(config, quantizer):
        message = f"{_base(config)} is quantized by {quantizer}, and adapters over it are what peft=qlora trains"
        return Finding(message, _by_qlora(config))
    message = (
        f"no adapter is trained here over {quantizer}, by which {_base(config)} is quantized; name the model without "
        "quantization"
    )
    on_cpu = config.hardware.generation is Generation.cpu
    fix = another_model(config) + ("" if on_cpu else f" {_by_qlora(config)}")
    return Finding(message, fix)


@rule("quantized-twice", "peft.method")
def quantized_twice(config: RunConfig) -> Finding | None:
    """Refuse peft=qlora over any quantizer but its own.

    transformers refuses to quantize weights that another quantizer, or bitsandbytes in 8 bits, has made.
    """
    quantizer = quantizer_of(config)
    if config.peft.method is not PeftMethod.qlora or quantizer in (None, OWN_QUANTIZER):
        return None
    message = f"qlora quantizes by {OWN_QUANTIZER}, and {_base(config)} is quantized by {quantizer}"
    return Finding(message, another_model(config))
