"""What `tunebook explain ID` prints: every rule, and every error that other modules raise with a `problem_id`.

Rules carry their own texts (`plan.rules`), and so does what a machine may lack (`plan.rules.environment`). The
errors of all other modules are explained here, in the modules beside this: whoever raises a new id adds its text, and a
test finds ids without one.
"""

from __future__ import annotations

from tunebook.config.foreign import all_names, describe
from tunebook.errors import RequestError, did_you_mean
from tunebook.explain.answering import ANSWERING
from tunebook.explain.chat import CHAT
from tunebook.explain.checkpoints import CHECKPOINTS
from tunebook.explain.doctor import DOCTOR
from tunebook.explain.evaluating import EVALUATING
from tunebook.explain.evidence import EVIDENCE
from tunebook.explain.exporting import EXPORTING
from tunebook.explain.launching import LAUNCHING
from tunebook.explain.requests import COMPOSING, MODELS
from tunebook.explain.runs import DATA, RUNS
from tunebook.explain.sandbox import SANDBOX
from tunebook.explain.spreading import SPREADING
from tunebook.explain.sweeping import SWEEPING
from tunebook.plan.rules import RULES
from tunebook.plan.rules.environment import EXPLANATIONS
from tunebook.plan.rules.frame import Explanation

ERRORS: dict[str, Explanation] = {
    **COMPOSING,
    **MODELS,
    **DATA,
    **RUNS,
    **EVALUATING,
    **LAUNCHING,
    **ANSWERING,
    **CHECKPOINTS,
    **CHAT,
    **EXPORTING,
    **SANDBOX,
    **SPREADING,
    **SWEEPING,
    **DOCTOR,
    **EVIDENCE,
}


def _texts() -> dict[str, Explanation]:
    """Every id and its text. An id that is both a rule and an error is the same thing, found earlier or later."""
    return {**ERRORS, **EXPLANATIONS, **{rule.id: rule.explanation for rule in RULES}}


def all_ids() -> list[str]:
    """Every id that can be explained, in alphabetical order."""
    return sorted(_texts())


def explain(id: str) -> str:
    """What an id means, why, and what to do, or what a key of another tool is here.

    Raises: RequestError for one that does not exist, with the nearest.
    """
    texts = _texts()
    text = texts.get(id)
    if text is None and (foreign := describe(id)) is not None:
        return foreign
    if text is None:
        raise RequestError(
            f"there is nothing called '{id}' to explain.{did_you_mean(id, [*texts, *all_names()])} Every id: tunebook "
            "explain all",
            problem_id="unknown-id",
        )
    return f"{id}\n\n{text.summary}\n\nWhy: {text.why}\n\nWhat to do: {text.advice}"
