from __future__ import annotations

from xml.etree import ElementTree

from tunebook.record.page.details import draw_histogram


def test_bars_are_as_tall_as_their_counts() -> None:
    svg = ElementTree.fromstring(draw_histogram([0, 10, 20, 30], [50, 100, 0]))
    heights = [float(bar.get("height")) for bar in svg.iter("rect")]
    assert heights == [47, 94, 0]
    assert [title.text for title in svg.iter("title")][1] == "10 to 20 tokens: 100 documents"
    assert [text.text for text in svg.iter("text")] == ["100", "0", "10", "20", "30", "tokens of a document"]


def test_nothing_but_empty_bars_is_drawn_flat() -> None:
    svg = ElementTree.fromstring(draw_histogram([0, 10, 20], [0, 0]))
    assert {float(bar.get("height")) for bar in svg.iter("rect")} == {0}


def test_many_bars_have_few_labels() -> None:
    svg = ElementTree.fromstring(draw_histogram(list(range(0, 4100, 100)), [1] * 40))
    assert len(list(svg.iter("text"))) <= 9
