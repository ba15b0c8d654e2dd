"""`tunebook chat`: talk to a run or a model in the terminal, with the run's own tokenizer, template and system prompt.

`terminal` reads questions and shows answers, `session` keeps the history, `model` loads the model and generates.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Ending(Enum):
    """Why an answer ended."""

    stop = "stop"  # the model wrote a token that ends a turn
    length = "length"  # the requested number of tokens is reached
    interrupted = "interrupted"


@dataclass(frozen=True, kw_only=True)
class Generated:
    """A finished answer."""

    text: str
    ending: Ending


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen: the most likely one at temperature 0, otherwise sampled."""

    max_new_tokens: int
    temperature: float
    seed: int
