"""Rules about base models whose published weights are quantised already: what can be trained over them.

Of the quantisers whose layers PEFT has adapters for, gptq and awq need gptqmodel, aqlm, hqq and eetq packages of their
own: no image has them. bitsandbytes it has, and its 4 bits are what peft=qlora is about. Over its 8 bits nothing here
has been trained: they would be planned as fp32, loaded wrongly where a strategy shards them, and TRL would turn the
adapters over them into bf16.
"""

from __future__ import annotations

from tunebook.config.choices import Compute, Generation, PeftMethod, Weights
from tunebook.config.schema import RunConfig
from tunebook.model.base_config import read_quantiser
from tunebook.plan.architecture.base_model import OWN_QUANTISER
from tunebook.plan.rules.frame import Finding, Rule, another_model, rule


def quantiser_of(config: RunConfig) -> str | None:
    """What quantises the base; random weights are drawn, and not quantised."""
    return None if config.model.weights is Weights.random else read_quantiser(config.model)


def _base(config: RunConfig) -> str:
    return str(config.model.path or config.model.name)


def _is_for_qlora(config: RunConfig, quantiser: str) -> bool:
    """Whether peft=qlora trains over the base as it is: not on a CPU, see `qlora-without-gpu`."""
    return quantiser == OWN_QUANTISER and config.hardware.generation is not Generation.cpu


def _by_qlora(config: RunConfig) -> str:
    """What to type to train an adapter over a base as it is."""
    in_fp8 = config.precision.compute is Compute.fp8
    return "peft=qlora" + (" precision.compute=bf16" if in_fp8 else "")


@rule(
    "quantised-base-in-full",
    summary="Full fine-tuning of a model whose weights are published quantised.",
    why="Quantised weights are whole numbers of a few bits, or have scales of their own: no gradient changes them. "
    "transformers' Trainer refuses them, after the data was prepared and the model was read.",
    advice="Name the model that it was made from, whose weights are not quantised. Over the 4 bits of bitsandbytes an "
    "adapter can be trained as they are, with peft=qlora.",
)
def quantised_base_in_full(config: RunConfig) -> Finding | None:
    """peft=full over a config.json with a `quantization_config`."""
    quantiser = quantiser_of(config)
    if config.peft.method is not PeftMethod.full or quantiser is None:
        return None
    is_for_qlora = _is_for_qlora(config, quantiser)
    instead = ", and only an adapter can be trained" if is_for_qlora else "; name the model without quantisation"
    message = f"the weights of {_base(config)} are quantised by {quantiser}{instead}"
    return Finding(key="peft.method", message=message, fix=_by_qlora(config) if is_for_qlora else another_model(config))


@rule(
    "quantised-base-not-trainable",
    summary="A plain adapter over weights that are published quantised.",
    why="4 bits of bitsandbytes are trained over by peft=qlora, which loads them on every rank, counts them as what "
    "they are and keeps the adapter in the format of the run. Other quantisers need packages that no image here has "
    "(gptqmodel for gptq and awq, aqlm, hqq, eetq), have layers without a gradient, or were never trained over here.",
    advice="Name the same model without quantisation; peft=qlora then quantises it while it is read. Where its 4 bits "
    "are those of bitsandbytes, type peft=qlora.",
)
def quantised_base_not_trainable(config: RunConfig) -> Finding | None:
    """peft=lora over any quantiser."""
    quantiser = quantiser_of(config)
    if config.peft.method is not PeftMethod.lora or quantiser is None:
        return None
    if _is_for_qlora(config, quantiser):
        message = f"{_base(config)} is quantised by {quantiser}, and adapters over it are what peft=qlora trains"
        return Finding(key="peft.method", message=message, fix=_by_qlora(config))
    message = (
        f"no adapter is trained here over {quantiser}, by which {_base(config)} is quantised; name the model without "
        "quantisation"
    )
    on_cpu = config.hardware.generation is Generation.cpu
    fix = another_model(config) + ("" if on_cpu else f" {_by_qlora(config)}")
    return Finding(key="peft.method", message=message, fix=fix)


@rule(
    "quantised-twice",
    summary="QLoRA over a model that is quantised by something else already.",
    why="peft=qlora has bitsandbytes quantise the base to 4 bits while it is read. transformers refuses to do so with "
    "weights that another quantiser, or bitsandbytes in 8 bits, has made.",
    advice="Name the model that it was made from, whose weights are not quantised.",
)
def quantised_twice(config: RunConfig) -> Finding | None:
    """peft=qlora over any other quantiser than its own."""
    quantiser = quantiser_of(config)
    if config.peft.method is not PeftMethod.qlora or quantiser in (None, OWN_QUANTISER):
        return None
    message = f"qlora quantises by {OWN_QUANTISER}, and {_base(config)} is quantised by {quantiser}"
    return Finding(key="peft.method", message=message, fix=another_model(config))


RULES: tuple[Rule, ...] = (quantised_base_in_full, quantised_base_not_trainable, quantised_twice)
