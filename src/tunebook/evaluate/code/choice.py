"""What `tunebook eval` is told about programs, in the words of a training: `evaluation.code.num_samples=20`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tunebook.config.interpolation import to_object
from tunebook.config.schema import CodeConfig, EvaluationConfig
from tunebook.errors import RequestError, did_you_mean
from tunebook.plan.rules.numbers import RANGES

UNSAFE = "--confirm_run_unsafe_code"
PREFIX = "evaluation.code."


def take_options(evaluation: EvaluationConfig, options: Sequence[str]) -> EvaluationConfig:
    """The settings with what the worker's options say of programs.

    That a training was confirmed to run programs without a sandbox confirms nothing for who evaluates it later.
    """
    settings = take_words(evaluation, [option for option in options if option.startswith(PREFIX)])
    return replace(settings, confirm_run_unsafe_code=UNSAFE in options)


def take_words(evaluation: EvaluationConfig, words: Sequence[str]) -> EvaluationConfig:
    """The settings with what the words say about `evaluation.code`. Raises: RequestError for what they cannot mean."""
    code = evaluation.code
    for word in words:
        code = _take(code, word)
    return replace(evaluation, code=code)


def _take(code: CodeConfig, word: str) -> CodeConfig:
    key, _, text = word.partition("=")
    name = key.removeprefix(PREFIX)
    names = [field.name for field in fields(CodeConfig)]
    if not key.startswith(PREFIX) or name not in names:
        known = [PREFIX + name for name in names]
        raise RequestError(
            f"there is no setting '{key}' here.{did_you_mean(key, known)} About programs: {', '.join(known)}",
            problem_id="unknown-key",
        )
    try:
        said = OmegaConf.from_dotlist([f"{name}={text}"])
        taken = to_object(OmegaConf.merge(OmegaConf.structured(code), said))
    except OmegaConfBaseException as error:
        raise RequestError(
            f"{word} cannot be read: {str(error).splitlines()[0]}; try {PREFIX}num_samples=20, {PREFIX}temperature=0.8 "
            f"or {PREFIX}pass_at_k=[1,10]",
            problem_id="unknown-key",
        ) from error
    assert isinstance(taken, CodeConfig)
    for each in RANGES:
        value = getattr(taken, name)
        if each.key == key and value is not None and not each.holds(value):
            raise RequestError(f"{word}: it must be {each.text()}, or left out", problem_id="unknown-key")
    return taken
