"""Format what the launcher prints: recipes, choices and reasons, batch, command, progress and the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from tunebook.config.book import find_recipes
from tunebook.config.compose import compose
from tunebook.config.override_text import as_typed
from tunebook.config.schema import ReferenceHardware, RunConfig
from tunebook.config.unsafe_text import shown
from tunebook.data.batch import BatchPlan
from tunebook.errors import Problem, RequestError
from tunebook.plan.auto.decisions import AS_ASKED, Choice, ChoiceValue
from tunebook.plan.memory.gpu import Memory, MemoryPlan
from tunebook.plan.memory.host_memory import HostPlan
from tunebook.plan.speed import TimePlan
from tunebook.record.run_folder import Outcome
from tunebook.terminal import print_lines, print_text

_WIDTH_WITHOUT_TERMINAL = 100  # columns, as in a log
_WIDEST_VALUE = 24  # columns; a longer one wraps
_NARROWEST_REASON = 26  # columns; in fewer it is printed below its choice


@dataclass(frozen=True, kw_only=True)
class LastRun:
    """The last run of a recipe: its folder's name and its choices, values by key."""

    name: str
    values: dict[str, ChoiceValue]


def show_choices(choices: list[Choice], console: Console, *, last: LastRun | None, command: str | None) -> None:
    """Print the choices that differ from the last run's or, without one, those of `auto`, with their reasons.

    `command` shows the other choices and is printed with their number. None: all are printed.
    """
    listed = choices
    if command is not None:
        listed = [choice for choice in choices if _is_shown_by_default(choice, last)]
    alike = "as asked" if last is None else f"as in the run of {last.name}"
    rest = f"{len(choices) - len(listed)} more" if listed else f"Choices: all {len(choices)}"
    if listed:
        title = "Choices made by auto" if last is None else f"Choices that differ from the run of {last.name}"
        console.print(Text("Choices" if command is None else title, style="italic"))
        _print_choices(listed, console)
    if len(listed) < len(choices):  # on one line, so that the command can be copied
        print_text(shown(f"{rest} {alike}: {command}"), console)


def _is_shown_by_default(choice: Choice, last: LastRun | None) -> bool:
    """Whether a choice differs from the last run's, or is by `auto`. Reasons do not count: they contain estimates."""
    if last is None:
        return choice.why != AS_ASKED
    return choice.key not in last.values or choice.value != last.values[choice.key]


def _print_choices(choices: list[Choice], console: Console) -> None:
    """Print a table, or in a narrow terminal the reason below each choice; nothing is cut."""
    width = console.width if console.is_terminal else _WIDTH_WITHOUT_TERMINAL
    header, rows = ("key", "value", "why"), [(choice.key, as_typed(choice.value), choice.why) for choice in choices]
    keys, values = (max(len(row[column]) for row in (header, *rows)) for column in (0, 1))
    is_narrow = width - keys - min(values, _WIDEST_VALUE) - 4 < _NARROWEST_REASON  # 2 spaces between columns
    table = Table(box=None, pad_edge=False, show_header=not is_narrow, padding=(0, 2, 0, 0))
    if is_narrow:
        for key, value, why in rows:
            table.add_row(Text(f"{key}={value}", overflow="fold"))
            table.add_row(Padding(Text(why, overflow="fold"), (0, 0, 0, 4)))
    else:
        for name, most in zip(header, (keys, _WIDEST_VALUE, None), strict=True):
            table.add_column(name, overflow="fold", max_width=most)
        for row in rows:
            table.add_row(*map(Text, row))  # a path may hold brackets
    console.print(table, width=width)


def show_warnings(warnings: list[Problem], console: Console) -> None:
    """Print the warnings, each with its fix."""
    for warning in warnings:
        text = f"warning: {warning.text()}"
        if console.is_terminal:
            print_lines(text.splitlines(), console, style="yellow")
        else:
            console.print(Text(text))


