"""Draw docs/results.svg, the results in the README: `python docs/results.py`. A test holds it equal to this script.

Every number is read from benchmarks/results/.
"""

from __future__ import annotations

import json
import math
import re
from html import escape
from pathlib import Path
from statistics import mean, median
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
SPEED = (  # label, run of Tunebook, run of Unsloth
    ("LoRA", "lora", "unsloth_stored"),
    ("LoRA, short documents", "lora_short", "unsloth_stored_short"),
    ("LoRA, least memory", "lora_least", "unsloth_checkpointing"),
    ("QLoRA, least memory", "qlora_least", "unsloth_4bit"),
    ("LoRA on an fp8 base", "lora_fp8", None),
)
SCORES = (  # label, file, names of its runs
    ("Word tasks, from scratch", "cpu_learning", r"quickstart_\w"),
    ("Digits in images, from scratch", "cpu_learning", r"digits_\w"),
    ("Yes-or-no questions, all weights", "h200_learning", r"full_\d+"),
    ("Yes-or-no questions, LoRA", "h200_learning", r"lora_\d+"),
    ("Yes-or-no questions, LoRA on fp8", "h200_learning", r"lora_fp8_\d+"),
    ("Yes-or-no questions, QLoRA", "h200_learning", r"qlora_\d+"),
    ("Yes-or-no questions, Gemma 3 270M", "h200_learning", r"gemma3_270m_\d+"),
    ("Tool calls", "h100_hopper_image", r"smollm2_135m_tools-\d+"),
    ("Preferred answers, DPO", "h200_learning", r"dpo_fp32_\d+"),
)
_SMALLEST_GIB = 1  # smaller runs compare losses of tiny models
_BAND = 0.1
_WIDTH, _HEIGHT = 920, 542
# Readable on white and on black, since a README is shown on both.
_STYLE = (
    "text{font:12px sans-serif;fill:#808080}.title{font:bold 15px sans-serif;fill:#2f7fb8}"
    ".ours{font-weight:bold;fill:#2f7fb8}.end{text-anchor:end}.middle{text-anchor:middle}"
    ".bar{fill:#2f7fb8}.peer{fill:#808080;fill-opacity:.55}.dots{fill:#2f7fb8;fill-opacity:.5}"
    ".faint{stroke:#808080;stroke-opacity:.25}.line{stroke:#808080}.gain{stroke:#2f7fb8;stroke-width:2}"
    ".band{fill:#808080;fill-opacity:.2}.before{fill:none;stroke:#808080;stroke-width:1.5}"
)

Line = dict[str, Any]


