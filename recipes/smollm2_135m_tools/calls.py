"""Compare a call of a tool that a model wrote with the document's. Used by calls.yaml."""

from __future__ import annotations

import json
import re
from typing import Any

_WRITTEN = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)  # Qwen 2.5's form


def score(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether the first call of an answer is that of the document: in all, and in its name."""
    expected, written = json.loads(doc["answer"])[0], call_in(results[0])
    return {"right": float(written == expected), "named": float(written.get("name") == expected["name"])}


def call_in(text: str) -> dict[str, Any]:
    """The first call in a text; empty if there is no readable one."""
    found = _WRITTEN.search(text)
    try:
        call = json.loads(found.group(1)) if found else {}
    except ValueError:
        return {}
    return {key: call[key] for key in ("name", "arguments") if key in call}
