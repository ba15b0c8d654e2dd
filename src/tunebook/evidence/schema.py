"""Evidence files: their content, one type per section that also validates it, their paths, reading and writing.

The files are `recipes/<name>/evidence/<hardware>-<gpus>-<label>.json`. Unknown keys, missing keys and numbers that are
not finite are refused when a file is written and when it is read. Keys with a default are missing in older files.
"""

from __future__ import annotations

import json
import re
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tunebook.config.book import recipe_file
from tunebook.errors import DataError, RequestError
from tunebook.files import atomic_write_text, read_json, sha256_text
from tunebook.record.locks import describe_differences

_NOT_COMPARED = "packages not compared with a lock"
_NUMBERS = re.compile(r"\[\s*-?\d[^\[\]\"{}]*\]")  # a curve has hundreds of numbers: one line keeps diffs readable
FORMAT = 1  # increment it when a key changes its meaning or is removed


class Section(BaseModel):
    """A section without unknown keys and without infinite numbers."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)


class Kind(StrEnum):
    """What evidence supports, the strongest first. Every table and report shows this name."""

    real = "real evidence"
    from_scratch = "from-scratch evidence"
    machinery = "machinery evidence"


class RunDescription(Section):
    """What was run. It comes first, so that a run of some layers is not mistaken for the full model."""

    recipe: str
    title: str
    weights: Literal["pretrained", "random"]
    data: Literal["real", "generated"]
    layers: str  # `all 36`, or `12 of 36`
    steps: int = Field(ge=1)  # optimizer steps
    overrides: list[str]  # of the recipe, without those for the location of results


class Hardware(Section):
    """The machine that ran it."""

    generation: str
    gpu: str | None  # the GPUs' name; None on a CPU
    gpus: int = Field(ge=1)  # GPUs or ranks of all nodes together
    nodes: int = Field(ge=1)
    memory_gib: float | None  # of each GPU, or of the machine on a CPU
    driver: str | None
    nccl: str | None
    cpus: int = Field(ge=1)  # of the machine that started it


class Inputs(Section):
    """Everything except the code that determines the result; equal in all compared runs."""

    config: dict[str, Any]  # run.yaml without keys that change no result; the book's paths start with book:
    seed: int
    model_sha256: str | None  # of the model's config.json
    model_revision: str | None
    weights_fingerprint: str | None = None  # of pretrained weights in a local folder
    tokenizer_sha256: str | None
    chat_template_sha256: str | None
    data_sha256: str | None  # of the prepared tokens and labels
    data_fingerprint: str | None = None  # of what the data was prepared from: sources, code, libraries; not judged


class PackageDifference(Section):
    """A package whose installed version differs from the lock's; null if it is missing on that side."""

    installed: str | None
    locked: str | None


class Lock(Section):
    """The lock of the hardware generation, and the differences of the installed packages from it."""

    name: str  # its folder in docker/
    sha256: str | None  # of requirements.lock
    differences: dict[str, PackageDifference]  # by package, of those that can change loss, speed or memory
    num_other_differences: int | None = Field(ge=0)  # of all other packages; None if unknown
    num_unknown: int = Field(default=0, ge=0)  # packages of the lock without a recorded version


class Software(Section):
    """The code and packages that ran."""

    git_commit: str
    lock_sha256: str | None  # of the lock, if no package differs from it
    lock: Lock | None = None  # None if packages and lock were not compared
    image_digest: str | None  # of the published image, or the id of one that was built here
    python: str
    packages: dict[str, str]

    def deviation(self) -> str | None:
        """Describe the packages' differences from the lock; None if there are none."""
        if self.lock is None:
            return _NOT_COMPARED
        parts = describe_differences({name: versions.model_dump() for name, versions in self.lock.differences.items()})
        if self.lock.num_other_differences:
            parts.append(f"other packages that differ: {self.lock.num_other_differences}")
        if self.lock.num_unknown:
            parts.append(f"packages of the lock with no recorded version: {self.lock.num_unknown}")
        return ", ".join(parts) or None


class Score(Section):
    """One task of the evaluation after the training."""

    metric: str
    value: float
    stderr: float | None
    num_items: int
    items_sha256: str | None = None  # of the items in their order; None in older evidence
    contamination: dict[str, int | float | None] | None = None  # counts of items, and the score on the clean ones


class Results(Section):
    """The measured results."""

    steps: list[int] = Field(min_length=1)  # optimizer steps whose loss was logged
    losses: list[float] = Field(min_length=1)  # at these steps: per trained token, or per pair
    tokens_per_second_per_gpu: float | None  # real tokens, median after warming up
    memory_gib: float | None  # peak of the rank with the highest peak
    planned_memory_gib: float | None  # the plan's estimate
    validation_loss: float | None = None  # the best; None without a validation part, and in older files
    scores: dict[str, Score]  # by task; the method's own by the name of its metric


