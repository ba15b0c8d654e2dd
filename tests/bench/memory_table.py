"""What the memory plan says of runs that were measured on GPUs: the table of predicted and measured peaks.

    python tests/bench/memory_table.py [RESULTS.jsonl]
    python tests/bench/memory_table.py --architectures [KIND ...]
    python tests/bench/memory_table.py --held-out

The layers of models that are not in the book are not traced again: `architectures/` has their traces, in the modes that
the runs had. `python -m tunebook.plan.architecture.measure CONFIG_FILE architectures/NAME.json` traces a new one.

Each line of the results is planned again from its own overrides by today's code, so the table says what the plan is
worth now; a test holds it to its bounds. Other architectures are planned from their config.json, as a user's own model
is, and so are some that were drawn at random (`gpu_draw.py`) and planned before they were run (`planned_then_gib`).
`resolved` in a line is what `auto` decided then: no flash-attn was installed there, and a frozen base was kept in fp32.
Peaks are of tensors, of the rank with the highest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from gpu_draw import words_of
from gpu_models import config_of, write_case_model

from tunebook.config.compose import compose
from tunebook.config.model_facts import ModelFacts, facts_from_json
from tunebook.hardware.detect import Machine
from tunebook.plan.architecture import base_model
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.plan.memory import estimate_memory

RESULTS = Path(__file__).parent / "results" / "h200_memory.jsonl"
ARCHITECTURES = RESULTS.parent / "h200x2_architectures.jsonl"
QUANTIZED = RESULTS.parent / "h200_quantised.jsonl"
TRACES = RESULTS.parent.parent / "architectures"
_OF_CHANCE = ("h200x2_held_out.jsonl", "h100_held_out.jsonl", "h100x2_held_out.jsonl")
HELD_OUT = [RESULTS.parent / name for name in _OF_CHANCE]
_H200 = ["hardware=hopper", "hardware.memory_gib=140.4"]
# What was so when the runs were made, where their words do not say: blocks were compiled where that was asked for only,
# the head's logits were computed twice, and a recipe asked for Liger's kernels.
_THEN = {"model.compile_layers": "false", "model.one_pass_head": "false", "precision.master_weights": "fp32"}
_RECIPES_THEN = {"qwen3b_zero2": {"model.liger_kernel": "true"}}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One run, in GiB."""

    name: str
    predicted: float  # peak of allocated memory
    measured: float
    reserved: float  # what torch's allocator held at most

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured; positive where it is too high."""
        return self.predicted / self.measured - 1


def as_it_was_run(line: dict[str, Any]) -> list[str]:
    """The words of a recorded run, with what has become another default since."""
    words: list[str] = [*line["overrides"], *line["resolved"]]
    said = {word.partition("=")[0] for word in words}
    then = _THEN | _RECIPES_THEN.get(line["recipe"], {})
    return [*words, *(f"{key}={value}" for key, value in then.items() if key not in said)]


def recorded_trace(config_file: Path, **_: bool) -> ModelFacts:
    """The trace of a model by the name of its folder, or by its kind."""
    name = config_file.parent.name
    file = next(file for file in TRACES.glob("*.json") if file.stem == name or file.stem.endswith(f"-{name}"))
    return facts_from_json(json.loads(file.read_text(encoding="utf-8")))


def read_measured(file: Path = RESULTS) -> list[Measured]:
    """Every run of a file of results, with what the plan says of it."""
    found = []
    for text in file.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        found.append(
            Measured(
                name=line["name"],
                predicted=_predicted(line["recipe"], as_it_was_run(line), accumulates=line["accumulation"] > 1),
                measured=max(line["allocated_gib"]),
                reserved=max(line["reserved_gib"]),
            )
        )
    return found


def read_architectures(folder: Path, kinds: Collection[str] = ()) -> list[Measured]:
    """The runs of models of many architectures, or of some kinds of them; their config.json are written to `folder`."""
    found = []
    for line in map(json.loads, ARCHITECTURES.read_text(encoding="utf-8").splitlines()):
        if "memory_gib" not in line or (kinds and line["kind"] not in kinds):
            continue
        model = folder / line["kind"]
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps(config_of(line["kind"])), encoding="utf-8")
        words = [*line["overrides"], *line.get("resolved", ()), f"model.path={model}"]
        predicted = _predicted(None, words, accumulates=False)
        peaks = {"measured": max(line["memory_gib"]), "reserved": max(line["memory_reserved_gib"])}
        found.append(Measured(name=line["name"], predicted=predicted, **peaks))
    return found


def read_quantized(folder: Path) -> list[Measured]:
    """The runs of QLoRA, whose models are read from a folder below `folder`."""
    found = []
    for line in map(json.loads, QUANTIZED.read_text(encoding="utf-8").splitlines()):
        words = [*line["overrides"], *line.get("resolved", ()), *write_case_model(line, folder)]
        predicted = _predicted("quickstart", words, accumulates=False)
        peaks = {"measured": max(line["memory_gib"]), "reserved": max(line["memory_reserved_gib"])}
        found.append(Measured(name=line["name"], predicted=predicted, **peaks))
    return found


def held_out_lines() -> list[dict[str, Any]]:
    """The recorded lines of the runs that chance drew, and of those that were looked at since."""
    return [json.loads(text) for file in HELD_OUT for text in file.read_text(encoding="utf-8").splitlines()]


def read_held_out(folder: Path, *, of_the_book: bool = False) -> list[Measured]:
    """Those runs as they are planned today; of the book's own models only, if so asked."""
    found = []
    for line in held_out_lines():
        if of_the_book and "sizes" in line:
            continue
        found.append(planned_again(line, folder))
    return found


