"""All evidence of the book as one page: what was run, the numbers, the loss, and the command that runs it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tunebook.errors import RequestError
from tunebook.evidence.card import command_of, loss_chart, speed_text
from tunebook.evidence.files import read_evidence
from tunebook.evidence.schema import Evidence, Kind
from tunebook.record.report import render_page, save_page

PAGE_FILE = "index.html"
_MEANINGS = {
    Kind.real: "Pretrained weights, all layers, real data.",
    Kind.from_scratch: "Random weights trained on real data until a score can be measured.",
    Kind.machinery: "Random weights or generated data. Proves speed, memory and equal losses, but no learning.",
}


def write_gallery(recipes: Mapping[str, Sequence[Path]], folder: Path) -> Path:
    """Write the page of the evidence files of recipes into a folder, which is made; returns the page.

    Raises: RequestError if there is no evidence or the page cannot be written, DataError for a damaged file,
    DoesNotFitError if the disk is full.
    """
    recorded = [(recipe, read_evidence(file)) for recipe, files in recipes.items() for file in files]
    if not recorded:
        raise RequestError(
            "no recipe here has evidence to show; record some (tunebook verify RUN RUN --record --label NAME)",
            problem_id="gallery-empty",
        )
    shown = [(kind, [(recipe, found) for recipe, found in recorded if found.kind is kind]) for kind in Kind]
    page = render_page(
        "gallery.html.jinja",
        beside=Path(__file__).parent,
        kinds=[(kind.value, _MEANINGS[kind], group) for kind, group in shown if group],
        num_files=len(recorded),
        num_recipes=len({recipe for recipe, _ in recorded}),
        loss_chart=loss_chart,
        facts=facts,
        command_of=command_of,
    )
    elsewhere = "a folder on another disk: tunebook gallery DIR"
    save_page(page, folder / PAGE_FILE, what="the gallery", elsewhere=elsewhere, makes_folder=True)
    return folder / PAGE_FILE


def facts(found: Evidence) -> list[tuple[str, str]]:
    """What is shown of one file, in the order of the page."""
    ran, results, hardware, deviation = found.ran, found.results, found.hardware, found.software.deviation()
    scores = [
        (task, f"{score.metric} {score.value:.3f}" + (f" ± {score.stderr:.3f}" if score.stderr is not None else ""))
        for task, score in results.scores.items()
    ]
    memory = [] if results.memory_gib is None else [("peak memory", f"{results.memory_gib:.2f} GiB")]
    return [
        *scores,
        ("hardware", f"{hardware.gpus} x {hardware.gpu or 'CPU rank'}"),
        ("layers", ran.layers),
        ("steps", f"{ran.steps:,}; {len(found.repeats)} runs"),
        ("tokens/s per GPU", speed_text(found)),
        *memory,
        ("packages", "those of the lock" if deviation is None else "not all those of the lock"),
        ("recorded", found.recorded),
    ]