def batch_lines(plan: BatchPlan) -> list[str]:
    """The batch arithmetic as lines of text, marked as an estimate until the data is prepared."""
    asked = f"{plan.global_samples} documents" if plan.global_samples else f"at most {plan.global_tokens} tokens"
    in_rows = (plan.rows_per_step or 0) * plan.row_length
    if plan.global_tokens is not None and in_rows < plan.global_tokens:
        asked = f"at most {in_rows} tokens, the whole rows of training.global_tokens={plan.global_tokens}"
    title = "Batch (estimated: the data is not prepared yet)" if plan.is_estimate else "Batch"
    lines = [title, f"  one optimizer step: {asked}"]
    kind = "packed" if plan.is_packed else "padded"
    ranks = f"{plan.world_size} GPUs or ranks" if plan.world_size > 1 else "1 GPU or rank"
    if (group := plan.sequence_group_size) > 1:
        ranks = f"{plan.data_ranks} group{'s' if plan.data_ranks > 1 else ''} of {group} GPUs or ranks"
    if plan.rows_per_step is not None:
        lines.append(
            f"  {plan.rows_per_step} {kind} row{'s' if plan.rows_per_step != 1 else ''} of up to {plan.row_length} "
            f"tokens = {ranks} x {plan.accumulation} accumulated x {plan.micro_batch_size} per pass"
        )
    else:
        lines.append(
            f"  {kind} rows of up to {plan.row_length} tokens on {ranks}, {plan.micro_batch_size} per pass; how many "
            "are accumulated is worked out from the prepared documents' lengths"
        )
    if plan.documents_per_step and plan.tokens_per_step:
        lines.append(f"  {plan.documents_per_step:,.1f} documents and {plan.tokens_per_step:,.0f} tokens a step")
    if plan.is_packed and plan.longest_row is not None and plan.longest_row < plan.row_length:
        lines.append(f"  no row of any step has more than {plan.longest_row:,} tokens")
    if plan.steps_per_epoch is not None:
        lines.append(f"  {plan.num_documents:,} documents = {plan.steps_per_epoch:,} steps an epoch")
    if plan.total_steps is not None:
        lines.append(f"  {plan.total_steps:,} optimizer steps in all")
    return lines


def show_memory(plan: MemoryPlan, console: Console) -> None:
    """Print the estimated memory part by part, as numbers and as a bar, and the parts without an estimate."""
    print_lines(memory_lines(plan), console)
    is_estimate = plan.measured is None or plan.measured.ran_out is not None  # measured memory has no parts to draw
    if is_estimate and (bar := memory_bar(plan.memory, width=min(console.width - _WHAT_THERE_IS, 96))):
        drawn, legend = Text("  ").append_text(bar).split("\n")
        console.print(drawn)
        print_lines([legend.plain], console, separator="  ")


def memory_lines(plan: MemoryPlan) -> list[str]:
    """The memory of one GPU or rank as lines of text."""
    parts = asdict(plan.memory)
    total, capacity = parts.pop("total"), parts.pop("capacity")
    known = [f"{name} {_gib(value)}" for name, value in parts.items() if value is not None]
    missing = [name for name, value in parts.items() if value is None]
    of = "" if capacity is None else f", of {capacity:g}"
    if (measured := plan.measured) is not None and measured.ran_out is None:
        lines = [f"Memory of each GPU or rank (measured on {measured.date}, GiB{of})"]
        estimated = [part for part in known if not part.startswith("overhead")]
        if estimated:
            lines.append(f"  estimated parts of it: {', '.join(estimated)}")
        if (speed := measured.tokens_per_second_per_gpu) is not None:
            lines.append(f"  the second of the two steps trained {speed:,.0f} tokens/s per GPU or rank")
        return [*lines, f"  {plan.verdict}"]
    lines = [f"Memory of each GPU or rank (estimated, GiB{of})"]
    if known:
        lines.append(f"  {' + '.join(known)}" + (f" = {_gib(total)}" if total is not None else ""))
    if missing:
        lines.append(f"  not estimated: {', '.join(missing)}")
    return [*lines, f"  {plan.verdict}"]


def host_memory_lines(plan: HostPlan) -> list[str]:
    """The estimated host memory of one node, and what is written to its NVMe disk; zero parts are left out."""
    memory = plan.memory
    of = "" if memory.capacity is None else f", of {memory.capacity:,g}"
    lines = [f"Host memory of each node (estimated, GiB{of})"]
    named = ("processes", "training", "loading", "offload", "saving")
    parts = [f"{name} {_gib(value)}" for name in named if (value := getattr(memory, name))]
    if memory.total is not None:
        lines.append(f"  {', '.join(parts)}; {_gib(memory.total)} at the peak")
    if plan.nvme_gib:
        lines.append(f"  on its NVMe disk {_gib(plan.nvme_gib)}")
    return [*lines, f"  {plan.verdict}"]


# Color and letter of each part; the letter is for terminals without colors.
_BAR = {
    "weights": ("blue", "W"), "gradients": ("cyan", "G"), "optimizer": ("magenta", "O"), "activations": ("yellow", "A"),
    "buffers": ("green", "B"), "overhead": ("white", "C"),
}  # fmt: skip


_PLAINLY_MORE = 1.1
_WHAT_THERE_IS = 26  # columns before the bar, and after a bar longer than the capacity


