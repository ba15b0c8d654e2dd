"""`tunebook reproduce`: rebuild a run from its manifest, report what differs here, run it, and compare.

The recorded overrides are composed again, and the result must equal the recorded configuration. If a config group has
changed since, this machine makes another choice, or the data differs, the command says so before anything starts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from tunebook.commands.recorded_evidence import claim_of_evidence
from tunebook.commands.train import plan_job, prepare_data, run_job
from tunebook.commands.typed_command import machine_of_manifest
from tunebook.config.book import book_root
from tunebook.config.frozen import typed_in, typed_in_of
from tunebook.config.identity import (
    HASH_VERSION,
    changed_settings,
    comparable_config,
    config_hash,
    flat_differences,
    has_hash,
    result_settings,
)
from tunebook.config.override_text import command_words, quoted, shell_command, shell_word
from tunebook.config.schema import RunConfig, SlurmConfig
from tunebook.data.files import SUFFIXES, find_files, named_files
from tunebook.errors import RequestError, StoppedError
from tunebook.evidence.compare import Claim, config_differences, named_differences
from tunebook.evidence.gather import RunFacts, config_of, read_finished, training_overrides
from tunebook.evidence.page import show_verification
from tunebook.evidence.run_checks import require_first_step, require_first_step_by_manifest, require_unchanged
from tunebook.evidence.verifying import claim_of_run, compare_run
from tunebook.files import remembered_hash
from tunebook.model.load import model_location
from tunebook.model.weights_fingerprint import fingerprint_text, weights_fingerprint
from tunebook.plan.draft import Draft, draft_run
from tunebook.record.manifest import (
    MANIFEST_FILE,
    RunState,
    read_manifest,
    read_manifest_file,
    recorded_fingerprint,
)
from tunebook.record.manifest_schema import check_read_manifest
from tunebook.record.provenance import describe_code, describe_environment, describe_hardware
from tunebook.record.run_folder import RUN_FILE, WITHOUT_RECIPE, create_run_folder, remove_if_empty, resolve_run
from tunebook.record.run_record import RunRecord, broken_records_named, read_run
from tunebook.terminal import print_text

# Compared before the run: sections that can change a loss or a speed, except keys that always differ. The lock is left
# out because its differences are those of the packages.
_HERE = ("code", "environment", "hardware")
_NOT_TOLD = ("hardware.host", "hardware.topology", "code.reason", "environment.installed_sha256", "environment.lock.")
# `problem_id`s that mean there is nothing to compare a run with.
_NOTHING_RECORDED = ("no-evidence", "evidence-of-other-config", "evidence-without-recipe")


@dataclass(frozen=True, kw_only=True)
class Original:
    """The run to reproduce, or only its manifest."""

    manifest: dict[str, Any]
    file: Path  # of the manifest
    run: Path | None

    @property
    def words(self) -> list[str]:
        """The overrides typed after the recipe, except the output folder."""
        return training_overrides(self.manifest)

    @property
    def has_curve(self) -> bool:
        """Whether the run is here and finished, so that another run can be compared with it."""
        return self.run is not None and self.manifest["status"]["state"] == RunState.finished.name


def find_original(target: str, outputs: Path) -> Original:
    """Find a run by folder or name, or a manifest.json. Raises: RequestError, DataError."""
    named = Path(target).expanduser()
    if named.is_file():
        file, run = named, named.parent.absolute()
        is_in_run = named.name == MANIFEST_FILE and (run / RUN_FILE).is_file()
    else:
        run = resolve_run(target, outputs).absolute()
        file, is_in_run = run / MANIFEST_FILE, True
    manifest = read_manifest_file(file) if named.is_file() else read_manifest(run)
    check_read_manifest(manifest, file)
    return Original(manifest=manifest, file=file, run=run if is_in_run else None)


def reproduce_command(
    target: str, outputs: Path, recipes_dirs: list[Path], console: Console, *, dry_run: bool = False
) -> int:
    """Run it again and compare: with the original run if its folder is here, else with the recipe's evidence.

    Returns the exit code of the run, or 5 if it succeeded but differs. Raises: RequestError if the new run would not be
    the recorded one, or, except in a dry run, if there is nothing to compare it with.
    """
    original = find_original(target, outputs)
    with broken_records_named(original.run or original.file):
        _require_whole(original)
    outputs = outputs.expanduser().absolute()
    recipes_dirs = [folder.expanduser().absolute() for folder in recipes_dirs]
    with _in_original_folder(original, console):
        return _reproduce(original, outputs, recipes_dirs, console, dry_run=dry_run)


@contextlib.contextmanager
def _in_original_folder(original: Original, console: Console) -> Iterator[None]:
    """Change to the folder in which the overrides were typed, so that relative paths in them still resolve."""
    there = typed_in_of(original.run / RUN_FILE) if original.run is not None else None
    if there is None or there == Path.cwd():
        yield
    elif there.is_dir():
        print_text(f"relative paths start at {there}, where the run was started", console)
        with contextlib.chdir(there):
            yield
    else:
        warning = f"WARNING: {there}, where the run was started, is missing: relative paths start at {Path.cwd()}"
        print_text(f"{warning}; change into the folder that holds what they name", console, style="yellow")
        yield


def _require_whole(original: Original) -> None:
    """Check that the run was trained from the first step. Raises: RequestError."""
    if original.run is None or not (original.run / RUN_FILE).is_file():
        require_first_step_by_manifest(original.manifest, "its manifest says that")
    else:
        require_first_step(read_run(original.run), config_of(original.run))


def _reproduce(original: Original, outputs: Path, recipes_dirs: list[Path], console: Console, *, dry_run: bool) -> int:
    recipe = original.manifest["recipe"]
    words = [*original.words, "training.resume=never", f"outputs={quoted(str(outputs))}"]
    job = plan_job(recipe, words, recipes_dirs)
    with broken_records_named(original.run or original.file):
        for line in require_same_config(original, job.config, recipes_dirs):
            print_text(line, console, style="yellow")
        require_same_files(original.manifest, job.config)
        require_same_weights(original.manifest, job.config)
        for line in describe_differences(original.manifest, job.config):
            print_text(line, console)
        if dry_run:
            _print_plan(original, job, recipes_dirs, console)
            return 0
        recorded = choose_recorded(original, job.config, recipes_dirs)
    print_text(f"to be compared with {recorded.name}", console)
    require_same_data(original, job, console)
    folder = create_run_folder(outputs, recipe or WITHOUT_RECIPE)
    if (code := _train(original, job, folder, recipes_dirs, console)) != 0:
        return code
    if isinstance(job.config.launcher, SlurmConfig) and not job.config.launcher.wait:
        compare = _compare_command(original, folder, recipes_dirs)
        print_text(f"to compare it when the job has ended: {compare}", console)
        return 0
    return show_verification(compare_run(recorded, read_finished(folder)), console)


def _print_plan(original: Original, job: Draft, recipes_dirs: list[Path], console: Console) -> None:
    """Print what would run and what it would be compared with; a dry run continues if there is nothing to compare."""
    print_text(f"to be run: {_train_command(job, job.overrides, recipes_dirs)}", console)
    try:
        note, style = f"to be compared with {choose_recorded(original, job.config, recipes_dirs).name}", ""
    except RequestError as error:
        if error.problem_id not in _NOTHING_RECORDED:
            raise
        note, style = f"WARNING: there is nothing to verify it against, so it is not run: {error.message}", "yellow"
    print_text(note, console, style=style)


def _train(original: Original, job: Draft, folder: Path, recipes_dirs: list[Path], console: Console) -> int:
    """Run it in its new folder; if it is stopped, print how to resume. A refused run leaves no empty folder."""
    try:
        code = run_job(job, console, folder=folder)
    except (StoppedError, KeyboardInterrupt):
        print_text(resume_instructions(original, job, folder, recipes_dirs), console)
        raise
    except Exception:
        remove_if_empty(folder)
        raise
    if code == StoppedError.exit_code:
        print_text(resume_instructions(original, job, folder, recipes_dirs), console)
    return code


def resume_instructions(original: Original, job: Draft, folder: Path, recipes_dirs: list[Path]) -> str:
    """Return the commands that resume a stopped reproduction; `tunebook reproduce` itself would start another run."""
    words = [word for word in job.overrides if not word.startswith("training.resume=")]
    lines = (
        "the same `tunebook reproduce` would start over; to resume this run and compare it:",
        _train_command(job, words, recipes_dirs, "--run-folder", str(folder)),
        _compare_command(original, folder, recipes_dirs),
    )
    return "\n  ".join(lines)


def _train_command(job: Draft, words: Sequence[str], recipes_dirs: list[Path], *options: str) -> str:
    """Return the command that trains it from any folder: relative paths start at the current folder."""
    train = shell_command([*command_words("train", job.config.recipe, words, recipes_dirs), *options])
    return train if typed_in(job.config) is None else f"cd {shell_word(str(Path.cwd()))} && {train}"


def _compare_command(original: Original, folder: Path, recipes_dirs: list[Path]) -> str:
    """Return the command that compares a finished reproduction with the original."""
    if original.has_curve:
        return shell_command(["tunebook", "diff", str(original.run), str(folder)])
    return shell_command(command_words("verify", None, [str(folder)], recipes_dirs))


def require_same_config(original: Original, config: RunConfig, recipes_dirs: list[Path]) -> list[str]:
    """Check that the overrides still give the recorded configuration; return warnings for what cannot be checked here.

    Raises: RequestError that names the differing keys. Without the run's folder, only the seed and the configuration's
    hash are known.
    """
    manifest = original.manifest
    if original.run is not None:
        _require_equal(manifest, _recorded_config(original.run, manifest), config)
        return []
    if manifest["seed"] != config.training.seed:
        raise _config_differs(manifest, f"training.seed is {config.training.seed}, recorded with {manifest['seed']}")
    version = manifest.get("hash_version", 1)
    if version != HASH_VERSION:
        return [
            f"WARNING: the manifest notes its configuration by a hash of version {version}, and this Tunebook writes "
            f"{HASH_VERSION}: whether the same command still trains the same is not known without the run's folder"
        ]
    if has_hash(config, manifest["config_sha256"]):
        return []
    machine = machine_of_manifest(manifest["hardware"])
    there = draft_run(manifest["recipe"], original.words, recipes_dirs, machine).resolution
    if there is None or not has_hash(there.config, manifest["config_sha256"]):
        raise _config_differs(
            manifest,
            f"the configuration's hash is {config_hash(config)[:12]}, recorded with {manifest['config_sha256'][:12]}, "
            "and is another for the recorded machine too (the run's whole folder would tell which key)",
        )
    _require_equal(manifest, there.config, config)
    decided = named_differences(changed_settings(result_settings(there.config), result_settings(config)))
    return [f"WARNING: this machine is another than the run's, and decides what was left open otherwise: {decided}"]


def _recorded_config(run: Path, manifest: dict[str, Any]) -> RunConfig:
    """Return a run's configuration. Raises: RequestError if it is missing, or differs from the manifest."""
    record = read_run(run)
    if record.config is None:
        raise RequestError(
            f"{run} lacks {RUN_FILE}; copy its {MANIFEST_FILE} elsewhere and name that, to reproduce what it says",
            problem_id="run-not-finished",
        )
    config = config_of(run)
    require_unchanged(run, record.config, config, manifest)
    return config


