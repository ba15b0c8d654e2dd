"""Rows over the moments of a step."""

from __future__ import annotations

from tunebook.plan.memory.ledger import Kind, Ledger, Moment, Row


def test_a_row_is_there_from_its_first_moment_to_its_last():
    rows = [
        Row("weights", Kind.weights, 2**30, Moment.start, Moment.step),
        Row("kept", Kind.activations, 2 * 2**30, Moment.forward, Moment.last),
        Row("logits", Kind.activations, 3 * 2**30, Moment.head, Moment.head),
        Row("gradients", Kind.gradients, 4 * 2**30, Moment.end, Moment.end),
    ]
    ledger = Ledger(rows)
    assert ledger.at(Moment.start) == rows[:1]
    assert ledger.at(Moment.last) == rows[:2]
    assert ledger.peak is Moment.head
    parts = {Kind.weights: 2**30, Kind.activations: 5 * 2**30}
    assert ledger.parts() == dict.fromkeys(Kind, 0) | parts
