"""Rules about base models whose published weights are quantised already: what can be trained over them."""

from __future__ import annotations

from tunebook.config.base_model import read_quantiser
from tunebook.config.choices import Compute, PeftMethod, Weights
from tunebook.config.rules.frame import Finding, Rule, another_model, rule
from tunebook.config.schema import RunConfig

# Over whose layers both transformers lets the Trainer train (`HfQuantizer.is_trainable`, 5.23) and PEFT has adapters
# (`peft.tuners.lora`, 0.21). Those of fp8 compute no gradients, and of torchao it depends on the format.
WITH_ADAPTERS = frozenset({"aqlm", "awq", "bitsandbytes_4bit", "bitsandbytes_8bit", "eetq", "gptq", "hqq"})
_QLORA = "bitsandbytes_4bit"  # what peft=qlora makes of a base, and takes as it is


def _quantiser(config: RunConfig) -> str | None:
    """What quantises the base; random weights are drawn, and not quantised."""
    return None if config.model.weights is Weights.random else read_quantiser(config.model)


def _base(config: RunConfig) -> str:
    return str(config.model.path or config.model.name)


def _with_adapters(config: RunConfig, quantiser: str) -> str:
    """What to type to train an adapter over a base as it is; otherwise another base, which only the user can name."""
    if quantiser not in WITH_ADAPTERS:
        return another_model(config)
    method = "qlora" if quantiser == _QLORA else "lora"
    in_fp8 = config.precision.compute is Compute.fp8
    return f"peft={method}" + (" precision.compute=bf16" if in_fp8 else "")


@rule(
    "quantised-base-in-full",
    summary="Full fine-tuning of a model whose weights are published quantised.",
    why="Quantised weights are whole numbers of a few bits, or have scales of their own: no gradient changes them. "
    "transformers' Trainer refuses them, after the data was prepared and the model was read.",
    advice="Train an adapter over it, where its quantiser allows that, or name the model that it was made from, whose "
    "weights are not quantised.",
)
def quantised_base_in_full(config: RunConfig) -> Finding | None:
    """peft=full over a config.json with a `quantization_config`."""
    quantiser = _quantiser(config)
    if config.peft.method is not PeftMethod.full or quantiser is None:
        return None
    message = f"the weights of {_base(config)} are quantised by {quantiser}, and only an adapter can be trained"
    if quantiser not in WITH_ADAPTERS:
        message = f"the weights of {_base(config)} are quantised by {quantiser}; name the model without quantisation"
    return Finding(key="peft.method", message=message, fix=_with_adapters(config, quantiser))


@rule(
    "quantised-base-not-trainable",
    summary="An adapter over weights that are quantised in a way that cannot be trained through.",
    why="A gradient has to pass the quantised layers to reach the adapters below. transformers' Trainer refuses the "
    "quantisers whose layers have none, and PEFT has no adapter for the layers of others.",
    advice="Name the same model without quantisation; peft=qlora then quantises it while it is read.",
)
def quantised_base_not_trainable(config: RunConfig) -> Finding | None:
    """peft=lora over a quantiser that is not in `WITH_ADAPTERS`."""
    quantiser = _quantiser(config)
    if config.peft.method is not PeftMethod.lora or quantiser is None or quantiser in WITH_ADAPTERS:
        return None
    message = (
        f"no adapter can be trained over {quantiser}, by which {_base(config)} is quantised; name the model without "
        "quantisation"
    )
    return Finding(key="peft.method", message=message, fix=another_model(config))


@rule(
    "quantised-twice",
    summary="QLoRA over a model that is quantised by something else already.",
    why="peft=qlora has bitsandbytes quantise the base to 4 bits while it is read. transformers refuses to do so with "
    "weights that another quantiser, or bitsandbytes in 8 bits, has made.",
    advice="Train a plain adapter over it (peft=lora) where its quantiser allows that, or name the model without "
    "quantisation.",
)
def quantised_twice(config: RunConfig) -> Finding | None:
    """peft=qlora over any other quantiser than its own."""
    quantiser = _quantiser(config)
    if config.peft.method is not PeftMethod.qlora or quantiser in (None, _QLORA):
        return None
    assert quantiser is not None
    message = f"qlora quantises by {_QLORA}, and {_base(config)} is quantised by {quantiser}"
    return Finding(key="peft.method", message=message, fix=_with_adapters(config, quantiser))


RULES: tuple[Rule, ...] = (quantised_base_in_full, quantised_base_not_trainable, quantised_twice)
