"""What `tunebook explain NAME` prints: a rule's docstring, or what a key of another tool is here."""

from __future__ import annotations

from tunebook.config.foreign import instead_of, names
from tunebook.errors import RequestError, did_you_mean
from tunebook.plan.rules import RULES


def explain(name: str) -> str:
    """What a rule refuses and why, or the meaning of a key of another tool; for `all`, every rule's id.

    Raises: RequestError for an unknown name, with the nearest one.
    """
    rules = {rule.id: rule for rule in RULES}
    if name == "all":
        return "\n".join(sorted(rules))
    if name in rules:
        rule = rules[name]
        return f"{name}{f' ({rule.key})' if rule.key else ''}\n\n{rule.why}"
    if instead := instead_of(name):
        return f"there is no key '{name}'{instead}"
    near = did_you_mean(name, [*rules, *names()])
    raise RequestError(
        f"there is no rule '{name}' to explain.{near} Every rule: tunebook explain all", problem_id="unknown-id"
    )