def _require_equal(manifest: dict[str, Any], then: RunConfig, now: RunConfig) -> None:
    """Raises: RequestError unless only the machine and the split of a step differ."""
    if differing := config_differences(comparable_config(then), comparable_config(now)):
        raise _config_differs(manifest, named_differences(differing))


def _config_differs(manifest: dict[str, Any], differing: str) -> RequestError:
    return RequestError(
        f"the same overrides give another configuration here: {differing}. The book was changed since (the run is of "
        f"commit {_commit(manifest)}), or this machine makes another choice: check that commit out, or type the "
        "recorded values",
        problem_id="reproduces-otherwise",
    )


def choose_recorded(original: Original, config: RunConfig, recipes_dirs: list[Path]) -> Claim:
    """Return what the run will be compared with, before hours of training. Raises: RequestError if there is nothing."""
    if original.has_curve:
        assert original.run is not None
        return claim_of_run(read_finished(original.run), recipes_dirs)
    here = original.manifest | {"hardware": describe_hardware(original.manifest["hardware"]["nccl"])}
    record = RunRecord(folder=original.run or Path(), manifest=here)
    return claim_of_evidence(RunFacts(record=record, config=config, manifest=here), recipes_dirs)


def require_same_files(manifest: dict[str, Any], config: RunConfig) -> None:
    """Check that the data's files are unchanged, without preparing them or accessing the hub.

    Raises: DataError for a missing file, RequestError for a changed one.
    """
    named = named_files(config.dataset).items()
    here = {remembered_hash(file.path) for key, path in named for file in find_files(path, key)}
    for record in (manifest["dataset"] or {}).get("records", []):
        if record["location"].lower().endswith(SUFFIXES) and record.get("sha256") not in (None, *here):
            raise RequestError(
                f"{record['location']}, which the run read, is not here as it was; take the files back to what they "
                "were, or change into the folder that the run was started in",
                problem_id="reproduces-otherwise",
            )


