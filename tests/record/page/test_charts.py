from __future__ import annotations

import json
import re
from html import unescape
from xml.etree import ElementTree

import pytest

from tunebook.record.page.charts import (
    Chart,
    Line,
    smooth,
    thin,
)


def test_a_chart_is_well_formed_and_draws_points_where_they_belong() -> None:
    chart = Chart(title="Loss", y_label="loss", lines=[Line(name="run", points=[(0, 8.0), (50, 4.0), (100, 0.0)])])
    svg = ElementTree.fromstring(chart.draw(480, 270))
    path = next(element.get("d") for element in svg.iter("path"))
    points = [tuple(map(float, point)) for point in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)]
    (x0, top), (x1, middle), (x2, bottom) = points
    assert (top, bottom) == (26, 270 - 42)
    assert middle == (top + bottom) / 2
    assert abs(x1 - (x0 + x2) / 2) <= 0.1
    assert x2 == 480 - 14


def test_texts_in_a_chart_are_escaped() -> None:
    evil = '<script>alert("x")</script>'
    lines = [Line(name=evil, points=[(1, 1.0), (2, 2.0)])]
    svg = Chart(title=evil, y_label=evil, lines=lines, mark=(1, evil)).draw(480, 270)
    assert "<script" not in svg
    element = ElementTree.fromstring(svg)
    assert evil in [text.text for text in element.iter("text")]
    assert json.loads(unescape(element.get("data-chart")))["lines"][0]["name"] == evil


def test_gaps_single_points_and_values_above_the_ceiling_are_drawn() -> None:
    line = Line(name="norm", points=[(1, 1.0), (2, 900.0), (3, 1.0), (4, None), (5, 2.0)])
    svg = Chart(title="Norm", y_label="norm", lines=[line], ceiling=2.0, from_zero=True).draw(480, 270)
    assert svg.count("arrow") == 1
    assert re.search(r'd="M[\d. ]+L[\d. ]+L[\d. ]+M[\d. ]+"', svg)
    assert "900" not in "".join(text.text or "" for text in ElementTree.fromstring(svg).iter("text"))
    single = Chart(title="Loss", y_label="loss", lines=[Line(name="loss", points=[(1, 3.0)])])
    assert single.draw(480, 270).count("<circle") == 1


def test_thinning_keeps_spikes_gaps_and_both_ends() -> None:
    points = [(float(x), 1.0) for x in range(100_000)]
    points[4_321], points[77_777] = (4_321.0, 50.0), (77_777.0, None)
    kept = thin(points)
    assert len(kept) <= 700
    assert {points[0], points[-1], (4_321.0, 50.0), (77_777.0, None)} <= set(kept)
    assert kept == sorted(kept, key=lambda point: point[0])
    assert thin(points[:10]) == points[:10]


def test_smoothing_by_hand_over_a_gap_and_of_a_straight_line() -> None:
    smoothed, _ = smooth([(1, 1.0), (2, 5.0), (3, None), (4, 3.0), (5, 1.0)])
    assert smoothed == [(1, 1.0), (2, 3.0), (3, None), (4, 2.0), (5, 1.0)]
    points = [(float(x), 10.0 - x) for x in range(10)]
    smoothed, span = smooth(points)
    assert span == 5
    assert [y for _, y in smoothed] == pytest.approx([y for _, y in points])
