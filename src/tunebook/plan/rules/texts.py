"""Rules about texts: none holds a control character where it may reach a script, a header, a variable or a command."""

from __future__ import annotations

from collections.abc import Iterator

from tunebook.config.override_text import typed, typed_list
from tunebook.config.schema import RunConfig
from tunebook.config.unsafe_text import control_character, shown, without_control_characters
from tunebook.config.walk import texts_of
from tunebook.plan.rules.frame import Finding, Rule, rule

# Texts for the model and names inside data files: they reach no script, and may hold anything.
_FREE = ("system_prompt", "pad_token", "eos_token", "text_field", "ignore_keys")


@rule(
    "control-characters",
    summary="A value holds a line break or another control character.",
    why="Values reach job scripts, options of sbatch and containers, environment variables and command lines. A line "
    "break there ends a comment or an option, and what follows would be run as a command; an escape would be obeyed by "
    "a terminal. Unicode's line separators, and signs that show a text in another order, are refused as well.",
    advice="Type the value without it. A system prompt may have several lines: dataset.system_prompt is not looked at.",
)
def control_characters(config: RunConfig) -> Iterator[Finding]:
    """In any text but those that only a model or a data file sees."""
    for key, values, is_list in texts_of(config):
        found = next((control_character(value) for value in values if control_character(value)), None)
        if found is None or key.rpartition(".")[2] in _FREE:
            continue
        clean = [without_control_characters(value) for value in values]
        message = f"{', '.join(map(shown, values))} holds {found}"
        yield Finding(key=shown(key), message=message, fix=typed_list(key, clean) if is_list else typed(key, clean[0]))


RULES: tuple[Rule, ...] = (control_characters,)
