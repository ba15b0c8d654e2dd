"""What planning asks of a model's layers: transformers builds the model on PyTorch's meta device and is asked.

    base_model where the facts of a run's model come from
    build      builds it, counts parameters and runs one pass without memory; imports torch
    targets    the layers that PEFT adapts, by name
    layers     the kinds of layers, and models with a few of them
    packing    whether packed documents stay apart, on a small model with values

It takes some seconds once, and needs no weights, no GPU and no network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tunebook.config.model_facts import ModelFacts, facts_from_json
from tunebook.plan.answers import answered
from tunebook.train.requirements import installed_version


def facts_of_file(config_file: Path, *, trust_remote_code: bool = False) -> ModelFacts | None:
    """The facts of the model that a config.json describes; None if torch or transformers is not installed.

    Raises: RequestError if transformers has no such causal language model, or cannot build it.
    """

    def ask() -> ModelFacts:
        from tunebook.plan.architecture.build import describe_file

        return describe_file(config_file, trust_remote_code=trust_remote_code)

    return _remembered(config_file.read_text(encoding="utf-8"), ask, f"{config_file}")


def with_layers(facts: ModelFacts) -> ModelFacts:
    """Stated facts with those of the layers of these sizes; without, if torch or transformers is not installed.

    Raises: RequestError if transformers cannot build them.
    """

    def ask() -> ModelFacts:
        from tunebook.plan.architecture.build import describe_stated

        return describe_stated(facts)

    found = _remembered(asdict(facts), ask, facts.architecture)
    if found is None:
        return facts
    return replace(facts, measured=found.measured, unreached=facts.unreached or found.unreached)


def _remembered(asked: Any, ask: Callable[[], ModelFacts], model: str) -> ModelFacts | None:
    if installed_version("torch") is None or installed_version("transformers") is None:
        return None
    notice = f"building {model} without memory to look at its layers, once"
    return facts_from_json(answered("architectures", asked, lambda: asdict(ask()), notice))
