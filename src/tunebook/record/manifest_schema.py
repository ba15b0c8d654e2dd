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
    """How the run stands, or an attempt before it stood."""

    state: RunState
    exit_code: int | None
    reason: str | None = Field(description="one sentence; for every state but running, and finished at the last step")
    started: str = Field(description="ISO 8601, UTC")
    ended: str | None
    seconds: float | None
    step: int | None = Field(default=None, description="optimizer steps that were done")
    best_step: int | None = Field(
        default=None, description="that the weights in model/ are of, where the best were loaded"
    )
    last_checkpoint: str | None = None


class Code(Section):
    """The commit, and a hash of what was changed since; `reason` says why one is null."""

    git_commit: str | None
    git_diff_sha256: str | None
    is_clean: bool | None
    reason: str | None


class PackageDifference(Section):
    """A package whose installed version is not the lock's; null for one that is missing on that side."""

    installed: str | None
    locked: str | None


class Lock(Section):
    """The lock of the hardware generation, and where what was installed is not what it says."""

    name: str = Field(description="its folder below docker/, or the generation of the image")
    sha256: str | None = Field(description="of requirements.lock; null where the book has none")
    differences: dict[str, PackageDifference] | None = Field(
        description="by package, `python` for the interpreter; empty: the lock was installed; null: not compared"
    )
    reason: str | None = Field(description="why nothing was compared")


class Environment(Section):
    """What was installed, and what was set for it."""

    image_digest: str | None = Field(
        description="of the published image; of one that was built here its id, if make ran it; null outside containers"
    )
    image: dict[str, Any] | None
    lock_sha256: str | None = Field(description="of the lock where nothing differs from it, else null")
    lock: Lock
    installed_sha256: str
    python: str
    packages: dict[str, str] = Field(description="versions of those that can change a loss or a speed")
    variables: dict[str, str] = Field(description="set in the environment for NCCL, torch's allocator and the like")


class Model(Section):
    """The base model."""

    name: str
    revision: str | None
    config_sha256: str | None = Field(description="of config.json, where the model is a folder")
    weights: Literal["pretrained", "random"]
    weights_fingerprint: str | None = Field(description="of pretrained weights in a folder, by samples of every tensor")


class Dataset(Section):
    """The prepared data."""

    records: list[dict[str, Any]] = Field(description="one per source, as it was read")
    fingerprint: str = Field(description="of everything that could change a token: sources, code, libraries")
    content_sha256: str | None = Field(default=None, description="of the tokens and labels themselves")
    counts: dict[str, dict[str, Any]] = Field(default_factory=dict, description="by part: train, validation")


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
    topology: str | None = Field(description="how the GPUs are connected, by NVML")
    cpus: int = Field(ge=1)
    memory_gib: float
    host: str = Field(description="tells machines apart without naming them")


class Processor(Section):
    """What decides the order of sums on a CPU: runs with the same processor and packages have the same bits."""

    name: str = Field(description="with its family and model, where the system tells")
    instructions: str = Field(
        description="the set that torch uses, such as AVX2, and variables that change its libraries'"
    )
    threads: int = Field(ge=1, description="of each rank")


class StartUp(Section):
    """How long it took to the first optimizer step, by phases in their order; each ends where the next begins."""

    launched: str | None = Field(description="ISO 8601, UTC: when the ranks were started")
    launcher: dict[str, float] = Field(description="seconds by phase of the process that started the ranks")
    rank: dict[str, float] = Field(description="seconds by phase of rank 0; empty before its first step has ended")
    first_step_s: float | None = Field(description="the sum of all phases: to the end of the first step")


class File(Section):
    """What a file was when it was written."""

    size: int = Field(ge=0, description="bytes")
    sha256: str


class Manifest(BaseModel):
    """`manifest.json` of a run folder."""

    model_config = ConfigDict(extra="allow", title="manifest.json of Tunebook")

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
    template_date: str | None = Field(
        default=None,
        description="that the chat template writes as today's; null or not there: none",
    )
    system_prompt_sha256: str
    dataset: Dataset | None
    hardware: Hardware
    world_size: int = Field(ge=1)
    seed: int
    command: list[str] = Field(description="that trains the same again")
    typed: list[str] | None = Field(default=None, description="the command line that led to it")
    processor: Processor | None = Field(default=None, description="of a run on a CPU")
    start_up: StartUp | None = None
    model_files: dict[str, File] | None = Field(
        default=None, description="of model/, by their paths in it; not there before it is written"
    )
    wandb_run_id: str | None = Field(default=None, description="with tracking=wandb: one id over all attempts")
    files_sha256: dict[str, str] | None = Field(
        default=None, description="of what the run measured, by name, when it ended"
    )
