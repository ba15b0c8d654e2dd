"""Other plans than the one asked for: what would fit, the longest row that fits, and several values of a key."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from tunebook.config.choices import Generation
from tunebook.config.compose import parse_override
from tunebook.config.schema import ZeroConfig, world_size
from tunebook.errors import DataError, RequestError
from tunebook.facts.methods import method_facts
from tunebook.model.positions import positions_of
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.plan.draft import Draft, draft_run
from tunebook.plan.memory.verdict import plan_host_memory, tensors_fit
from tunebook.plan.show import about
from tunebook.terminal import print_text

_UNIT_TOKENS = 128  # rows are multiples of this for each GPU that shares them


# What would fit


def suggest(draft: Draft) -> dict[str, Draft]:
    """Return the changes that fit, to be added to the same command; if none does, the one with the least memory.

    Those that are refused, or change nothing, are skipped. `draft` has a memory plan.
    """
    config = draft.config
    engines = ("zero3", "fsdp") if isinstance(config.parallelism, ZeroConfig) else ("fsdp", "zero3")
    half, is_cpu = config.training.max_length // 2, config.hardware.generation is Generation.cpu
    row = half * method_facts(config).rows_per_document
    candidates = [  # of several in a line, the first that is not refused
        ["activation=checkpointing", "activation=checkpointing activation.memory_budget=1"],
        [f"parallelism={engine}" for engine in engines if world_size(config) > 1],
        [f"parallelism={engine}_offload" for engine in engines if not is_cpu],
        ["peft=lora"],
        ["peft=qlora"],
        [f"training.max_length={half}" + (f" packing.row_length={row}" if config.packing.row_length else "")],
    ]
    planned: dict[str, tuple[float, Draft]] = {}
    for line in candidates:
        for words in line:
            tried = draft_run(draft.recipe, [*draft.overrides, *words.split()], draft.recipes_dirs, draft.machine)
            if tried.memory is not None and tried.memory.total is not None:
                if tried.config != config:
                    planned[words] = (tried.memory.total, tried)
                break
    fitting = {words: tried for words, (_, tried) in planned.items() if tried.fits}
    least = sorted(planned, key=lambda words: planned[words][0])[:1]
    return fitting or {words: planned[words][1] for words in least}


def show_plans(drafts: dict[str, Draft], console: Console) -> None:
    """Print a line for each plan: what is typed for it, its speed, and whether it fits or why it is refused."""
    lines = [(words, *_speed_and_verdict(draft)) for words, draft in drafts.items()]
    widths = [max(len(line[column]) for line in lines) for column in range(2)]
    for words, speed, verdict in lines:
        print_text(f"  {words:<{widths[0]}}  {speed:>{widths[1]}}  {verdict}", console)


def _speed_and_verdict(draft: Draft) -> tuple[str, str]:
    if draft.memory is None:
        rules = ", ".join(problem.id for problem in draft.problems if problem.is_error)
        return "-", f"refused: {draft.error.message if draft.error else rules}"
    speed = draft.time.tokens_per_second_per_gpu if draft.time else None
    return "-" if speed is None else f"{about(speed)} tokens/s", draft.tightest.verdict


# The longest row


@dataclass(frozen=True, kw_only=True)
class LongestRow:
    """The longest row that fits, up to the model's positions, and what to type after the recipe."""

    tokens: int  # 0: not even the shortest row fits
    has_all_positions: bool  # a longer row needs model.yarn_factor
    overrides: list[str]


def longest_row(draft: Draft) -> LongestRow | None:
    """Search the longest row of one document or pair, the worst case for memory; `auto` decides for each length.

    None if the memory, or the model's size or positions, are unknown. `draft` has a memory plan.
    """
    positions = positions_of(draft.config.model)
    if positions is None or draft.memory is None or None in (draft.memory.total, draft.memory.capacity):
        return None
    unit = _UNIT_TOKENS * draft.config.parallelism.sequence_group_size
    rows = range(unit, positions + 1, unit)
    num_fitting = bisect_left(rows, True, key=lambda tokens: not _fits(draft, tokens))
    tokens = num_fitting * unit
    row = tokens * method_facts(draft.config).rows_per_document
    overrides = [f"training.max_length={tokens}", f"packing.row_length={row}", "training.micro_batch_size=1"]
    return LongestRow(tokens=tokens, has_all_positions=num_fitting == len(rows), overrides=overrides if tokens else [])


def _fits(draft: Draft, tokens: int) -> bool:
    assert draft.composition is not None and draft.machine is not None
    config = draft.composition.config
    config = replace(
        config,
        dataset=replace(config.dataset, synthetic=replace(config.dataset.synthetic, max_tokens=tokens)),
        training=replace(config.training, max_length=tokens, micro_batch_size=1),
        packing=replace(config.packing, row_length=tokens * method_facts(config).rows_per_document),
    )
    resolved = resolve_auto(config, draft.machine)
    host = plan_host_memory(resolved.config, resolved.host_memory_gib)
    return bool(tensors_fit(resolved.config)) and host.fits is not False


# Values side by side


def compare_plans(
    recipe: str | None, overrides: list[str], recipes_dirs: list[Path], compared: list[str], console: Console
) -> int:
    """Print a row for each value; the exit code is that of the best.

    Raises: RequestError if the argument is not one KEY=VALUE,VALUE; DataError if only the data is missing.
    """
    override = parse_override(compared[0])
    key = override.key_or_group
    values = list(dict.fromkeys(override.sweep_string_iterator())) if override.is_choice_sweep() else []
    if len(compared) > 1 or len(values) < 2:
        example = "--compare takes one key and at least two values, such as --compare parallelism=ddp,zero2,zero3,fsdp"
        raise RequestError(example, problem_id="compare-form")
    drafts = {f"{key}={value}": draft_run(recipe, [*overrides, f"{key}={value}"], recipes_dirs) for value in values}
    print_text("Estimated speed of each GPU, and memory of each GPU or rank:", console)
    show_plans(drafts, console)
    best = min(drafts.values(), key=lambda draft: draft.exit_code)
    if best.exit_code == DataError.exit_code and best.unusable_data is not None:
        raise best.unusable_data
    return best.exit_code
