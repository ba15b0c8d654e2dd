"""The content of a manifest: one type per section, used to check what is written and what is read.

Facts that are learnt during a run (`parallelism_found`, `leak_probe`, `slurm` and others) may be added at the
top level; the keys inside a section are fixed.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tunebook.record.manifest import RunState


class Section(BaseModel):
    """Closed: a key that is misspelt is an error where it is written, not a gap where it is read."""

    model_config = ConfigDict(extra="forbid")


class Status(Section):
    """The state of the run, or the end of an earlier attempt."""

    state: RunState
    exit_code: int | None
    reason: str | None  # one sentence; for every state but running, and finished at the last step
    started: str  # ISO 8601, UTC
    ended: str | None
    seconds: float | None
    step: int | None = None  # finished optimizer steps
    best_step: int | None = None  # of the weights in model/, if the best were loaded
    last_checkpoint: str | None = None


class Code(Section):
    """The commit, and a hash of later changes; `reason` says why one is null."""

    git_commit: str | None
    git_diff_sha256: str | None
    is_clean: bool | None
    reason: str | None


class PackageDifference(Section):
    """A package whose installed version differs from the lock's; null if it is missing on that side."""

    installed: str | None
    locked: str | None


class Lock(Section):
    """The lock of the hardware generation, and how the installed packages differ from it."""

    name: str  # its folder below docker/, or the generation of the image
    sha256: str | None  # of requirements.lock; null if the book has none
    differences: dict[str, PackageDifference] | None  # by package, or `python`; null: not compared
    reason: str | None  # why nothing was compared


class Environment(Section):
    """The installed packages and the environment variables of libraries."""

    image_digest: str | None  # of the published image; its id if it was built here and make ran it
    image: dict[str, Any] | None
    lock_sha256: str | None  # null if a package differs from the lock
    lock: Lock
    installed_sha256: str
    python: str
    packages: dict[str, str]  # versions of those that can change a loss or a speed
    variables: dict[str, str]  # for NCCL, torch's allocator and the like


class Model(Section):
    """The base model."""

    name: str
    revision: str | None
    config_sha256: str | None  # of config.json, if the model is a folder
    weights: Literal["pretrained", "random"]
    weights_fingerprint: str | None  # of pretrained weights in a folder: the SHA-256 of the files


class Dataset(Section):
    """The prepared data."""

    records: list[dict[str, Any]]  # one per source
    fingerprint: str  # of everything that could change a token: sources, code, libraries
    content_sha256: str | None = None  # of the tokens and labels
    counts: dict[str, dict[str, Any]] = Field(default_factory=dict)  # by part: train, validation


class Gpu(Section):
    """One GPU of the machine."""

    name: str
    memory_gib: float
    generation: str


class Hardware(Section):
    """The machine that started the run."""

    gpus: list[Gpu]
    driver: str | None
    nccl: str | None
    topology: str | None  # connections of the GPUs, by NVML
    cpus: int = Field(ge=1)
    memory_gib: float
    host: str  # tells machines apart without naming them


class StartUp(Section):
    """The time to the first optimizer step in seconds, by phases in their order; each ends where the next begins."""

    launched: str | None  # ISO 8601, UTC: when the ranks were started
    launcher: dict[str, float]
    rank: dict[str, float]  # of rank 0; empty before its first step has ended
    first_step_s: float | None  # the sum of all phases


class File(Section):
    """A file as it was written."""

    size: int = Field(ge=0)  # bytes
    sha256: str


class Manifest(BaseModel):
    """`manifest.json` of a run folder."""

    model_config = ConfigDict(extra="allow")

    format: Literal[1]
    recipe: str | None
    title: str
    status: Status
    earlier_attempts: list[Status]
    code: Code
    environment: Environment
    config_sha256: str
    model: Model
    tokenizer_sha256: str | None
    chat_template_sha256: str | None
    template_date: str | None = None  # that the chat template writes as today's date
    system_prompt_sha256: str
    dataset: Dataset | None
    hardware: Hardware
    world_size: int = Field(ge=1)
    seed: int
    command: list[str]  # trains the same again
    start_up: StartUp | None = None
    model_files: dict[str, File] | None = None  # of model/, by their paths in it
    wandb_run_id: str | None = None  # the same for all attempts
    files_sha256: dict[str, str] | None = None  # of the results, by name, when the run ended
