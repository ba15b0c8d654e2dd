"""Facts of a base model that planning needs, read from its config.json without weights or network.

A model group file carries the facts. Otherwise they are read here: from `model.path`, or for a hub model from the hub
cache of an earlier run. Without a cached config.json, the book's facts of a model of that name count. None if they are
unknown until the model is loaded.
"""

from __future__ import annotations

from tunebook.config.choices import Weights
from tunebook.config.model_facts import ModelFacts, facts_of_hub_name
from tunebook.config.schema import ModelConfig
from tunebook.model.base_config import config_file, non_causal_reason, read_config, read_quantizer
from tunebook.plan.architecture import facts_of_file, with_layers

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
    if file is None or read_config(model) is None:
        return found[1] if (found := facts_of_book(model)) is not None else None
    if _is_refused_anyway(model):
        return None
    return facts_of_file(file, trust_remote_code=model.trust_remote_code)


def facts_of_book(model: ModelConfig) -> tuple[str, ModelFacts] | None:
    """The book's model of this name on the hub, and its facts; None if there is none, or it may be another model.

    The newest revision is compared with the facts when the model is loaded; another one may differ on purpose.
    """
    if model.name is None or model.path is not None or model.revision is not None or model.trust_remote_code:
        return None
    found = facts_of_hub_name(model.name)
    return None if found is None else (found[0], with_layers(found[1]))


def _is_refused_anyway(model: ModelConfig) -> bool:
    """Whether a rule refuses the model whatever its facts are, so that building it would be wasted."""
    quantizer = None if model.weights is Weights.random else read_quantizer(model)
    return quantizer not in (None, OWN_QUANTIZER) or non_causal_reason(model) is not None
