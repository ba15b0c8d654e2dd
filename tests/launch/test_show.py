"""The memory as a bar: to scale, in order, with a key, and longer than the memory where it does not fit."""

from __future__ import annotations

from tunebook.launch.show import memory_bar
from tunebook.plan.memory import Memory


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
    assert bar == "[" + "W" * 30 + "G" * 10 + "] 2.5 x what there is"


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
