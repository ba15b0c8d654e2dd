"""Show evidence in the recipe's card (a table and a plot) and in the book's table of recipes, made from the files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tunebook.config.override_text import command_words, shell_command
from tunebook.evidence.schema import Evidence, Kind, read_evidence
from tunebook.evidence.target import describe_target, recorded_text
from tunebook.evidence.tolerances import LOSS, SPEED
from tunebook.facts.methods import recorded_method
from tunebook.files import atomic_write_text
from tunebook.record.page.charts import SMOOTH_FROM, Chart, Line, Point, outlier_ceiling, smooth

BEGIN, END = "<!-- made from evidence/*.json when some is recorded -->", "<!-- end of evidence -->"
_HEADING = re.compile(r"^## Evidence\n+", re.MULTILINE)
# A picture in a card cannot use a page's style sheet. Both colors are readable on white and on black.
_STYLE = """<style>
text{font:12px sans-serif;fill:#808080}.rule{stroke:#808080;opacity:.25}.base{stroke:#808080;opacity:.7}
.tick{text-anchor:end}.x-tick{text-anchor:middle}.end{text-anchor:end}path{fill:none;stroke:#2f7fb8;stroke-width:2}
path.faint{stroke-width:1;opacity:.4}path.arrow{display:none}.cursor{display:none}
</style>"""


def update_card(card: Path, files: Sequence[Path]) -> None:
    """Write the plot of each file and the card's section."""
    recorded = [(file, read_evidence(file)) for file in files]
    for file, evidence in recorded:
        atomic_write_text(plot_file(file), draw(evidence))
    atomic_write_text(card, with_section(card, section(recorded)))


def with_section(card: Path, made: str) -> str:
    """The card's text with this section between its markers. The first time they and a missing heading are added."""
    text = card.read_text(encoding="utf-8") if card.is_file() else f"# {card.parent.name}\n"
    if BEGIN in text and END in text:
        before, rest = text.split(BEGIN, 1)
        return f"{before}{made}{rest.split(END, 1)[1]}"
    heading = _HEADING.search(text)
    if heading is None:
        return f"{text}\n## Evidence\n\n{made}\n"
    rest = text[heading.end() :].removeprefix("None recorded yet.\n")
    return f"{text[: heading.end()]}{made}\n{rest}"


def section(recorded: Sequence[tuple[Path, Evidence]]) -> str:
    """A table with one row per file, the strongest kind of evidence first, its plot, and what to type, folded."""
    recorded = sorted(recorded, key=lambda entry: list(Kind).index(entry[1].kind))
    columns = ["evidence", "what was run", "final loss (best validation)", "tokens/s/GPU", "GiB (planned)", "score",
               "loss may differ by"]  # fmt: skip
    if has_target := any(evidence.target is not None for _, evidence in recorded):
        columns.append("target")
    lines = [
        BEGIN, "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}",
        *(_row(file, evidence, has_target=has_target) for file, evidence in recorded), "",
        *(f"![loss of {file.stem}](evidence/{plot_file(file).name})" for file, _ in recorded[:1]), "",
        "<details>", "<summary>The commands, and the packages that they ran with</summary>", "",
        *(line for file, evidence in recorded for line in _repetition(file, evidence)),
        "</details>", "",
        END,
    ]  # fmt: skip
    return "\n".join(lines)


def _row(file: Path, evidence: Evidence, *, has_target: bool) -> str:
    ran, results, hardware = evidence.ran, evidence.results, evidence.hardware
    description = f"{evidence.kind}: {ran.weights} weights, {ran.data} data, layers: {ran.layers}, {ran.steps} steps"
    description += f"; {hardware.gpus} x {hardware.gpu or 'CPU'}, {len(evidence.repeats)} runs, {evidence.recorded}"
    scores = ", ".join(f"{task} {score.value:.3f}" for task, score in results.scores.items())
    cells = [
        f"[{file.stem}](evidence/{file.name}) ([loss](evidence/{plot_file(file).name}))", description,
        _with_other(results.losses[-1], results.validation_loss, ".4f"), _speed_text(evidence),
        _with_other(results.memory_gib, results.planned_memory_gib, ".2f"), scores or "-",
        f"{evidence.tolerances[LOSS].value:.2g}",
    ]  # fmt: skip
    if has_target:
        target = evidence.target
        cells.append("-" if target is None else f"{describe_target(target)}: {recorded_text(evidence.repeats)}")
    return f"| {' | '.join(cells)} |"


def _with_other(value: float | None, other: float | None, digits: str) -> str:
    """`1.23 (4.56)`, without what is unknown."""
    return "-" if value is None else f"{value:{digits}}" + (f" ({other:{digits}})" if other is not None else "")


def _speed_text(evidence: Evidence) -> str:
    """The first run's speed, or the range of the repetitions if it is not judged."""
    if SPEED in evidence.tolerances:
        return f"{evidence.repeats[0].tokens_per_second_per_gpu:,.0f}"
    speeds = (repeat.tokens_per_second_per_gpu for repeat in evidence.repeats)
    known = [speed for speed in speeds if speed is not None]
    return f"{min(known):,.0f} to {max(known):,.0f}, not judged" if known else "-"


def _repetition(file: Path, evidence: Evidence) -> list[str]:
    """What a file was recorded with: its packages, and the command."""
    packages = evidence.software.deviation()
    if packages is None:
        packages = "every package was the lock's"
        if evidence.software.image_digest is not None:
            packages += f", in the image `{evidence.software.image_digest}`"
    command = shell_command(command_words("train", evidence.ran.recipe, evidence.ran.overrides))
    return [f"{file.stem}: {packages}", "", "```bash", command, "```", ""]


def plot_file(file: Path) -> Path:
    """The picture of an evidence file."""
    return file.with_suffix(".svg")


def draw(evidence: Evidence) -> str:
    """The loss per step, and its mean if there are many steps, as a self-contained SVG."""
    points: list[Point] = list(zip(map(float, evidence.results.steps), evidence.results.losses, strict=True))
    lines = [Line(name="loss", points=points)]
    if len(points) >= SMOOTH_FROM:
        smoothed, _ = smooth(points)
        lines = [Line(name="each step", points=points, stroke="faint"), Line(name="mean", points=smoothed)]
    ceiling = outlier_ceiling(evidence.results.losses)
    label = recorded_method(evidence.inputs.config).loss_label
    text = str(Chart(title="Loss", y_label=label, lines=lines, ceiling=ceiling).draw(720, 280))
    text = re.sub(r' data-chart="[^"]*"', "", text, count=1)  # values under the pointer: a picture runs no script
    opening, rest = text.split(">", 1)
    return f'{opening} xmlns="http://www.w3.org/2000/svg" width="720" height="280">{_STYLE}{rest}\n'


def update_overview(page: Path, card: Path, files: Sequence[Path]) -> None:
    """Rewrite the last two cells of the row of a card's recipe in a table of recipes, if the page has one."""
    lines = page.read_text(encoding="utf-8").splitlines() if page.is_file() else []
    link = card.relative_to(page.parent).as_posix()
    for number, line in enumerate(lines):
        if line.startswith(row_start(link)):
            kept = "|".join(line.removesuffix("|").split("|")[:-2])
            lines[number] = f"{kept}| {cells(link, list(map(read_evidence, files)))} |"
            atomic_write_text(page, "\n".join(lines) + "\n")


def row_start(link: str) -> str:
    """The start of a recipe's row, by the link to its card."""
    return f"| [{Path(link).parent.name}]({link}) |"


def cells(link: str, evidence: Sequence[Evidence]) -> str:
    """Return two cells: the number of files of each kind, the strongest first, and the best score.

    A score counts if its model was trained on real data. The best is the highest of the strongest kind.
    """
    counts = Counter(entry.kind for entry in evidence)
    numbers = ", ".join(f"{counts[kind]} {kind.removesuffix(' evidence')}" for kind in Kind if counts[kind])
    scores = [
        (-list(Kind).index(entry.kind), score.value, task)
        for entry in evidence
        if entry.kind is not Kind.machinery
        for task, score in list(entry.results.scores.items())[:1]  # the first is the recipe's main task
    ]
    best = max(scores, default=None)
    return f"[{numbers}]({link}#evidence) | {f'{best[2]} {best[1]:.3f}' if best else '-'}"


def listed(files: Sequence[Path]) -> str:
    """Return the names of a recipe's evidence by kind, for a terminal; `none yet` without any."""
    kinds = {file.stem: read_evidence(file).kind for file in files}
    by_kind = ((kind, [name for name, its in kinds.items() if its is kind]) for kind in Kind)
    return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in by_kind if names) or "none yet"
