"""Draw docs/flow.svg, the figure of the README: `python docs/flow.py`. A test holds it equal to this script."""

from __future__ import annotations

from html import escape
from pathlib import Path

STEPS = (
    ("compose", "Hydra groups", "and a recipe"),
    ("check", "every rule,", "no GPU touched"),
    ("plan", "memory, batch,", "speed"),
    ("train", "TRL, accelerate,", "DeepSpeed"),
    ("evaluate", "lm-evaluation-", "harness"),
    ("evidence", "loss, speed,", "score, tolerance"),
)
_WIDTH, _HEIGHT, _BOX, _GAP, _TOP = 920, 108, 130, 24, 12
# Readable on white and on black, since a README is shown on both.
_STYLE = (
    "text{font:12px sans-serif;fill:#808080;text-anchor:middle}.name{font:bold 15px sans-serif;fill:#2f7fb8}"
    "rect{fill:none;stroke:#2f7fb8;stroke-width:1.5;rx:8}path{fill:none;stroke:#808080;stroke-width:1.5}"
)


def draw() -> str:
    """The figure as a self-contained SVG: a box per step, and an arrow from each to the next."""
    title = f"The steps of a run: {', '.join(name for name, *_ in STEPS)}"
    parts = [f"<title>{escape(title)}</title>", f"<style>{_STYLE}</style>"]
    for number, (name, *lines) in enumerate(STEPS):
        left = 10 + number * (_BOX + _GAP)
        middle = left + _BOX / 2
        parts.append(f'<rect x="{left}" y="{_TOP}" width="{_BOX}" height="84"/>')
        parts.append(f'<text class="name" x="{middle:.0f}" y="{_TOP + 28}">{name}</text>')
        parts += [
            f'<text x="{middle:.0f}" y="{_TOP + 50 + 17 * line}">{escape(text)}</text>'
            for line, text in enumerate(lines)
        ]
        if number:
            parts.append(f'<path d="M{left - _GAP + 3} {_TOP + 42}h{_GAP - 8}m-5 -5l5 5l-5 5"/>')
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n{body}\n</svg>\n'


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
