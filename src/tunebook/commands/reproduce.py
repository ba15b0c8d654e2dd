"""`tunebook reproduce`: train again what a run folder or an evidence file says, and compare.

The recorded overrides are composed again. Other settings are refused and other data or weights are a difference, both
before anything is trained; other code, packages or hardware are printed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tunebook.commands.job import plan_job
from tunebook.commands.train import run_job, with_data
from tunebook.config.book import book_root
from tunebook.config.frozen import typed_in
from tunebook.config.identity import comparable_config, flat_differences
from tunebook.config.launchers import SlurmConfig
from tunebook.config.override_text import command_words, override, quoted, shell_command
from tunebook.config.schema import RunConfig
from tunebook.errors import DifferenceError
from tunebook.evidence.compare import (
    Claim,
    claim_of_evidence,
    claim_of_run,
    compare,
    content_differences,
    named,
    require_same_settings,
)
from tunebook.evidence.gather import RunFacts, read_finished, training_overrides
from tunebook.evidence.schema import Inputs, read_evidence
from tunebook.model.weight_files import weights_fingerprint
from tunebook.record.provenance import describe_code, describe_environment, describe_hardware
from tunebook.record.run_folder import create_run_folder, resolve_run, run_name
from tunebook.record.run_record import RunRecord
from tunebook.terminal import print_text


@dataclass(frozen=True, kw_only=True)
class Original:
    """What is trained again: a finished run, or evidence."""

    recipe: str | None
    overrides: list[str]
    claim: Claim
    typed_in: Path  # where relative paths in the overrides start
    comparison: list[str]  # the words that compare another run with it, before that run's folder


def reproduce_command(
    target: str, outputs: Path, recipes_dirs: list[Path], console: Console, *, dry_run: bool = False
) -> int:
    """Run it again and compare. Returns the exit code of the run, or 5 if it succeeded but differs.

    Raises: RequestError for other settings here, DifferenceError for other data or weights.
    """
    original = find_original(target, outputs)
    outputs = outputs.expanduser().absolute()
    recipes_dirs = [folder.expanduser().absolute() for folder in recipes_dirs]
    with contextlib.chdir(original.typed_in):
        return _reproduce(original, outputs, recipes_dirs, console, dry_run=dry_run)


def find_original(target: str, outputs: Path) -> Original:
    """Find a run by folder or name, or read an evidence file. Raises: RequestError, DataError."""
    file = Path(target).expanduser().absolute()
    if file.suffix == ".json":
        evidence = read_evidence(file)
        return Original(
            recipe=evidence.ran.recipe, overrides=evidence.ran.overrides, claim=claim_of_evidence(file, evidence),
            typed_in=Path.cwd(), comparison=["tunebook", "verify", "--against", str(file)],
        )  # fmt: skip
    folder = resolve_run(target, outputs)
    run = read_finished(folder)
    working_folder = typed_in(run.config)
    parent = [] if run.config.model.run is None else [override("model.run", run.config.model.run)]
    return Original(
        recipe=run.config.recipe, overrides=[*training_overrides(run.manifest), *parent], claim=claim_of_run(run),
        typed_in=working_folder if working_folder.is_dir() else Path.cwd(),
        comparison=["tunebook", "diff", str(folder)],
    )  # fmt: skip


def _reproduce(original: Original, outputs: Path, recipes_dirs: list[Path], console: Console, *, dry_run: bool) -> int:
    claim = original.claim
    overrides = [*original.overrides, f"outputs={quoted(str(outputs))}", "training.resume=never"]
    job = plan_job(original.recipe, overrides, recipes_dirs)
    inputs = claim.recorded.inputs.model_copy(
        update={
            "config": comparable_config(job.config),
            "seed": job.config.training.seed,
            "weights_fingerprint": weights_fingerprint(job.config.model),
        }
    )
    _require_same(claim, inputs)
    for line in differences_here(claim, job.config):
        print_text(line, console)
    train = command_words("train", original.recipe, overrides, recipes_dirs)
    print_text(f"to be run in {Path.cwd()}: {shell_command(train)}", console)
    print_text(f"to be compared with {claim.name}", console)
    if dry_run:
        return 0
    job, prepared = with_data(job, console)  # which the run reuses
    data = {
        "data_sha256": prepared.content_sha256,
        "tokenizer_sha256": prepared.tokenizer_sha256,
        "chat_template_sha256": prepared.chat_template_sha256,
    }
    _require_same(claim, inputs.model_copy(update=data))
    folder = create_run_folder(outputs, run_name(job.config))
    print_text(f"to compare it later: {shell_command([*original.comparison, str(folder)])}", console)
    code, launcher = run_job(job, console, folder=folder), job.config.launcher
    if code != 0 or (isinstance(launcher, SlurmConfig) and not launcher.wait):
        return code
    return compare(claim, read_finished(folder)).print(console)


def _require_same(claim: Claim, inputs: Inputs) -> None:
    """Raises: RequestError for other settings, DifferenceError for other data or weights."""
    recorded = claim.recorded.inputs
    different = f"the settings of {claim.name} give another run here, since the book or the machine differs"
    require_same_settings(recorded, inputs, different)
    if contents := content_differences(recorded, inputs):
        message = f"the same settings as those of {claim.name} train on something else here: {named(contents)}"
        raise DifferenceError(message, problem_id="evidence-of-other-inputs")


def differences_here(claim: Claim, config: RunConfig) -> Iterator[str]:
    """Yield one line per difference in code, packages, image and machine, or one line if there is none."""
    code = describe_code(book_root())
    manifest = {
        "code": code,
        "environment": describe_environment(config.hardware.generation.name),
        "hardware": describe_hardware(claim.recorded.hardware.nccl),
    }
    here = RunFacts(record=RunRecord(folder=Path()), config=config, manifest=manifest)
    recorded, present = (
        part.software.model_dump(exclude={"lock", "lock_sha256"}) | {"hardware": part.hardware.model_dump()}
        for part in (claim.recorded, here)
    )
    differing = flat_differences(recorded, present)
    for key, value, value_here in differing:
        yield f"different here: {key} is {value_here}, recorded with {value}"
    if code["git_diff_sha256"]:
        yield f"different here: the code was changed after commit {code['git_commit'][:12]}"
    elif not differing:
        yield "code, packages and machine are as they were"
