"""What is printed: text as it is, choices with and without reasons, and the time."""

from __future__ import annotations

import pytest
from rich.console import Console

from tunebook.plan.auto.decisions import Choice
from tunebook.plan.show import preparing, show_choices, time_text
from tunebook.plan.speed import TimePlan


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_looks_like_markup_is_shown_as_it_is(is_terminal):
    console = Console(width=160, force_terminal=is_terminal, color_system=None)
    choice = Choice(key="model.facts", value="[a]", why="read from /tmp/a[/b]/config.json")
    with console.capture() as capture:
        show_choices([choice], console, with_reasons=True)
        with preparing(console) as say:
            say(1, 2, "reading c[/d].jsonl")
            say(2, 2, "reading c[/d].jsonl")
    shown = capture.get()
    assert "[a]" in shown and choice.why in shown
    assert "preparing: reading c[/d].jsonl" in shown
    assert is_terminal or shown.count("preparing: ") == 1


@pytest.mark.parametrize("with_reasons", [False, True])
def test_choices_are_printed_as_they_are_typed(with_reasons):
    console = Console(width=60, force_terminal=True, color_system=None)
    choices = [
        Choice(key="packing.row_length", value=None, why="one two three four five six " * 7),
        Choice(key="parallelism.strategy", value="fsdp", why="as asked"),
    ]
    with console.capture() as capture:
        show_choices(choices, console, with_reasons=with_reasons)
    _, first, *others = [line.rstrip() for line in capture.get().splitlines()]
    assert first.startswith("  packing.row_length=null") and max(map(len, [first, *others])) <= 60
    assert "".join([first, *others]).count("six") == (7 if with_reasons else 0)


def test_the_time_has_two_digits_with_its_assumptions():
    plan = TimePlan(
        tokens_per_second_per_gpu=1023.0, tokens_per_second=8184.0, tokens=288_000.0, hours=9.775, gpu_hours=78.2,
        assumption="right to about a third: one thing; and another",
    )  # fmt: skip
    text = "about 9.8 hours (78 GPU-hours) at 8,200 tokens/s, 1,000 on each GPU; right to about a third"
    assert time_text(plan, with_reasons=False) == text
    assert time_text(plan, with_reasons=True) == f"{text}: one thing; and another"
    assert time_text(TimePlan(tokens=5.0, assumption="not estimated: why"), with_reasons=False) == "not estimated: why"