def read_lines(name: str) -> list[Line]:
    """The recorded runs of a file."""
    return [json.loads(text) for text in (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def peak_gib(line: Line) -> float:
    """The memory of the rank that had the most."""
    found = line["memory_gib"]
    return float(max(found) if isinstance(found, list) else found)


def planned_and_measured() -> list[tuple[float, float]]:
    """GiB of every recorded run as planned before it and as measured.

    Runs of `learning` were planned before their data was prepared, as if all rows were full.
    """
    pairs = []
    for file in sorted(RESULTS.glob("*.jsonl")):
        for line in read_lines(file.stem):
            planned = line.get("planned_gib") or line.get("planned_then_gib")
            if planned and line.get("memory_gib") and line.get("series") != "learning":
                pairs.append((planned, peak_gib(line)))
    return [pair for pair in pairs if min(pair) >= _SMALLEST_GIB]


def scores() -> list[tuple[str, float, float, int]]:
    """Label, mean score before and after, and number of runs; the highest first."""
    found = []
    for label, file, names in SCORES:
        lines = [line for line in read_lines(file) if re.fullmatch(names, line["name"])]
        before = _values(lines, "before", "validation_reference_accuracy")
        after = _values(lines, "after", "validation_reward_accuracy")
        found.append((label, mean(before), mean(after), len(after)))
    return sorted(found, key=lambda row: -row[2])


def _values(lines: list[Line], when: str, of_pairs: str) -> list[float]:
    """Scores of the evaluation, and accuracies of preference training."""
    evaluated = [score["value"] for line in lines for score in line.get(when, {}).values()]
    return evaluated + [line[of_pairs] for line in lines if of_pairs in line]


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """A line of text."""
    shown = f' class="{kind}"' if kind else ""
    return f'<text{shown} x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def draw_speed(left: float, top: float) -> list[str]:
    """A bar per run, in pairs."""
    runs = {line["name"]: line for line in read_lines("h200_adapters_side_by_side")}
    speed = {name: line["tokens_per_second_per_gpu"] for name, line in runs.items()}
    version = next(line["packages"]["unsloth"] for line in runs.values() if line["peer"] == "unsloth")
    parts = [
        text(left, top, "Speed beside Unsloth", "title"),
        text(left, top + 18, f"Llama 3.1 8B on one H200: tokens/s and peak memory. Unsloth {version}"),
    ]
    y, bars, longest = top + 34, left + 232, 170 / max(speed[ours] for _, ours, _ in SPEED)
    for label, ours, theirs in SPEED:
        parts.append(text(left, y + 12, label))
        if theirs:
            gain = speed[ours] / speed[theirs] - 1
            parts.append(text(left, y + 30, f"{abs(gain):.0%} {'faster' if gain > 0 else 'slower'}", "ours"))
        for name, who, bar, kind in ((ours, "Tunebook", "bar", "ours"), (theirs, "Unsloth", "peer", "")):
            if name:
                width = longest * speed[name]
                parts += [
                    text(bars - 8, y + 12, who, f"end {kind}"),
                    f'<rect class="{bar}" x="{bars}" y="{y}" width="{width:.1f}" height="15" rx="2"/>',
                    text(bars + width + 7, y + 12, f"{speed[name]:,.0f}", kind),
                    text(left + 536, y + 12, f"{peak_gib(runs[name]):.1f} GiB", f"end {kind}"),
                ]
                y += 18
        y += 10
    return parts


def draw_memory(left: float, top: float, size: float) -> list[str]:
    """Planned against measured memory on logarithmic axes."""
    pairs = planned_and_measured()
    low, high = math.floor(math.log2(_SMALLEST_GIB)), math.ceil(math.log2(max(map(max, pairs))))
    right, bottom = left + size, top + size

    def across(gib: float) -> float:
        return left + size * (math.log2(gib) - low) / (high - low)

    def up(gib: float) -> float:
        return bottom - (across(gib) - left)

    errors = [abs(planned / measured - 1) for planned, measured in pairs]
    inside = sum(error <= _BAND for error in errors) / len(errors)
    parts = [
        text(left, top - 34, "Memory planned and measured", "title"),
        text(left, top - 16, "Peak GiB of a GPU, on one to four H100 and H200"),
    ]
    for power in range(low, high + 1):
        at = 2.0**power
        parts.append(f'<path class="faint" d="M{across(at):.1f} {top}V{bottom}M{left} {up(at):.1f}H{right}"/>')
        parts.append(text(across(at), bottom + 16, f"{at:.0f}", "middle"))
        parts.append(text(left - 7, up(at) + 4, f"{at:.0f}", "end"))
    more, less = (size * abs(math.log2(1 + error)) / (high - low) for error in (_BAND, -_BAND))
    band = f"M{left} {bottom}h{more:.1f}L{right} {top + more:.1f}V{top}h-{less:.1f}L{left} {bottom - less:.1f}z"
    circles = (f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="2.5"/>' for x, y in sorted(pairs))
    parts += [
        f'<path class="band" d="{band}"/>',
        f'<path class="line" d="M{left} {bottom}L{right} {top}"/>',
        f'<g class="dots">{"".join(circles)}</g>',
        text(left + 8, top + 18, "took more than planned"),
        text(right - 8, bottom - 10, "took less than planned", "end"),
        text((left + right) / 2, bottom + 34, "planned", "middle"),
        f'<text class="middle" transform="translate({left - 32} {(top + bottom) / 2}) rotate(-90)">measured</text>',
        text(left, bottom + 62, f"Median error {median(errors):.1%}", "ours"),
        text(left, bottom + 80, f"{inside:.0%} of {len(pairs)} runs within {_BAND:.0%} (the band),"),
        text(left, bottom + 97, f"all planned before they ran, {_SMALLEST_GIB} GiB or more"),
    ]
    return parts


def draw_scores(left: float, top: float) -> list[str]:
    """A line per recipe from the score before to the score after."""
    rows = scores()
    runs = [count for *_, count in rows]
    start, length = left + 290, 190
    parts = [
        text(left, top, "Score before and after", "title"),
        text(left, top + 18, f"Held-out items, mean of {min(runs)} to {max(runs)} runs; SmolLM2-135M if none is named"),
    ]
    for number, (label, before, after, _) in enumerate(rows):
        y = top + 42 + 21 * number
        first, last = start + length * before, start + length * after
        parts += [
            text(left, y + 4, label),
            f'<path class="faint" d="M{start} {y}h{length}"/>',
            f'<path class="gain" d="M{first + 4.5:.1f} {y}H{last:.1f}"/>',
            f'<circle class="before" cx="{first:.1f}" cy="{y}" r="4.5"/>',
            f'<circle class="bar" cx="{last:.1f}" cy="{y}" r="5"/>',
            text(start - 14, y + 4, f"{before:.0%}", "end"),
            text(left + 536, y + 4, f"{after:.0%}", "end ours"),
        ]
    return parts


def draw() -> str:
    """The figure as a self-contained SVG: three panels."""
    title = "Speed beside Unsloth, memory planned and measured, and scores before and after training"
    parts = [f"<title>{title}</title>", f"<style>{_STYLE}</style>"]
    parts += draw_speed(10, 20) + draw_scores(10, 314) + draw_memory(606, 54, 300)
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n{body}\n</svg>\n'


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
