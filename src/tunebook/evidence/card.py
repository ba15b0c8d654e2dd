"""A recipe's card shows its evidence as a table and a plot, both made from the files; a test holds them together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tunebook.errors import RequestError
from tunebook.evidence.files import read_evidence
from tunebook.evidence.schema import Evidence
from tunebook.evidence.tolerances import LOSS, speeds_apart
from tunebook.files import atomic_write_text
from tunebook.record.page.charts import Chart, Line, Stroke
from tunebook.record.page.curves import outlier_ceiling, smooth

BEGIN, END = "<!-- made from evidence/*.json when some is recorded -->", "<!-- end of evidence -->"
_HEADING = re.compile(r"^## Evidence\n+", re.MULTILINE)
_SMOOTH_FROM = 30
# A picture in a card has no page around it that could bring a style; both colours are readable on white and on black.
_STYLE = """<style>
text{font:12px sans-serif;fill:#808080}.rule{stroke:#808080;opacity:.25}.base{stroke:#808080;opacity:.7}
.tick{text-anchor:end}.x-tick{text-anchor:middle}.end{text-anchor:end}path{fill:none;stroke:#2f7fb8;stroke-width:2}
path.faint{stroke-width:1;opacity:.4}path.arrow{display:none}.cursor{display:none}
</style>"""


def update_card(card: Path, files: Sequence[Path]) -> None:
    """Draw each file beside it and write the card's section anew. Raises: RequestError for a card without one."""
    evidence = [read_evidence(file) for file in files]
    for file, found in zip(files, evidence, strict=True):
        atomic_write_text(plot_file(file), draw(found))
    atomic_write_text(card, with_section(_read_card(card), section(files, evidence), card))


def require_room(card: Path, files: Sequence[Path]) -> None:
    """Whether more evidence can be shown beside these files, asked before any is written.

    Raises: RequestError for a card that cannot show it, DataError for a file that is damaged.
    """
    for file in files:
        read_evidence(file)
    with_section(_read_card(card), "", card)


def _read_card(card: Path) -> str:
    try:
        return card.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(
            f"{card} cannot be read ({error.strerror}); a recipe's card shows its evidence, so write one first",
            problem_id="evidence-card",
        ) from error


def with_section(text: str, made: str, card: Path) -> str:
    """The card with this section between its marks, which are set below the heading the first time."""
    if BEGIN in text and END in text:
        before, rest = text.split(BEGIN, 1)
        return f"{before}{made}{rest.split(END, 1)[1]}"
    heading = _HEADING.search(text)
    if heading is None:
        raise RequestError(f"{card} has no heading '## Evidence' to show it under; add one", problem_id="evidence-card")
    rest = text[heading.end() :].removeprefix("None recorded yet.\n")
    return f"{text[: heading.end()]}{made}\n{rest}"


def section(files: Sequence[Path], evidence: Sequence[Evidence]) -> str:
    """A table with a line per file, and the plots."""
    lines = [
        BEGIN, "",
        "| evidence | what was run | final loss | tokens/s/GPU | GiB | score | loss may differ by |",
        "|---|---|---|---|---|---|---|",
        *(_row(file, found) for file, found in zip(files, evidence, strict=True)), "",
        *_packages(files, evidence),
        *(f"![loss of {file.stem}](evidence/{plot_file(file).name})" for file in files), "",
        END,
    ]  # fmt: skip
    return "\n".join(lines)


def _packages(files: Sequence[Path], evidence: Sequence[Evidence]) -> list[str]:
    """A paragraph for files that were not recorded with the packages of their lock; none where all were."""
    by_deviation: dict[str, list[str]] = {}
    for file, found in zip(files, evidence, strict=True):
        if (deviation := found.software.deviation()) is not None:
            by_deviation.setdefault(deviation, []).append(file.stem)
    if not by_deviation:
        return []
    lines = [f"- {', '.join(stems)}: {deviation}" for deviation, stems in by_deviation.items()]
    return [
        "Packages that differ from the lock, or are not known to agree with it:",
        "",
        *lines,
        "",
    ]


def _row(file: Path, found: Evidence) -> str:
    ran, results, hardware = found.ran, found.results, found.hardware
    what = f"{ran.weights} weights, {ran.data} data, layers: {ran.layers}, {ran.steps} steps"
    if ran.overrides:
        what += f", `{' '.join(ran.overrides)}`"
    what += f"; {hardware.gpus} x {hardware.gpu or 'CPU'}, {len(found.repeats)} runs, {found.recorded}"
    scores = ", ".join(f"{task} {score.value:.3f}" for task, score in results.scores.items())
    memory = results.memory_gib
    cells = [
        f"[{file.stem}](evidence/{file.name})", what, f"{results.losses[-1]:.4f}",
        _speed(found), "-" if memory is None else f"{memory:.2f}", scores or "-",
        f"{found.tolerances[LOSS].value:.2g}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _speed(found: Evidence) -> str:
    """The first run's speed, or all that lies between the repetitions where they do not confirm it."""
    if (apart := speeds_apart(found)) is not None:
        return f"{apart[0]:,.0f} to {apart[1]:,.0f}, not judged"
    speed = found.results.tokens_per_second_per_gpu
    return "-" if speed is None else f"{speed:,.0f}"


def plot_file(file: Path) -> Path:
    """The picture of an evidence file."""
    return file.with_suffix(".svg")


def draw(found: Evidence) -> str:
    """The loss per step as an SVG that stands alone."""
    points = [(float(step), loss) for step, loss in zip(found.results.steps, found.results.losses, strict=True)]
    raw = [(x, y) for x, y in points]
    lines = [Line(name="loss", points=list(raw))]
    if len(points) >= _SMOOTH_FROM:
        smoothed, _ = smooth(raw)
        lines = [Line(name="each step", points=list(raw), stroke=Stroke.faint), Line(name="mean", points=smoothed)]
    ceiling = outlier_ceiling(found.results.losses)
    chart = Chart(title="Loss", y_label="loss per trained token", lines=lines, ceiling=ceiling)
    text = str(chart.draw(720, 280))
    text = re.sub(r' data-chart="[^"]*"', "", text, count=1)  # values under a pointer, which a picture has not
    opening, rest = text.split(">", 1)
    return f'{opening} xmlns="http://www.w3.org/2000/svg" width="720" height="280">{_STYLE}{rest}\n'
