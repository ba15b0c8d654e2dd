"""Format what the launcher prints: the plan as a table of rows, the choices of `auto`, warnings, progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from tunebook.config.choices import Generation, Source
from tunebook.config.override_text import as_typed
from tunebook.config.schema import HardwareConfig, RunConfig
from tunebook.data.batch import BatchPlan
from tunebook.data.sources import begins_with_images, first_images
from tunebook.errors import Problem, counted
from tunebook.plan.auto.decisions import AS_ASKED, Choice
from tunebook.plan.draft import Draft
from tunebook.plan.images import planned_images
from tunebook.plan.memory.activations import image_cost
from tunebook.plan.memory.verdict import MemoryPlan, gib
from tunebook.plan.speed import TimePlan
from tunebook.terminal import print_lines

_INDENT = 10  # columns of a row's name


def show_plan(draft: Draft, console: Console, *, with_reasons: bool) -> None:
    """Print the verdict, a table of hardware, batch, time and memory, the choices and the warnings."""
    assert draft.batch is not None and draft.memory is not None and draft.host is not None and draft.time is not None
    style = {True: "bold green", False: "bold red", None: "bold yellow"}[draft.fits]
    print_lines([draft.tightest.verdict], console, style=style)
    lines = [_row("hardware", hardware_text(draft.config.hardware)), *batch_lines(draft.batch)]
    if (images := images_text(draft.config)) is not None:
        lines.append(_row("images", images))
    lines += [_row("time", time_text(draft.time, with_reasons=with_reasons))]
    lines += [_row("memory", memory_text(draft.memory)), _row("host", host_memory_text(draft.host))]
    if draft.unusable_data is not None:
        is_missing = draft.unusable_data.problem_id != "data-for-another-method"
        lines.append(_row("data", f"{'missing' if is_missing else 'for another method'}; planned without it"))
    print_lines(lines, console, indent=_INDENT)
    show_choices(draft.resolved.choices, console, with_reasons=with_reasons)
    show_warnings(draft.problems, console)


def _row(name: str, text: str) -> str:
    return f"{name:<{_INDENT}}{text}"


def show_choices(choices: list[Choice], console: Console, *, with_reasons: bool = False) -> None:
    """Print the choices that `auto` made, as they are typed, one on each line."""
    lines = ["chosen by auto:" if with_reasons else "chosen by auto (reasons: tunebook plan --all):"]
    for choice in choices:
        if choice.why != AS_ASKED:
            reason = f"  # {choice.why}" if with_reasons else ""
            lines.append(f"  {choice.key}={as_typed(choice.value)}{reason}")
    print_lines(lines, console)


def show_warnings(warnings: list[Problem], console: Console) -> None:
    """Print the warnings, each with its fix."""
    for warning in warnings:
        print_lines(f"warning: {warning.text()}".splitlines(), console, style="yellow")


def hardware_text(hardware: HardwareConfig) -> str:
    """The machines of a resolved configuration, such as `8 hopper GPUs of 80 GiB`."""
    unit = "CPU rank" if hardware.generation is Generation.cpu else f"{hardware.generation.name} GPU"
    memory = "" if hardware.memory_gib is None else f" of {hardware.memory_gib:g} GiB"
    nodes = f"{hardware.num_nodes} nodes with " if hardware.num_nodes > 1 else ""
    return f"{nodes}{counted(hardware.gpus_per_node or 1, unit)}{memory}"


def batch_lines(plan: BatchPlan) -> list[str]:
    """The batch arithmetic as two rows of text."""
    size = counted(plan.global_samples, plan.unit) if plan.global_samples else f"at most {plan.global_tokens:,} tokens"
    size += " a step"
    if plan.documents_per_step and plan.tokens_per_step:
        documents = "" if plan.global_samples else f"{plan.documents_per_step:,.1f} {plan.unit}s, "
        size += f" ({documents}{'about ' if plan.is_estimate else ''}{plan.tokens_per_step:,.0f} tokens)"
    kind = "packed" if plan.is_packed else "padded"
    ranks = counted(plan.world_size, "rank")
    if plan.sequence_group_size > 1:
        ranks = f"{counted(plan.data_ranks, 'group')} of {plan.sequence_group_size} ranks"
    passes = f"as many passes as the {plan.unit}s need"
    if plan.accumulation is not None:
        passes = counted(plan.accumulation, "pass", "passes")
    rows = f"{kind} rows of up to {plan.row_length:,} tokens"
    in_a_pass = counted(plan.micro_batch_size, "row" if plan.is_packed or plan.unit == "document" else plan.unit)
    lines = [_row("batch", f"{size} in {rows}: {ranks} x {in_a_pass} x {passes}")]
    steps = "not known before the data is prepared" if plan.total_steps is None else f"{plan.total_steps:,}"
    if plan.steps_per_epoch is not None and plan.num_documents is not None:
        steps += f"; an epoch of {counted(plan.num_documents, plan.unit)} has {plan.steps_per_epoch:,}"
    return [*lines, _row("steps", steps)]


def images_text(config: RunConfig) -> str | None:
    """What an image of the documents takes, and what is assumed; None for a run without images."""
    images, longest, facts = planned_images(config), config.training.max_length, config.model.facts
    if images is None:
        if begins_with_images(config.dataset):
            model = "this model" if facts is None else facts.architecture
            return (
                f"planned without the tower of {model}, which was not tried; tunebook plan --measure trains two steps"
            )
        may_come = config.dataset.source is not Source.synthetic and first_images(config.dataset) is None
        return "none assumed: the data is not at hand" if may_come and facts is not None and facts.unreached else None
    tokens = image_cost(config, images).tokens
    takes = f"an image of {images.size[0]:,} x {images.size[1]:,} pixels takes {tokens:,} tokens"
    source = "assumed, since none is at hand" if images.is_assumed else "as in the first documents"
    text = f"{takes}, {images.number} in a document: {source}"
    fitting = longest // tokens
    return text if fitting >= images.number else f"{text}; training.max_length={longest} leaves {fitting} of them"


def memory_text(plan: MemoryPlan) -> str:
    """The memory of one GPU or rank, part by part."""
    if plan.measured is not None and plan.measured.ran_out is None:
        speed = plan.measured.tokens_per_second_per_gpu
        trained = "" if speed is None else f"; the second step trained {speed:,.0f} tokens/s on each rank"
        return f"{_amount(plan)} on each rank, measured on {plan.measured.date}{trained}"
    if plan.total is None:
        return "not known"
    parts = " + ".join(f"{name} {gib(value)}" for name, value in plan.parts.items() if value)
    return f"{_amount(plan)} on each rank: {parts} + margin {gib(plan.margin)}"


def host_memory_text(plan: MemoryPlan) -> str:
    """The host memory of one node at its peak, and what is written to its NVMe disk."""
    if plan.total is None:
        return "not known"
    parts = ", ".join(f"{name} {gib(value)}" for name, value in plan.parts.items() if value)
    nvme = f"; {gib(plan.nvme_gib)} GiB on its NVMe disk" if plan.nvme_gib else ""
    return f"{_amount(plan)} on each node at the peak: {parts}, margin {gib(plan.margin)}{nvme}"


def _amount(plan: MemoryPlan) -> str:
    limit = "" if plan.capacity is None else f" of {plan.capacity:,g}"
    return f"{gib(plan.needed or 0)}{limit} GiB"


def time_text(plan: TimePlan, *, with_reasons: bool) -> str:
    """The estimated duration and speed, or why there is no estimate."""
    speed, total = plan.tokens_per_second_per_gpu, plan.tokens_per_second
    if speed is None or total is None:
        return plan.assumption
    text = f"{about(total)} tokens/s, {about(speed)} on each GPU"
    if plan.hours is not None and plan.gpu_hours is not None:
        duration = f"{about(plan.hours)} hours" if plan.hours >= 1 else f"{about(plan.hours * 60)} minutes"
        text = f"about {duration} ({about(plan.gpu_hours)} GPU-hours) at {text}"
    certainty, _, reasons = plan.assumption.partition(": ")
    return f"{text}; {certainty}{f': {reasons}' if with_reasons else ''}"


def about(value: float) -> str:
    """Two digits of an estimate."""
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"


@contextmanager
def preparing(console: Console) -> Iterator[Callable[[int, int | None, str], None]]:
    """A progress callback `(done, total, what)` for preparing data; one line of the first part without a terminal."""
    label_column = TextColumn("preparing: {task.description}", markup=False)
    columns = (label_column, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}

        def update(done: int, total: int | None, label: str) -> None:
            if not tasks and not console.is_terminal:
                console.print(Text(f"preparing: {label}"))
            if label not in tasks:
                tasks[label] = bar.add_task(label, total=total)
            bar.update(tasks[label], completed=done, total=total)

        yield update