class Tolerance(Section):
    """The allowed difference of another run's number, and how it was computed."""

    value: float = Field(ge=0)
    kind: Literal["relative", "absolute"]
    how: str
    windows: list[float] = []  # of each window of a loss curve; none in older files: the value is that of all


class Target(Section):
    """A value that every run must reach."""

    metric: str  # loss, validation_loss, or the metric of a task
    task: str | None  # of the evaluation after the training; None for a loss
    value: float
    direction: Literal["at_most", "at_least"]
    max_steps: int | None = Field(ge=1)  # optimizer steps to reach it in; None: by the end of the training


class Repeat(Section):
    """One of the runs behind the evidence; the results are those of the first."""

    run: str  # <recipe>/<time>
    started: str
    final_loss: float
    tokens_per_second_per_gpu: float | None
    steps_to_target: int | None = Field(default=None, ge=0)  # optimizer steps; None without a target
    time_to_target_s: float | None = Field(default=None, ge=0)  # of optimizer steps with their data loading


class Evidence(Section):
    """A recorded claim."""

    format: int = Field(ge=FORMAT, le=FORMAT)
    ran: RunDescription
    hardware: Hardware
    label: str
    recorded: str  # date, UTC
    repeats: list[Repeat] = Field(min_length=2)
    results: Results
    target: Target | None = None  # None if none was stated
    tolerances: dict[str, Tolerance]  # by number: loss, speed, memory, score:<task>
    inputs: Inputs
    software: Software
    content_sha256: str  # of all other keys, as canonical JSON

    @property
    def kind(self) -> Kind:
        """What this evidence supports.

        Real evidence trains all layers of pretrained weights on real data, as a user would. Random weights, generated
        data or a slice of the layers prove that the machinery works (speed, memory, equal losses), but not that a
        model learns. The exception is a whole model trained from random weights on real data with a score on held-out
        items, as the quickstart: it shows learning from scratch, though not fine-tuning of a pretrained model.
        """
        ran = self.ran
        if ran.data != "real" or not ran.layers.startswith("all"):
            return Kind.machinery
        if ran.weights == "pretrained":
            return Kind.real
        return Kind.from_scratch if self.results.scores else Kind.machinery


def evidence_folder(recipe: str, recipes_dirs: list[Path]) -> Path:
    """The folder of a recipe's evidence. Raises: RequestError for an unknown recipe."""
    return recipe_file(recipe, recipes_dirs).with_suffix("") / "evidence"


def evidence_files(recipe: str, recipes_dirs: list[Path]) -> list[Path]:
    """All of a recipe's evidence, by name."""
    return sorted(evidence_folder(recipe, recipes_dirs).glob("*.json"))


def read_evidence(file: Path) -> Evidence:
    """Read one file. Raises: DataError if it is missing, of another form or format, or was edited."""
    if not file.is_file():
        raise DataError(f"{file} does not exist; tunebook list shows what is recorded", problem_id="evidence-broken")
    content, problem = read_json(file), None
    try:
        evidence = Evidence.model_validate(content)
        if evidence.content_sha256 != content_hash(content):
            problem = "it was changed after it was written: its hash does not match its content"
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{'.'.join(map(str, first['loc'])) or 'all of it'}: {first['msg']}"
    if problem is not None:
        raise DataError(
            f"{file}: {problem}; restore the file from git, or remove it and record two runs again with: "
            "tunebook verify RUN RUN --record --label NAME",
            problem_id="evidence-broken",
        )
    return evidence


def write_evidence(evidence: Evidence, folder: Path) -> Path:
    """Write new evidence into the folder, with its hash. Raises: RequestError if its file exists."""
    hardware = evidence.hardware
    file = folder / f"{hardware.generation}-{hardware.gpus}-{evidence.label}.json"
    if file.exists():
        raise RequestError(
            f"{file} exists; remove it if this replaces it, or choose another --label", problem_id="evidence-exists"
        )
    folder.mkdir(parents=True, exist_ok=True)
    content = evidence.model_dump(mode="json")
    content["content_sha256"] = content_hash(content)
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    atomic_write_text(file, _NUMBERS.sub(_on_one_line, text) + "\n")
    return file


def _on_one_line(numbers: re.Match[str]) -> str:
    return re.sub(r"\s+", " ", numbers[0]).replace("[ ", "[").replace(" ]", "]")


def content_hash(content: dict[str, Any]) -> str:
    """The SHA-256 of everything but the hash itself."""
    rest = {key: value for key, value in content.items() if key != "content_sha256"}
    return sha256_text(json.dumps(rest, sort_keys=True, ensure_ascii=False, allow_nan=False))
