"""Run a training job from the command line's overrides to the report.

The steps are: compose, check, plan, prepare, launch, evaluate, record.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tunebook.checkpoint.choose import expected_checkpoint
from tunebook.checkpoint.identity import identity_of
from tunebook.commands.attempt import Attempt
from tunebook.commands.preflight import require_runnable
from tunebook.config.frozen import architecture_json, config_to_yaml
from tunebook.config.launchers import SlurmConfig
from tunebook.config.model_facts import ARCHITECTURE_FILE
from tunebook.config.override_text import command_words
from tunebook.config.schema import RunConfig, world_size
from tunebook.config.unsafe_text import require_printable
from tunebook.data.batch import BatchPlan, solve_batch
from tunebook.data.prepared import PREPARED_FILE
from tunebook.data.sources import begins_with_images
from tunebook.data.view import summary_lines
from tunebook.errors import RequestError, counted
from tunebook.files import atomic_write_json, atomic_write_text
from tunebook.launch.commands import is_later_node
from tunebook.launch.local import join_run
from tunebook.launch.resume import check_run_folder, is_trained, unfinished_run
from tunebook.launch.slurm import follow, refuse_if_queued, submit
from tunebook.launch.supervise import StopRequests
from tunebook.model.weight_files import weights_fingerprint
from tunebook.plan.auto.decisions import AS_ASKED
from tunebook.plan.draft import Draft, draft_json, draft_run, estimate_time
from tunebook.plan.memory.verdict import measured_memory, plan_host_memory, plan_memory
from tunebook.plan.show import batch_lines, show_warnings
from tunebook.processes import EarlyStart
from tunebook.record.manifest import MANIFEST_FILE, read_manifest, start_manifest
from tunebook.record.run_folder import (
    PLAN_FILE,
    RUN_FILE,
    check_outputs,
    clear_outcomes,
    create_run_folder,
    make_run_folder,
    run_name,
    working_in,
)
from tunebook.record.start_up import StartClock
from tunebook.terminal import print_lines, print_text

if TYPE_CHECKING:
    from tunebook.data.prepared import Prepared


def run_job(
    job: Draft,
    console: Console,
    *,
    folder: Path | None = None,
    clock: StartClock | None = None,
    early: EarlyStart | None = None,
) -> int:
    """Prepare, launch, evaluate and report; return the exit code of the run's outcome.

    `clock` holds earlier phases, if the caller timed them. `early` may have started the only rank.
    """
    config, clock, early = job.config, clock or StartClock(), early or EarlyStart()
    num_choices = sum(choice.why != AS_ASKED for choice in job.resolved.choices)
    if num_choices:
        print_text(f"auto chose {counted(num_choices, 'setting')}: tunebook plan and the report show them", console)
    show_warnings(job.problems, console)
    require_runnable(job)
    if folder is not None:
        folder = folder.expanduser().absolute()
    if is_later_node(config):
        return join_run(config, folder, console)
    if folder is not None:
        require_printable("--run-folder", folder)
        check_run_folder(config, folder)
    check_outputs(folder or Path(config.outputs))
    clock.passed("checks")
    job, prepared = with_data(job, console)
    if job.config is not config:
        require_runnable(job)
        config = job.config
    clock.passed("data")
    print_lines(summary_lines(prepared), console)
    part = prepared.train
    plan = solve_batch(config, part.load_lengths().astype("int64"), part.load_widths().astype("int64"))
    print_lines(batch_lines(plan), console)
    resumed = folder or unfinished_run(config, lambda text: print_text(text, console))
    is_done = resumed is not None and is_trained(resumed, config)
    identity = identity_of(config, prepared, weights_fingerprint(config.model))  # the ranks reuse the fingerprint
    checkpoint = None if is_done else expected_checkpoint(config, resumed, identity)
    if resumed is None:
        folder = create_run_folder(Path(config.outputs), run_name(config))
    else:
        refuse_if_queued(resumed)
        folder = make_run_folder(resumed)
    with working_in(folder) as lock:
        note = f", resuming from {checkpoint}" if checkpoint is not None else ""
        if is_done:
            note = ", already trained: resuming with its evaluation"
        print_text(f"run folder: {folder}{note}", console)
        if isinstance(config.launcher, SlurmConfig):
            set_up_folder(job, plan, prepared, folder)
            job_id = submit(config, folder, console)
        else:
            with StopRequests().listening() as requests:  # from before the manifest says `running`
                set_up_folder(job, plan, prepared, folder)
                clock.passed("run_folder")
                attempt = Attempt(
                    config=config, folder=folder, lock=lock, console=console, requests=requests, clock=clock,
                    early=early,
                )  # fmt: skip
                return attempt.carry_out()
    # The job holds the folder from here on.
    return follow(job_id, folder, console) if config.launcher.wait else 0


def with_data(job: Draft, console: Console, *rules: str) -> tuple[Draft, Prepared]:
    """The job and its data. It is planned again where only the preparation found images, which `auto` depends on.

    `rules` as in `Draft.raise_errors`.
    """
    dataset = job.config.dataset
    was_known = begins_with_images(dataset)
    try:
        prepared = prepare_data(job.config, console)
    except RequestError:
        if was_known or not begins_with_images(dataset):
            raise
    else:
        if was_known or not begins_with_images(dataset):
            return job, prepared
    print_text("the documents have images: auto chooses again", console)
    job = draft_run(job.recipe, job.overrides, job.recipes_dirs)
    job.raise_errors(*rules)
    return job, prepare_data(job.config, console)


def prepare_data(config: RunConfig, console: Console) -> Prepared:
    """Prepare the data with progress, or reuse prepared data; runs once, before any rank starts."""
    from tunebook.data.prepare import prepare
    from tunebook.plan.show import preparing

    with preparing(console) as progress:
        return prepare(config, progress)


def set_up_folder(job: Draft, plan: BatchPlan, prepared: Prepared, folder: Path) -> None:
    """Write all files that the ranks read, before any rank starts."""
    config, known = job.config, None
    if not is_trained(folder, config):
        clear_outcomes(folder)
    elif (folder / MANIFEST_FILE).is_file():  # trained from weights that may have changed since
        known = {"weights_fingerprint": read_manifest(folder)["model"]["weights_fingerprint"]}
    if (architecture := architecture_json(config)) is not None:
        atomic_write_text(folder / ARCHITECTURE_FILE, architecture)
    atomic_write_text(folder / RUN_FILE, config_to_yaml(config))
    atomic_write_json(folder / PLAN_FILE, plan_json(job, plan))
    atomic_write_json(folder / PREPARED_FILE, {"folder": str(prepared.folder)})
    start_manifest(
        folder,
        config,
        world_size=world_size(config),
        command=command_words("train", config.recipe, job.overrides),
        model=known,
        tokenizer_sha256=prepared.tokenizer_sha256,
        chat_template_sha256=prepared.chat_template_sha256,
        template_date=prepared.template_date,
        dataset={
            "records": [asdict(record) for record in prepared.records],
            "fingerprint": prepared.fingerprint,
            "content_sha256": prepared.content_sha256,
            "counts": {name: part.counts.to_json() for name, part in prepared.parts().items()},
        },
    )


def plan_json(job: Draft, batch: BatchPlan) -> dict[str, Any]:
    """Return the content of plan.json: the output of `tunebook plan --json`, with the batch of the prepared data."""
    config = job.config
    return draft_json(
        replace(
            job,
            batch=batch,
            memory=measured_memory(config, batch) or plan_memory(config, batch),
            host=plan_host_memory(config, job.resolved.host_memory_gib),
            time=estimate_time(config, batch),
            unusable_data=None,
        )
    )
