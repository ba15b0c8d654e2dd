"""Rules about validation, saving, resuming, uploading and evaluation."""

from __future__ import annotations

from collections.abc import Iterator

from tunebook.config.book import is_task_file, problems_of, resolve_path
from tunebook.config.choices import RESUME_WORDS, Source
from tunebook.config.override_text import as_typed
from tunebook.config.schema import RunConfig
from tunebook.errors import nearest
from tunebook.plan.rules.frame import Finding, rule, without
from tunebook.plan.rules.sources import is_hub_name


def _has_validation(config: RunConfig) -> bool:
    data = config.dataset
    return bool(data.validation_split or data.validation_path or data.validation_share > 0)


@rule("validation-missing")
def validation_missing(config: RunConfig) -> Iterator[Finding]:
    """Refuse evaluation in the run, the best model and early stopping without documents to measure on."""
    if _has_validation(config):
        return
    training = config.training
    split = " or dataset.validation_split=SPLIT" if config.dataset.source is Source.hub else ""
    fix = f"dataset.validation_share=0.05{split}"
    for field in ("evaluate_every_steps", "load_best_at_end", "early_stopping_patience"):
        value = getattr(training, field)
        if value not in (None, False):
            message = f"{as_typed(value)} needs documents to validate on, and none are held out"
            yield Finding(message, fix, key=f"training.{field}")


@rule("best-needs-evaluations")
def best_needs_evaluations(config: RunConfig) -> Iterator[Finding]:
    """Require `evaluate_every_steps` for settings that compare validation losses during the run."""
    training = config.training
    if training.evaluate_every_steps is not None:
        return
    for field in ("load_best_at_end", "early_stopping_patience"):
        value = getattr(training, field)
        if value not in (None, False):
            message = f"{as_typed(value)} compares validation losses, and the validation interval is not set"
            every = training.save_every_steps or min(100, max(1, training.max_steps or 100))
            fix = f"training.evaluate_every_steps={every}"
            if training.load_best_at_end and training.save_every_steps is None:
                fix += f" training.save_every_steps={every}"
            yield Finding(message, fix, key=f"training.{field}")


@rule("best-needs-checkpoints", "training.save_every_steps")
def best_needs_checkpoints(config: RunConfig) -> Finding | None:
    """Require `save_every_steps` to be set and a multiple of `evaluate_every_steps`.

    The best model is loaded from the checkpoint of its step.
    """
    training = config.training
    save, evaluate = training.save_every_steps, training.evaluate_every_steps
    if not training.load_best_at_end or evaluate is None or evaluate < 1:
        return None
    if save is None:
        message = "nothing is saved before the end, so there is no best checkpoint to load"
        return Finding(message, f"training.save_every_steps={evaluate}")
    if save % evaluate == 0:
        return None
    multiple = max(1, round(save / evaluate)) * evaluate
    message = f"{save} is not a multiple of training.evaluate_every_steps={evaluate}, so the best step is not saved"
    return Finding(message, f"training.save_every_steps={multiple}")


@rule("resume-not-found", "training.resume")
def resume_not_found(config: RunConfig) -> Finding | None:
    """Require auto (newest unfinished run of this configuration), never (a new run), or an existing folder."""
    value = config.training.resume
    if value in RESUME_WORDS or (value and resolve_path(value).is_dir()):
        return None
    word = nearest(value, RESUME_WORDS)
    message = f"'{value}' is neither auto nor never, and there is no folder {resolve_path(value)}"
    return Finding(message, f"training.resume={word or 'auto'}")


@rule("hub-name-form", "training.push_to_hub")
def hub_name_form(config: RunConfig) -> Finding | None:
    """Require OWNER/NAME: the hub would refuse another name only when the model is loaded."""
    name = config.training.push_to_hub
    if name is None or ("/" in name and is_hub_name(name)):
        return None
    return Finding(f"'{name}' does not have the form organization/name", "training.push_to_hub=null")


@rule("task-file-not-found", "evaluation.tasks")
def task_file_not_found(config: RunConfig) -> Iterator[Finding]:
    """Require every task file and file of problems to exist: they are read after the training, hours too late."""
    tasks = config.evaluation.tasks
    for task in tasks:
        file = task if is_task_file(task) else problems_of(task)
        if file is not None and not resolve_path(file).is_file():
            yield Finding(f"there is no file {resolve_path(file)}", without("evaluation.tasks", tasks, [task]))


@rule("evaluation-never-runs", is_error=False)
def evaluation_never_runs(config: RunConfig) -> Finding | None:
    """Warn about tasks without a time, or a time without tasks."""
    evaluation = config.evaluation
    if evaluation.tasks and not evaluation.before and not evaluation.after:
        message = "tasks are named, but evaluation.before and evaluation.after are both off"
        return Finding(message, "evaluation.after=true", key="evaluation.after")
    if evaluation.before and not evaluation.tasks:
        return Finding("there are no tasks to evaluate on", "evaluation.before=false", key="evaluation.before")
    return None
