"""What is printed: text as it is, and the memory as a bar to scale, longer than the memory where it does not fit."""

from __future__ import annotations

import pytest
from rich.console import Console

from tunebook.config.book import find_recipes
from tunebook.errors import Problem
from tunebook.evidence.card import listed
from tunebook.plan.auto.decisions import Choice
from tunebook.plan.memory.gpu import Memory, MemoryPlan
from tunebook.plan.show import (
    LastRun,
    memory_bar,
    preparing,
    recipes_table,
    show_choices,
    show_memory,
    show_warnings,
    time_lines,
)
from tunebook.plan.speed import TimePlan
from tunebook.terminal import print_lines


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_looks_like_markup_is_shown_as_it_is(is_terminal):
    console = Console(width=160, force_terminal=is_terminal, color_system=None)
    choice = Choice(key="model.facts", value="[a]", why="read from /tmp/a[/b]/config.json")
    with console.capture() as capture:
        show_choices([choice], console, last=None, command=None)
        with preparing(console) as say:
            say(1, 2, "reading c[/d].jsonl")
    shown = capture.get()
    assert "[a]" in shown and choice.why in shown
    assert "preparing: reading c[/d].jsonl" in shown


CHOICES = [
    Choice(key="precision.compute", value="bf16", why="the base model is bfloat16, and hopper computes bf16"),
    Choice(key="attention.implementation", value="varlen_attention_4", why="one two three four five six " * 7),
    Choice(key="model.facts.unreached", value="vision_tower.encoder.layers, projector" * 3, why="text reaches none"),
    Choice(key="parallelism.strategy", value="fsdp", why="as asked"),
    Choice(key="training.micro_batch_size", value=None, why="/a/" + "long" * 40 + "/folder"),
]


def screen(width, *, is_terminal=True, choices=CHOICES, last=None, command=None):
    console = Console(width=width, force_terminal=is_terminal, color_system=None)
    with console.capture() as capture:
        show_choices(choices, console, last=last, command=command)
    return [line.rstrip() for line in capture.get().splitlines()]


@pytest.mark.parametrize(
    ("width", "is_terminal", "most"),
    [(40, True, 40), (60, True, 60), (80, True, 80), (120, True, 120), (160, False, 100)],
)
def test_no_terminal_cuts_a_choice(width, is_terminal, most):
    lines = screen(width, is_terminal=is_terminal)
    assert most - 20 < max(map(len, lines)) <= most
    letters = "".join("".join(lines).split())
    for choice in CHOICES:
        assert choice.key in letters
    for word in ("hoppercomputesbf16", "varlen_attention_4", "null"):
        assert word in letters
    assert letters.count("o") >= sum(f"{one.key}{one.value}{one.why}".count("o") for one in CHOICES)
    assert "…" not in letters


def test_a_reason_wraps_below_its_column_and_in_a_narrow_terminal_below_its_choice():
    header, *lines = screen(80, choices=CHOICES[:2])[1:]
    column = header.index("why")
    assert lines[2].startswith("attention.implementation  varlen_attention_4  one two three")
    assert all(line.startswith(" " * column) and line[column] != " " for line in lines[3:])
    assert screen(60, choices=CHOICES[:2])[:4] == [
        "Choices",
        "precision.compute=bf16",
        "    the base model is bfloat16, and hopper computes bf16",
        "attention.implementation=varlen_attention_4",
    ]


def test_choices_that_are_not_shown_are_counted_with_the_command_that_shows_them():
    plan = "tunebook plan mine --all"
    first = screen(80, command=plan)
    assert (first[0], first[-1]) == ("Choices made by auto", f"1 more as asked: {plan}")
    assert not any("parallelism.strategy" in line for line in first)
    values = {choice.key: choice.value for choice in CHOICES} | {"parallelism.strategy": "ddp"}
    del values["precision.compute"]
    later = screen(80, command=plan, last=LastRun(name="2026-01-02T03-04-05Z", values=values))
    keys = [line.split()[0] for line in later[2:-1] if not line.startswith(" ")]
    assert keys == ["precision.compute", "parallelism.strategy"]
    assert later[0] == "Choices that differ from the run of 2026-01-02T03-04-05Z"
    assert later[-1] == f"3 more as in the run of 2026-01-02T03-04-05Z: {plan}"
    same = LastRun(name="2026-01-02T03-04-05Z", values={choice.key: choice.value for choice in CHOICES})
    assert screen(80, command=plan, last=same) == [f"Choices: all 5 as in the run of 2026-01-02T03-04-05Z: {plan}"]


def bar_of(width=42, **parts):
    text = memory_bar(Memory(**parts), width=width)
    assert text is not None
    return text.plain.splitlines()


def test_a_quarter_of_the_memory_is_a_quarter_of_the_bar():
    bar, key = bar_of(
        weights=10.0, gradients=5.0, optimizer=5.0, activations=0.0, buffers=0.0, total=20.0, capacity=40.0
    )
    assert bar == "[" + "W" * 10 + "G" * 5 + "O" * 5 + "." * 20 + "]"
    assert key.split() == ["W", "weights", "G", "gradients", "O", "optimizer"]


def test_what_does_not_fit_fills_the_bar_and_says_by_how_much():
    bar, _ = bar_of(weights=60.0, gradients=20.0, total=80.0, capacity=32.0)
    assert bar == "[" + "W" * 30 + "G" * 10 + "] 2.5 x the capacity"