def require_same_weights(manifest: dict[str, Any], config: RunConfig) -> None:
    """Check that the initial weights are unchanged; older manifests do not record them.

    Raises: RequestError if they differ.
    """
    then = recorded_fingerprint(manifest)
    if then is None:
        return
    now = weights_fingerprint(config.model)
    if now != then:
        raise RequestError(
            f"the run started from other weights than it would here: those of {model_location(config.model)} "
            f"{fingerprint_text(now)}, and the run's had {then[:12]}...; put the weights back that it started from",
            problem_id="reproduces-otherwise",
        )


def require_same_data(original: Original, job: Draft, console: Console) -> None:
    """Prepare the data, which the run reuses. Raises: RequestError if it differs from the data of the original run."""
    prepared = prepare_data(job.config, console)
    manifest = original.manifest
    found = {
        "the data": ((manifest["dataset"] or {}).get("content_sha256"), prepared.content_sha256),
        "the tokenizer": (manifest["tokenizer_sha256"], prepared.tokenizer_sha256),
        "the chat template": (manifest["chat_template_sha256"], prepared.chat_template_sha256),
    }
    others = [name for name, (then, now) in found.items() if then is not None and then != now]
    if others:
        raise RequestError(
            f"{' and '.join(others)} {'are' if len(others) > 1 else 'is'} not what the run was trained with; take the "
            "files back to what they were, or name the revision that it used (dataset.revision=, model.revision=)",
            problem_id="reproduces-otherwise",
        )


def describe_differences(manifest: dict[str, Any], config: RunConfig) -> Iterator[str]:
    """Yield one line per difference in code, packages, image, variables and machine, or one line if there is none."""
    here = {
        "code": describe_code(book_root()),
        "environment": describe_environment(config.hardware.generation.name),
        "hardware": describe_hardware(manifest["hardware"]["nccl"]),
    }
    if manifest["environment"].get("variables") is None:
        del here["environment"]["variables"]  # not recorded
    found = [one for section in _HERE for one in flat_differences(manifest[section], here[section], section)]
    differing = [one for one in found if not one[0].startswith(_NOT_TOLD)]
    if not differing:
        yield "code, packages and machine are as they were"
        return
    yield f"different here ({len(differing)}):"
    for key, one, other in differing:
        yield f"  {key}: {_text(other)}, then {_text(one)}"


def _text(value: Any) -> str:
    return "none" if value is None else str(value)


def _commit(manifest: dict[str, Any]) -> str:
    return str(manifest["code"].get("git_commit") or "unknown")[:12]
