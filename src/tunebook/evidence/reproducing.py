"""`tunebook reproduce`: set up again what a run's manifest says, tell what is different here, run it, compare.

The words that were typed are composed anew. What they come to must be what the run was: a group that was changed since,
or a choice that this machine makes otherwise, is named before anything starts, and so is other data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from tunebook.config.book import book_root
from tunebook.config.schema import RunConfig
from tunebook.errors import RequestError
from tunebook.evidence.compare import config_differences, flat_differences
from tunebook.evidence.gather import config_of, read_finished, typed_overrides
from tunebook.evidence.show import show_verification
from tunebook.evidence.verifying import named_differences, verify, verify_against_run
from tunebook.launch.job import Job, plan_job, prepare_data, run_job
from tunebook.record.config_hash import comparable_config
from tunebook.record.manifest import MANIFEST_FILE, read_manifest, read_manifest_file
from tunebook.record.provenance import describe_code, describe_environment, describe_hardware
from tunebook.record.run_folder import create_run_folder, resolve_run
from tunebook.record.run_record import RunRecord

# Of what is compared before the run: what can change a loss or a speed, less what is always another.
_HERE = ("code", "environment", "hardware")
_NOT_TOLD = ("hardware.host", "hardware.topology", "code.reason", "environment.installed_sha256")


@dataclass(frozen=True, kw_only=True)
class Original:
    """What is to be reproduced: a run, or no more than its manifest."""

    manifest: dict[str, Any]
    run: Path | None

    @property
    def words(self) -> list[str]:
        """What was typed after the recipe."""
        return typed_overrides(RunRecord(folder=Path(), manifest=self.manifest))


def find_original(target: str, outputs: Path) -> Original:
    """A run, by folder or name, or a manifest.json. Raises: RequestError, DataError."""
    named = Path(target).expanduser()
    if named.is_file():
        is_in_run = named.name == MANIFEST_FILE and (named.parent / "run.yaml").is_file()
        return Original(manifest=read_manifest_file(named), run=named.parent.absolute() if is_in_run else None)
    run = resolve_run(target, outputs)
    return Original(manifest=read_manifest(run), run=run)


def reproduce_command(
    target: str, outputs: Path, recipes_dirs: list[Path], console: Console, *, dry_run: bool = False
) -> int:
    """Run it again and compare: with the run where its folder is here, else with the recipe's evidence.

    Returns the exit code of the run, or 5 where it ended well and differs. Raises: RequestError where what would be run
    is not what was.
    """
    original = find_original(target, outputs)
    recipe = original.manifest["recipe"]
    words = [*original.words, "training.resume=never", f"outputs={outputs}"]
    job = plan_job(recipe, words, recipes_dirs)
    require_same_config(original, job.config)
    for line in told_differences(original.manifest, job.config):
        console.print(Text(line), soft_wrap=True)
    if dry_run:
        return 0
    require_same_data(original, job, console)
    folder = create_run_folder(outputs, recipe or "custom")
    code = run_job(job, console, folder=folder)
    if code != 0:
        return code
    record = read_finished(folder)
    has_curve = original.run is not None and original.manifest["status"]["state"] == "finished"
    found = (
        verify_against_run(record, read_finished(original.run))
        if has_curve and original.run is not None
        else verify(record, recipes_dirs)
    )
    return show_verification(found, record, console)


def require_same_config(original: Original, config: RunConfig) -> None:
    """Whether the words still mean what they meant. Without the run's folder only the seed is known of it.

    Raises: RequestError naming the keys that come out otherwise here.
    """
    if original.run is None:
        return
    differing = config_differences(comparable_config(config_of(original.run)), comparable_config(config))
    if differing:
        raise RequestError(
            f"the same words come to something else here: {named_differences(differing)}. The book was changed since "
            f"(the run is of commit {_commit(original.manifest)}), or this machine makes another choice: check that "
            "commit out, or type the recorded values",
            problem_id="reproduces-otherwise",
        )


def require_same_data(original: Original, job: Job, console: Console) -> None:
    """Prepare the data, which the run then finds prepared. Raises: RequestError where it is not what was trained on."""
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


def told_differences(manifest: dict[str, Any], config: RunConfig) -> Iterator[str]:
    """What of code, packages, image and machine is not as it was, a line each; says so where all is."""
    here = {
        "code": describe_code(book_root()),
        "environment": describe_environment(config.hardware.generation.name),
        "hardware": describe_hardware(manifest["hardware"]["nccl"]),
    }
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
