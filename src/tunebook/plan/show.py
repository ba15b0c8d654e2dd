"""Format what the launcher prints: choices and reasons, batch, memory, time, progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from tunebook.config.override_text import as_typed
from tunebook.data.batch import BatchPlan
from tunebook.errors import Problem
from tunebook.plan.auto.decisions import AS_ASKED, Choice
from tunebook.plan.memory.verdict import MemoryPlan
from tunebook.plan.speed import TimePlan
from tunebook.terminal import print_lines

_WIDTH_WITHOUT_TERMINAL = 100  # columns, as in a log


def show_choices(choices: list[Choice], console: Console) -> None:
    """Print the choices that `auto` made, with their reasons."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("key", "value", "why"):
        table.add_column(name, overflow="fold")
    for choice in choices:
        if choice.why != AS_ASKED:
            table.add_row(*map(Text, (choice.key, as_typed(choice.value), choice.why)))  # a path may hold brackets
    console.print(Text("Choices made by auto", style="italic"))
    console.print(table, width=console.width if console.is_terminal else _WIDTH_WITHOUT_TERMINAL)


def show_warnings(warnings: list[Problem], console: Console) -> None:
    """Print the warnings, each with its fix."""
    for warning in warnings:
        print_lines(f"warning: {warning.text()}".splitlines(), console, style="yellow")


def batch_lines(plan: BatchPlan) -> list[str]:
    """The batch arithmetic as lines of text, marked as an estimate until the data is prepared."""
    size = f"at most {plan.global_tokens} tokens"
    if plan.global_samples:
        size = f"{plan.global_samples} documents (training.global_samples)"
    title = "Batch (estimated: the data is not prepared yet)" if plan.is_estimate else "Batch"
    lines = [title, f"  one optimizer step: {size}"]
    kind = "packed" if plan.is_packed else "padded"
    ranks = f"{plan.world_size} GPUs or ranks" if plan.world_size > 1 else "1 GPU or rank"
    if plan.sequence_group_size > 1:
        ranks = f"{plan.data_ranks} group(s) of {plan.sequence_group_size} GPUs or ranks"
    rows = f"{kind} rows" if plan.rows_per_step is None else f"{plan.rows_per_step} {kind} rows"
    passes = "as many as the documents need" if plan.accumulation is None else f"{plan.accumulation} accumulated"
    per_pass = f"{plan.micro_batch_size} per pass"
    lines.append(f"  {rows} of up to {plan.row_length} tokens = {ranks} x {per_pass} x {passes}")
    if plan.documents_per_step and plan.tokens_per_step:
        lines.append(f"  {plan.documents_per_step:,.1f} documents and {plan.tokens_per_step:,.0f} tokens a step")
    if plan.steps_per_epoch is not None:
        lines.append(f"  {plan.num_documents:,} documents = {plan.steps_per_epoch:,} steps an epoch")
    if plan.total_steps is not None:
        lines.append(f"  {plan.total_steps:,} optimizer steps in all")
    return lines


def memory_lines(plan: MemoryPlan) -> list[str]:
    """The memory of one GPU or rank as lines of text."""
    measured = plan.measured if plan.measured is not None and plan.measured.ran_out is None else None
    limit = "" if plan.capacity is None else f", of {plan.capacity:g}"
    lines = [f"Memory of each GPU or rank ({f'measured on {measured.date}' if measured else 'estimated'}, GiB{limit})"]
    if measured is not None and (speed := measured.tokens_per_second_per_gpu) is not None:
        lines.append(f"  the second of the two steps trained {speed:,.0f} tokens/s per GPU or rank")
    elif measured is None and plan.total is not None:
        parts = " + ".join(f"{name} {_gib(value or 0)}" for name, value in plan.parts.items())
        lines.append(f"  {parts} = {_gib(plan.total)}")
    return [*lines, f"  {plan.verdict}"]


def host_memory_lines(plan: MemoryPlan) -> list[str]:
    """The estimated host memory of one node, and what is written to its NVMe disk; zero parts are left out."""
    limit = "" if plan.capacity is None else f", of {plan.capacity:,g}"
    lines = [f"Host memory of each node (estimated, GiB{limit})"]
    parts = [f"{name} {_gib(value)}" for name, value in plan.parts.items() if value]
    if plan.total is not None:
        lines.append(f"  {', '.join(parts)}; {_gib(plan.total)} at the peak")
    if plan.nvme_gib:
        lines.append(f"  on its NVMe disk {_gib(plan.nvme_gib)}")
    return [*lines, f"  {plan.verdict}"]


def time_lines(plan: TimePlan) -> list[str]:
    """The estimated speed and duration with their assumptions, or why there is no estimate."""
    lines = ["Time (estimated)"]
    speed, total = plan.tokens_per_second_per_gpu, plan.tokens_per_second
    if speed is not None and total is not None:
        lines.append(f"  about {about(speed)} tokens/s per GPU, {about(total)} in all")
    if plan.hours is not None and plan.gpu_hours is not None:
        hours = f"about {about(plan.hours)} hours = {about(plan.gpu_hours)} GPU-hours"
        lines.append(f"  {plan.tokens:,.0f} tokens take {hours} without loading, validation, saving and evaluation")
    return [*lines, *(f"  {line}" for line in plan.assumption.replace("; ", ";\n    ").splitlines())]


def about(value: float) -> str:
    """Two digits of an estimate."""
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"


def _gib(value: float) -> str:
    return f"{value:,.1f}" if value >= 1 or value == 0 else f"{value:.2g}"


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
