"""Six fixed things to try when a plan does not fit. Each is planned once, as if it had been typed."""

from __future__ import annotations

from dataclasses import dataclass

from tunebook.config.schema import ZeroConfig, world_size
from tunebook.plan.draft import Draft, draft_run


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """Overrides to type after the recipe, and the GiB that each GPU or rank then needs by estimate."""

    overrides: list[str]
    total_gib: float
    fits: bool


def suggest(draft: Draft) -> list[Suggestion]:
    """Return the suggestions that fit; if none does, the one with the least memory.

    Those that are refused, or change nothing, are skipped. `draft` has a memory plan.
    """
    config = draft.config
    sharded, half = "zero3" if isinstance(config.parallelism, ZeroConfig) else "fsdp", config.training.max_length // 2
    candidates = [
        ["activation=checkpointing"],
        *([[f"parallelism={sharded}"]] if world_size(config) > 1 else []),
        [f"parallelism={sharded}_offload"],
        ["peft=lora"],
        ["peft=qlora"],
        [f"training.max_length={half}", *([f"packing.row_length={half}"] if config.packing.row_length else [])],
    ]
    found = []
    for overrides in candidates:
        tried = draft_run(draft.recipe, [*draft.overrides, *overrides], draft.recipes_dirs, draft.machine)
        if tried.memory is None or tried.memory.total is None or tried.config == config:
            continue
        found.append(Suggestion(overrides=overrides, total_gib=tried.memory.total, fits=tried.fits is True))
    return [each for each in found if each.fits] or sorted(found, key=lambda each: each.total_gib)[:1]