@pytest.mark.parametrize(("total", "said"), [(32.01, "1.01"), (33.5, "1.05"), (35.1, "1.10"), (352.0, "11.0")])
def test_what_is_just_too_large_is_not_said_to_be_as_large(total, said):
    bar, _ = bar_of(weights=total, total=total, capacity=32.0)
    assert bar.endswith(f"] {said} x the capacity")


@pytest.mark.parametrize("width", [80, 120])
def test_the_bar_stays_on_its_line(width):
    parts = {"weights": 3000.0, "total": 3200.0, "capacity": 32.0}
    console = Console(width=width)
    with console.capture() as capture:
        show_memory(MemoryPlan(memory=Memory(**parts), fits=False, verdict="does not fit"), console)
    (bar,) = [line for line in capture.get().splitlines() if line.startswith("  [")]
    assert bar.endswith("] 100.0 x the capacity")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_plan_wraps_at_words_in_a_terminal_and_nowhere_else(width):
    parts = {"weights": 11.5, "gradients": 2.9, "optimizer": 4.3, "activations": 1.8, "buffers": 0.22, "overhead": 6.0}
    memory = Memory(**parts, total=26.7, capacity=32.0)
    plan = MemoryPlan(memory=memory, fits=True, verdict="fits: " + "20.7 GiB without the overhead, no more than " * 2)
    warning = Problem(id="an-id", key="a.key", message="one two three four " * 6, fix="a.key=1", is_error=False)
    shown = {}
    for is_terminal in (True, False):
        console = Console(width=width if is_terminal else 240, force_terminal=is_terminal, color_system=None)
        with console.capture() as capture:
            show_warnings([warning], console)
            show_memory(plan, console)
            print_lines(
                time_lines(TimePlan(assumption="assumed: " + "one thing and another " * 6 + "; rows are full")), console
            )
        shown[is_terminal] = [line.rstrip() for line in capture.get().splitlines()]
    assert max(map(len, shown[True])) <= width < max(map(len, shown[False]))
    texts = {name: " ".join(line for line in lines if "[WW" not in line) for name, lines in shown.items()}
    assert texts[True].split() == texts[False].split()
    assert "  " + plan.verdict.rstrip() in shown[False]


def test_rounding_never_changes_the_length():
    for total in range(1, 40):
        share = total / 5
        bar, _ = bar_of(
            weights=share,
            gradients=share,
            optimizer=share,
            activations=share,
            buffers=share,
            total=total,
            capacity=41.0,
        )
        assert len(bar) == 42


def test_nothing_known_is_no_bar():
    assert memory_bar(Memory(capacity=32.0), width=42) is None


def test_the_time_has_two_digits_with_what_it_rests_on():
    plan = TimePlan(
        tokens_per_second_per_gpu=1023.0,
        tokens_per_second=8184.0,
        tokens=288_000.0,
        hours=9.775,
        gpu_hours=78.2,
        assumption="right to about a third: one thing; and another",
    )
    assert time_lines(plan) == [
        "Time (estimated)",
        "  about 1,000 tokens/s per GPU, 8,200 in all",
        "  288,000 tokens take about 9.8 hours = 78 GPU-hours; loading, validation, saving and evaluation come on top",
        "  right to about a third: one thing;",
        "      and another",
    ]


def test_a_speed_without_a_number_of_tokens_and_no_speed_at_all():
    plan = TimePlan(tokens_per_second_per_gpu=10.0, tokens_per_second=10.0, assumption="a")
    assert time_lines(plan)[1:3] == [
        "  about 10 tokens/s per GPU",
        "  the number of tokens is unknown until the data is prepared; see dataset.num_documents and .mean_tokens",
    ]
    assert time_lines(TimePlan(tokens=5.0, assumption="not estimated: why")) == [
        "Time (estimated)",
        "  not estimated: why",
    ]


@pytest.fixture
def show_recipe(tmp_path, monkeypatch):
    """`show_recipe("name", "title")`: what is printed of a book with one more recipe."""
    monkeypatch.setattr("tunebook.config.book.recipe_folders", lambda named: named)

    def show(name, title):
        (tmp_path / f"{name}.yaml").write_text(
            "# @package _global_\ndefaults:\n  - override /dataset: synthetic\n  - override /parallelism: ddp\n"
            f"  - _self_\ntitle: '{title}'\nmodel:\n  name: a/b\n"
        )
        console = Console(width=240)
        with console.capture() as capture:
            console.print(recipes_table([tmp_path], listed))
        return capture.get()

    return show


@pytest.mark.parametrize("title", ["LoRA [r=8] of data[/x] test", "[bold]fat", "ends in \\", ":smile:"])
def test_a_title_is_shown_as_it_is(title, show_recipe):
    assert title in show_recipe("mine", title)


@pytest.mark.parametrize("name", ["größe_1", "a=b", "1"])
def test_a_name_that_cannot_be_trained_says_so_beside_it(name, show_recipe):
    shown = show_recipe(name, "mine")
    assert shown.splitlines()[1].split()[0] == name
    assert f"does not read '{name}' as a name; rename it" in shown


@pytest.mark.parametrize("width", [80, 100, 120])
def test_a_narrow_terminal_cuts_no_name_and_no_label(width):
    console = Console(width=width)
    with console.capture() as capture:
        console.print(recipes_table([], listed))
    shown = capture.get()
    names = [line.split()[0] for line in shown.splitlines()[1:] if not line.startswith(" ")]
    assert [name for name in names if name != "recipe"] == list(find_recipes([]))  # its heading may take two lines
    assert "…" not in shown
