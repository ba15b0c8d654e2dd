"""What may hang or crash is asked in a process of its own: `python -m tunebook.doctor.probes.NAME`, one JSON object."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tunebook.hardware.asking import ask


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a probe found out, or why it could not."""

    facts: dict[str, Any] | None
    problem: str | None


def run_probe(name: str, *arguments: str, timeout_s: float, variables: Mapping[str, str] | None = None) -> Probe:
    """Run a module of this package and read its last line; `variables` are set in its environment. Never raises."""
    command = [sys.executable, "-m", f"{__name__}.{name}", *arguments]
    answer = ask(command, timeout_s=timeout_s, environment=os.environ | dict(variables or {}))
    if answer.problem is not None:
        said = f": {answer.last_words}" if answer.last_words else ""
        return Probe(facts=None, problem=f"{answer.problem}{said}")
    lines = answer.text.strip().splitlines()  # libraries print lines of their own before
    try:
        facts = json.loads(lines[-1] if lines else "")
    except ValueError:
        return Probe(facts=None, problem=f"it printed no JSON but {answer.text.strip()[-80:]!r}")
    if not isinstance(facts, dict):
        return Probe(facts=None, problem=f"it printed no JSON object but {lines[-1][:80]!r}")
    return Probe(facts=facts, problem=None)
