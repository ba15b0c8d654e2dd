"""Facts of a base model that planning needs, without weights, GPU or network.

A model group file states the sizes. Otherwise the model's config.json is read: from `model.path`, or for a hub model
from the hub cache of an earlier run. Without a cached config.json, the book's facts of a model of that name count.
Facts of its layers come from transformers, which builds the model on PyTorch's meta device (`build`; seconds, once):

    build      builds it, counts parameters and runs one pass without memory; imports torch
    targets    the layers that PEFT adapts, by name
    layers     the kinds of layers, and models with a few of them
    packing    whether packed documents stay apart, on a small model with values
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tunebook.config.choices import Weights
from tunebook.config.model_facts import ModelFacts, facts_from_json, facts_of_hub_name
from tunebook.config.schema import ModelConfig
from tunebook.model.base_config import config_file, non_causal_reason, read_config, read_quantizer
from tunebook.plan.answers import answered
from tunebook.train.requirements import installed_version

# peft=qlora quantizes a base to this format while reading it, and accepts it as it is. Tunebook trains over no other
# quantization.
OWN_QUANTIZER = "bitsandbytes_4bit"


def read_facts(model: ModelConfig) -> ModelFacts | None:
    """Return the model's facts from its group file or its config.json; None if neither is available.

    Raises: RequestError if the file cannot be read, or names an architecture that is unknown or cannot be built.
    """
    if model.facts is not None:
        is_known = model.facts.measured is not None or model.trust_remote_code
        return model.facts if is_known else with_layers(model.facts)
    file = config_file(model)
    if file is not None and read_config(model) is not None:
        return None if _is_refused_anyway(model) else facts_of_file(file, trust_remote_code=model.trust_remote_code)
    if model.name is None or model.path is not None or model.revision is not None or model.trust_remote_code:
        return None
    # The newest revision is compared with the book's facts when it is loaded; another one may differ on purpose.
    known = facts_of_hub_name(model.name)
    return None if known is None else with_layers(known)


def _is_refused_anyway(model: ModelConfig) -> bool:
    """Whether a rule refuses the model whatever its facts are, so that building it would be wasted."""
    quantizer = None if model.weights is Weights.random else read_quantizer(model)
    return quantizer not in (None, OWN_QUANTIZER) or non_causal_reason(model) is not None


def facts_of_file(file: Path, *, trust_remote_code: bool = False) -> ModelFacts | None:
    """The facts of the model that a config.json describes; None if torch or transformers is not installed.

    Raises: RequestError if transformers has no such causal language model, or cannot build it.
    """

    def describe() -> ModelFacts:
        from tunebook.plan.architecture.build import describe_file

        return describe_file(file, trust_remote_code=trust_remote_code)

    return _remembered(file.read_text(encoding="utf-8"), describe, f"{file}")


def with_layers(facts: ModelFacts) -> ModelFacts:
    """Stated facts with those of the layers of these sizes; without, if torch or transformers is not installed.

    Raises: RequestError if transformers cannot build them.
    """

    def describe() -> ModelFacts:
        from tunebook.plan.architecture.build import describe_stated

        return describe_stated(facts)

    described = _remembered(asdict(facts), describe, facts.architecture)
    if described is None:
        return facts
    return replace(facts, measured=described.measured, unreached=facts.unreached or described.unreached)


def _remembered(question: Any, describe: Callable[[], ModelFacts], model: str) -> ModelFacts | None:
    if installed_version("torch") is None or installed_version("transformers") is None:
        return None
    notice = f"reading the layers of {model}, once for each model"
    return facts_from_json(answered("architectures", question, lambda: asdict(describe()), notice))
