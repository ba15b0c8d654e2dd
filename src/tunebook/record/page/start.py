"""The start of a run in a report: what each phase to the first optimizer step took, one below the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tunebook.config.choices import Weights
from tunebook.record.page.numbers import Unit, format_value

_TITLES = {
    "launcher": {
        "start_python": "Python and Tunebook",
        "plan": "composed, checked, planned",
        "checks": "launcher, model and needs looked at",
        "data": "data prepared, or found prepared",
        "run_folder": "batch solved, records begun",
        "evaluation_before": "evaluation before training",
    },
    "rank": {
        "launch": "from the launcher to the rank",
        "start_python": "Python",
        "import_torch": "torch imported",
        "meet": "all ranks met",
        "import_libraries": "libraries imported",
        "data": "data opened, batches dealt",
        "model": "model built",
        "join_ranks": "GPU and process group",
        "weights": "weights read, or copied from rank 0",
        "trainer": "trainer made",
        "wrap": "model wrapped, checkpoint read",
        "checks": "wrapping looked at, leak probe",
        "first_step": "first optimizer step",
    },
}
_OF_RANDOM_WEIGHTS = {"model": "model built, random weights drawn"}
_WHOSE = {"launcher": "launcher", "rank": "rank 0"}


@dataclass(frozen=True, kw_only=True)
class StartBar:
    """One phase, as shares of the whole start."""

    name: str
    whose: str
    kind: str  # launcher or rank
    text: str
    begins: float
    share: float


def start_bars(manifest: dict[str, Any] | None) -> tuple[list[StartBar], str]:
    """The phases in their order and a sentence on their sum; none where the first step was not reached."""
    found = (manifest or {}).get("start_up") or {}
    total = found.get("first_step_s")
    if not total:
        return [], ""
    is_random = (((manifest or {}).get("model")) or {}).get("weights") == Weights.random.name
    bars: list[StartBar] = []
    begins = 0.0
    for kind, titles in _TITLES.items():
        titles = titles | _OF_RANDOM_WEIGHTS if is_random else titles
        for phase, seconds in found[kind].items():
            bars.append(
                StartBar(
                    name=titles.get(phase, phase.replace("_", " ")),
                    whose=_WHOSE[kind],
                    kind=kind,
                    text=format_value(seconds, Unit.seconds),
                    begins=min(1.0, begins / total),
                    share=min(1.0, seconds / total),
                )
            )
            begins += seconds
    return bars, f"{format_value(total, Unit.seconds)} from the command to the end of the first optimizer step."