def memory_bar(memory: Memory, width: int) -> Text | None:
    """Draw the parts end to end with a legend, scaled to the capacity or to a larger total.

    None if nothing is known.
    """
    values = {name: getattr(memory, name) for name in _BAR}
    total = memory.total
    if not total:
        return None
    scale = (width - 2) / max(total, memory.capacity or 0.0)
    bar, drawn, reached = Text("["), 0, 0.0
    for name, (color, letter) in _BAR.items():
        reached += values[name] or 0.0
        cells = round(reached * scale) - drawn
        bar.append(letter * cells, style=f"{color} reverse")
        drawn += cells
    bar.append("." * (width - 2 - drawn) + "]")
    if memory.capacity is not None and total > memory.capacity:
        bar.append(f" {_times(total / memory.capacity)} x the capacity", style="red")
    return bar.append("\n  " + "  ".join(f"{letter} {name}" for name, (_, letter) in _BAR.items() if values[name]))


def _times(ratio: float) -> str:
    """Format how far a total exceeds the capacity; never rounds down to 1.0."""
    return f"{ratio:,.1f}" if ratio >= _PLAINLY_MORE else f"{math.ceil(ratio * 100) / 100:.2f}"


def time_lines(plan: TimePlan) -> list[str]:
    """The estimated speed and duration with their assumptions, or why there is no estimate."""
    lines = ["Time (estimated)"]
    speed, total = plan.tokens_per_second_per_gpu, plan.tokens_per_second
    if speed is not None and total is not None:
        in_all = f", {about(total)} in all" if total > speed else ""
        lines.append(f"  about {about(speed)} tokens/s per GPU{in_all}")
    if plan.hours is not None and plan.gpu_hours is not None:
        lines.append(
            f"  {plan.tokens:,.0f} tokens take about {about(plan.hours)} hours = {about(plan.gpu_hours)} GPU-hours; "
            "loading, validation, saving and evaluation come on top"
        )
    elif speed is not None:
        lines.append(
            "  the number of tokens is unknown until the data is prepared; see dataset.num_documents and .mean_tokens"
        )
    return [*lines, *(f"  {line}" for line in plan.assumption.replace("; ", ";\n    ").splitlines())]


def about(value: float) -> str:
    """Two digits of an estimate."""
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"


def _gib(value: float) -> str:
    return f"{value:,.1f}" if value >= 1 or value == 0 else f"{value:.2g}"


def show_end(outcome: Outcome, folder: Path, report: Path | None, console: Console) -> None:
    """Print how the run ended and where its files are."""
    if outcome.exit_code == 0:
        console.print(Text("finished", style="green"))
    else:
        print_text(outcome.reason, console, style="red")
    print_text(f"run folder: {folder}" + (f"\nreport: {report}" if report else ""), console)


@contextmanager
def preparing(console: Console) -> Iterator[Callable[[int, int | None, str], None]]:
    """A progress callback `(done, total, what)` for preparing data; plain lines without a terminal."""
    if not console.is_terminal:
        seen: set[str] = set()

        def line(done: int, total: int | None, what: str) -> None:
            if what not in seen:
                seen.add(what)
                console.print(Text(f"preparing: {what}"))

        yield line
        return
    what_column = TextColumn("preparing: {task.description}", markup=False)
    columns = (what_column, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        tasks: dict[str, TaskID] = {}

        def update(done: int, total: int | None, what: str) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield update


def recipes_table(recipes_dirs: list[Path], evidence_text: Callable[[list[Path]], str]) -> Table:
    """A row per recipe; one that does not compose shows its error. `evidence_text` names a recipe's evidence files."""
    table = Table(box=None, pad_edge=False)
    table.add_column("recipe", no_wrap=True)  # a wrapped or cut name cannot be typed
    for column in ("title", "strategy", "reference hardware", "evidence"):
        table.add_column(column, overflow="fold")
    for name, file in find_recipes(recipes_dirs).items():
        try:
            config = compose(name, [], recipes_dirs).config
        except RequestError as error:
            table.add_row(*map(Text, (name, f"does not compose: {error.message.splitlines()[0]}", "", "", "")))
            continue
        strategy = config.parallelism.strategy.name
        cells = (name, config.title, strategy, _reference_hardware(config), evidence_text(_evidence_files(file)))
        table.add_row(*map(Text, cells))  # a title may hold brackets
    return table


def _reference_hardware(config: RunConfig) -> str:
    """The machine that the recipe's source used, such as `8 x volta`."""
    reference: ReferenceHardware = config.hardware.reference
    nodes = f"{config.hardware.num_nodes} nodes x " if config.hardware.num_nodes > 1 else ""
    return f"{nodes}{reference.gpus_per_node} x {reference.generation.name}"


def _evidence_files(recipe_file: Path) -> list[Path]:
    return sorted((recipe_file.parent / recipe_file.stem / "evidence").glob("*.json"))
