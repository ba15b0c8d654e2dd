"""What is printed: text as it is, choices and reasons in any terminal, and lines that wrap at words."""

from __future__ import annotations

import pytest
from rich.console import Console

from tunebook.plan.auto.decisions import Choice
from tunebook.plan.show import preparing, show_choices, time_lines
from tunebook.plan.speed import TimePlan


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_looks_like_markup_is_shown_as_it_is(is_terminal):
    console = Console(width=160, force_terminal=is_terminal, color_system=None)
    choice = Choice(key="model.facts", value="[a]", why="read from /tmp/a[/b]/config.json")
    with console.capture() as capture:
        show_choices([choice], console)
        with preparing(console) as say:
            say(1, 2, "reading c[/d].jsonl")
            say(2, 2, "reading c[/d].jsonl")
    shown = capture.get()
    assert "[a]" in shown and choice.why in shown
    assert "preparing: reading c[/d].jsonl" in shown
    assert is_terminal or shown.count("preparing: ") == 1


CHOICES = [
    Choice(key="precision.compute", value="bf16", why="the base model is bfloat16, and hopper computes bf16"),
    Choice(key="attention.implementation", value="sdpa_by_document", why="one two three four five six " * 7),
    Choice(key="parallelism.strategy", value="fsdp", why="as asked"),
    Choice(key="training.micro_batch_size", value=None, why="/a/" + "long" * 40 + "/folder"),
]


def screen(width, *, is_terminal=True):
    console = Console(width=width, force_terminal=is_terminal, color_system=None)
    with console.capture() as capture:
        show_choices(CHOICES, console)
    return [line.rstrip() for line in capture.get().splitlines()]


@pytest.mark.parametrize(("width", "is_terminal", "most"), [(60, True, 60), (160, False, 100)])
def test_no_terminal_cuts_a_choice(width, is_terminal, most):
    lines = screen(width, is_terminal=is_terminal)
    assert max(map(len, lines)) <= most
    letters = "".join("".join(lines).split())
    shown = [one for one in CHOICES if one.why != "as asked"]
    assert letters.count("o") >= sum(f"{one.key}{one.value}{one.why}".count("o") for one in shown)
    assert "…" not in letters


def test_the_time_has_two_digits_with_its_assumptions():
    plan = TimePlan(
        tokens_per_second_per_gpu=1023.0, tokens_per_second=8184.0, tokens=288_000.0, hours=9.775, gpu_hours=78.2,
        assumption="right to about a third: one thing; and another",
    )  # fmt: skip
    lines = time_lines(plan)
    assert lines[1] == "  about 1,000 tokens/s per GPU, 8,200 in all"
    assert lines[2].startswith("  288,000 tokens take about 9.8 hours = 78 GPU-hours")
    assert lines[3:] == ["  right to about a third: one thing;", "      and another"]
    assert time_lines(TimePlan(tokens=5.0, assumption="not estimated: why"))[1:] == ["  not estimated: why"]