def planned_again(line: dict[str, Any], folder: Path) -> Measured:
    """A recorded run of a drawn or a named model, as it is planned today."""
    named = words_of(line | {"layers": line.get("layers")}, folder) if "model" in line else line["overrides"]
    words, accumulates = [*named, *line.get("resolved", ())], line.get("accumulation", 1) > 1
    peaks = {"measured": max(line["memory_gib"]), "reserved": max(line["memory_reserved_gib"])}
    return Measured(name=line["name"], predicted=_predicted(None, words, accumulates=accumulates), **peaks)


def _predicted(recipe: str | None, words: list[str], *, accumulates: bool) -> float:
    """What today's plan says of the peak, on an H200 where the words name no size, in GiB."""
    nobody = Machine(gpus=[], driver=None, num_cpus=32, host_memory_gib=256.0)
    last = {word.partition("=")[0]: word for word in [*_H200, *words]}
    with mock.patch.object(base_model, "trace_file", recorded_trace):
        config = resolve_auto(compose(recipe, [*last.values()]).config, nobody).config
    assert config.model.facts is not None
    return estimate_memory(config, config.model.facts, accumulates=accumulates).total_gib


def main() -> None:
    """Parse the arguments and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS)
    parser.add_argument("--architectures", nargs="*", metavar="KIND", help="those that were run, or some kinds")
    parser.add_argument("--held-out", action="store_true", help="those that chance drew")
    arguments = parser.parse_args()
    if arguments.held_out:
        with tempfile.TemporaryDirectory() as folder:
            runs = read_held_out(Path(folder))
    elif arguments.architectures is None:
        runs = read_measured(arguments.results)
    else:
        with tempfile.TemporaryDirectory() as folder:
            runs = read_architectures(Path(folder), arguments.architectures)
    for run in runs:
        print(f"{run.name:46} {run.predicted:7.2f} {run.measured:7.2f} {run.error:+7.1%}  reserved {run.reserved:7.2f}")
    errors, typical = [run.error for run in runs], statistics.median(abs(run.error) for run in runs)
    print(f"{len(runs)} runs: median error {typical:.1%}, from {min(errors):+.1%} to {max(errors):+.1%}")


if __name__ == "__main__":
    main()
