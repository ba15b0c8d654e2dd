"""The book's table of recipes says of each what is recorded of it: the last column, made from the evidence files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tunebook.evidence.files import read_evidence
from tunebook.evidence.schema import Evidence
from tunebook.files import atomic_write_text


def update_overview(readme: Path, recipe: str, files: Sequence[Path]) -> bool:
    """Write the recipe's last cell anew; false where the book has no such table, or none of the recipe's in it."""
    if not files or not readme.is_file():
        return False
    text = readme.read_text(encoding="utf-8")
    lines = text.splitlines()
    rows = [number for number, line in enumerate(lines) if line.startswith(row_start(recipe))]
    if not rows:
        return False
    cells = lines[rows[0]].removesuffix("|").split("|")[:-1]
    made = cell(recipe, files, [read_evidence(file) for file in files])
    lines[rows[0]] = f"{'|'.join(cells)}| {made} |"
    atomic_write_text(readme, "\n".join(lines) + "\n")
    return True


def row_start(recipe: str) -> str:
    """How a recipe's row begins."""
    return f"| [{recipe}](recipes/{recipe}/README.md) |"


def cell(recipe: str, files: Sequence[Path], evidence: Sequence[Evidence]) -> str:
    """A link per file, named by its hardware and what GPUs computed in, what it was run with, and by which packages."""
    told = []
    deviations = [found.software.main_deviation() for found in evidence]
    is_shared = len(evidence) > 1 and len(set(deviations)) == 1
    for file, found, name, deviation in zip(files, evidence, _names(evidence), deviations, strict=True):
        ran = found.ran
        layers = "" if ran.layers.startswith("all") else f", {ran.layers} layers"
        packages = "" if deviation is None or is_shared else f"; {deviation}"
        told.append(f"[{name}](recipes/{recipe}/evidence/{file.name}) ({ran.weights} weights{layers}{packages})")
    shared = f"; all with {deviations[0]}" if is_shared and deviations[0] is not None else ""
    return ", ".join(told) + shared


def _names(evidence: Sequence[Evidence]) -> list[str]:
    """Of each file one, with what else tells those apart that are called the same: their labels always do."""
    names = [_name(found) for found in evidence]
    for more in (
        [found.inputs.config["attention"]["implementation"] for found in evidence],
        [f"{found.ran.steps} steps" for found in evidence],
        [found.label for found in evidence],
    ):
        told: dict[str, set[str]] = {}
        for name, word in zip(names, more, strict=True):
            told.setdefault(name, set()).add(word)
        names = [f"{name}, {word}" if len(told[name]) > 1 else name for name, word in zip(names, more, strict=True)]
    return names


def _name(found: Evidence) -> str:
    """GPUs and their kind, what they compute in, and whether the same run gives the same bits."""
    hardware, config = found.hardware, found.inputs.config
    name = f"{hardware.gpus} x {(hardware.gpu or 'CPU').removeprefix('NVIDIA ')}"
    if hardware.gpu is not None:
        name += f", {config['precision']['compute']}"
    return f"{name}, deterministic" if config["training"].get("deterministic") else name
