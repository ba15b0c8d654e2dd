"""The document lengths of one part of the data, as bars in inline SVG."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from tunebook.record.page.numbers import format_count

_WIDTH, _HEIGHT, _BASE = 480, 150, 112  # SVG units; the bars stand on the base, labels below it
_NUM_LABELS = 6
_LEFT, _RIGHT, _TOP, _GAP = 14, 20, 18, 2


def draw_histogram(edges: Sequence[int], counts: Sequence[int]) -> Markup:
    """Bars between `edges` (one more than `counts`), in tokens; the tallest bar carries its count."""
    assert len(edges) == len(counts) + 1, "a histogram has one edge more than bars"
    width = (_WIDTH - _LEFT - _RIGHT) / len(counts)
    tallest = max(counts)
    parts = [
        Markup('<line class="base" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(_LEFT, _WIDTH - _RIGHT, _BASE, _BASE)
    ]
    for index, count in enumerate(counts):
        height = (_BASE - _TOP) * count / tallest if tallest else 0
        bar = Markup(
            '<rect class="bar-fill" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"><title>{}</title></rect>'
        )
        what = f"{edges[index]:,} to {edges[index + 1]:,} tokens: {count:,} documents"
        parts.append(bar.format(_LEFT + index * width + _GAP / 2, _BASE - height, max(1.0, width - _GAP), height, what))
    peak = max(range(len(counts)), key=lambda index: counts[index])
    middle = Markup('<text class="x-tick" x="{:.1f}" y="{}">{}</text>')
    parts.append(middle.format(_LEFT + (peak + 0.5) * width, _TOP - 5, format_count(tallest)))
    every = max(1, -(-len(counts) // _NUM_LABELS))
    for index in range(0, len(edges), every):
        parts.append(middle.format(_LEFT + index * width, _BASE + 16, format_count(edges[index])))
    parts.append(
        Markup('<text class="axis-name end" x="{}" y="{}">tokens of a document</text>').format(_WIDTH - 4, _BASE + 34)
    )
    return Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        _WIDTH, _HEIGHT, f"Document lengths from {edges[0]:,} to {edges[-1]:,} tokens", Markup("").join(parts)
    )
