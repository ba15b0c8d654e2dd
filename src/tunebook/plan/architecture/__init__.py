"""What planning asks of a model's layers: transformers builds the model on PyTorch's meta device and is asked.

    base_model where the facts of a run's model come from
    build      builds it, counts parameters and runs one pass without memory; imports torch
    targets    the layers that PEFT adapts, by name
    layers     the kinds of layers, and models with a few of them
    packing    whether packed documents stay apart, on a small model with values
    (here)     keeps the answers in the cache folder, by what was asked

It takes some seconds once, and needs no weights, no GPU and no network.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from omegaconf.errors import OmegaConfBaseException

import tunebook
from tunebook.config.model_facts import ModelFacts, facts_from_json
from tunebook.files import cache_root, remember
from tunebook.train.packages import installed_version

_PACKAGES = ("torch", "transformers", "peft")


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


_known: dict[Path, dict[str, Any]] = {}  # by the file that keeps it


def _remembered(question: Any, ask: Callable[[], ModelFacts], model: str) -> ModelFacts | None:
    versions = {package: installed_version(package) for package in _PACKAGES}
    if versions["torch"] is None or versions["transformers"] is None:
        return None
    asked = json.dumps([question, versions, tunebook.__version__], sort_keys=True)
    file = cache_root() / "architectures" / f"{hashlib.sha256(asked.encode()).hexdigest()}.json"
    if file not in _known and (found := _read(file)) is not None:
        _known[file] = found
    if file not in _known:
        if sys.stderr.isatty():  # to keep JSON output and logs clean
            print(f"building {model} without memory to look at its layers, once", file=sys.stderr, flush=True)
        _known[file] = asdict(ask())
        remember(file, json.dumps(_known[file]))
    return facts_from_json(_known[file])


def _read(file: Path) -> dict[str, Any] | None:
    """A cached answer; None if there is none, or it is damaged or of another version of the code."""
    try:
        answer: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        facts_from_json(answer)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OmegaConfBaseException):
        return None
    return answer
