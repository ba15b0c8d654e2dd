"""`tunebook reproduce`: train again what a run folder or an evidence file says, and compare.

The recorded overrides are composed again. If they give other settings, data or weights here, the command refuses before
anything is trained; other code, packages or hardware are printed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tunebook.commands.train import plan_job, prepare_data, run_job
from tunebook.config.book import book_root
from tunebook.config.choices import Generation
from tunebook.config.frozen import typed_in
from tunebook.config.identity import comparable_config, flat_differences
from tunebook.config.override_text import command_words, quoted, shell_command
from tunebook.config.schema import RunConfig, SlurmConfig
from tunebook.errors import RequestError, StoppedError
from tunebook.evidence.compare import Claim, claim_of_evidence, claim_of_run, compare
from tunebook.evidence.differences import require_same_inputs
from tunebook.evidence.files import read_evidence
from tunebook.evidence.gather import RunFacts, read_finished, training_overrides
from tunebook.model.weight_files import weights_fingerprint
from tunebook.plan.draft import Draft
from tunebook.record.provenance import describe_code, describe_environment, describe_hardware
from tunebook.record.run_folder import WITHOUT_RECIPE, create_run_folder, remove_if_empty, resolve_run
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

    Raises: RequestError if the new run would not be the recorded one.
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
        found = read_evidence(file)
        return Original(
            recipe=found.ran.recipe, overrides=found.ran.overrides, claim=claim_of_evidence(file, found),
            typed_in=Path.cwd(), comparison=["tunebook", "verify", "--against", str(file)],
        )  # fmt: skip
    folder = resolve_run(target, outputs)
    run = read_finished(folder)
    if len(run.missing_steps) > run.num_resumed:
        raise RequestError(
            f"{folder} has no finite loss of step {run.missing_steps[0]}: it resumed from another run, so its "
            "command and its losses cover different steps; name a run that started at the first step",
            problem_id="evidence-not-repeated",
        )
    there = typed_in(run.config)
    return Original(
        recipe=run.config.recipe, overrides=training_overrides(run.manifest), claim=claim_of_run(run),
        typed_in=there if there.is_dir() else Path.cwd(),
        comparison=["tunebook", "diff", str(folder)],
    )  # fmt: skip


def _reproduce(original: Original, outputs: Path, recipes_dirs: list[Path], console: Console, *, dry_run: bool) -> int:
    claim = original.claim
    overrides = [*original.overrides, f"outputs={quoted(str(outputs))}"]
    job = plan_job(original.recipe, [*overrides, "training.resume=never"], recipes_dirs)
    inputs = claim.inputs.model_copy(
        update={
            "config": comparable_config(job.config),
            "seed": job.config.training.seed,
            "weights_fingerprint": weights_fingerprint(job.config.model),
        }
    )
    different = f"what {claim.name} says gives something else here, by another book or another machine"
    require_same_inputs(claim.inputs, inputs, different)
    for line in differences_here(claim, job.config):
        print_text(line, console)
    train = command_words("train", original.recipe, overrides, recipes_dirs)
    print_text(f"to be run in {Path.cwd()}: {shell_command([*train, 'training.resume=never'])}", console)
    print_text(f"to be compared with {claim.name}", console)
    if dry_run:
        return 0
    prepared = prepare_data(job.config, console)  # which the run reuses
    data = {
        "data_sha256": prepared.content_sha256,
        "tokenizer_sha256": prepared.tokenizer_sha256,
        "chat_template_sha256": prepared.chat_template_sha256,
    }
    require_same_inputs(claim.inputs, inputs.model_copy(update=data), different)
    return _train(original, job, train, outputs, console)


def _train(original: Original, job: Draft, train: list[str], outputs: Path, console: Console) -> int:
    """Run it in a new folder and compare. `train` are the words that resume it. A refused run leaves no folder."""
    folder = create_run_folder(outputs, original.recipe or WITHOUT_RECIPE)
    compare_command = shell_command([*original.comparison, str(folder)])
    resume_command = shell_command([*train, "--run-folder", str(folder)])
    how_to_resume = f"to resume this run in {Path.cwd()}, and compare it:\n  {resume_command}\n  {compare_command}"
    try:
        code = run_job(job, console, folder=folder)
    except (StoppedError, KeyboardInterrupt):
        print_text(how_to_resume, console)
        raise
    except Exception:
        remove_if_empty(folder)
        raise
    if code == StoppedError.exit_code:
        print_text(how_to_resume, console)
    if code != 0:
        return code
    if isinstance(job.config.launcher, SlurmConfig) and not job.config.launcher.wait:
        print_text(f"to compare it when the job has ended: {compare_command}", console)
        return 0
    return compare(original.claim, read_finished(folder)).print(console)


def differences_here(claim: Claim, config: RunConfig) -> Iterator[str]:
    """Yield one line per difference in code, packages, image and machine, or one line if there is none."""
    code, hardware = describe_code(book_root()), describe_hardware(claim.hardware.nccl)
    if config.hardware.generation is Generation.cpu:
        hardware["gpus"] = []
    environment = describe_environment(config.hardware.generation.name)
    manifest = {"code": code, "environment": environment, "hardware": hardware}
    here = RunFacts(record=RunRecord(folder=Path()), config=config, manifest=manifest)
    then, now = (
        one.software.model_dump(exclude={"lock", "lock_sha256"})
        | {"hardware": one.hardware.model_dump(exclude={"processor"})}
        for one in (claim, here)
    )
    found = flat_differences(then, now)
    if not (found or code["git_diff_sha256"]):
        yield "code, packages and machine are as they were"
    for key, one, other in found:
        yield f"different here: {key} is {other}, recorded with {one}"
    if code["git_diff_sha256"]:
        yield f"different here: the code was changed after commit {code['git_commit'][:12]}"
