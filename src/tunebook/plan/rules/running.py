"""Rules about validation, resuming and evaluation."""

from __future__ import annotations

from collections.abc import Iterator

from tunebook.config.book import is_task_file, resolve_path
from tunebook.config.choices import RESUME_WORDS
from tunebook.config.schema import RunConfig
from tunebook.plan.rules.frame import Finding, rule


@rule("validation-missing", fix="dataset.validation_share=0.05 or dataset.validation_split=SPLIT")
def validation_missing(config: RunConfig) -> Iterator[Finding]:
    """Refuse evaluation in the run, the best model and early stopping without documents to measure on."""
    data, training = config.dataset, config.training
    if data.validation_split or data.validation_path or data.validation_share:
        return
    for field in ("evaluate_every_steps", "load_best_at_end", "early_stopping_patience"):
        if getattr(training, field):
            yield Finding("this needs documents to validate on, and none are held out", f"training.{field}")


@rule("best-needs-evaluations", fix="training.evaluate_every_steps=100 training.save_every_steps=100")
def best_needs_evaluations(config: RunConfig) -> Iterator[Finding]:
    """Require validations during the run for early stopping and the best model, and checkpoints of their steps.

    Both compare validation losses, and the best model is loaded from the checkpoint of its step.
    """
    training, is_best = config.training, config.training.load_best_at_end
    evaluate, save = training.evaluate_every_steps, training.save_every_steps
    if evaluate is None and (is_best or training.early_stopping_patience):
        key = "training.load_best_at_end" if is_best else "training.early_stopping_patience"
        yield Finding("this compares validation losses, and training.evaluate_every_steps is not set", key)
    elif is_best and evaluate is not None and (save is None or save % evaluate):
        message = f"the best step is not always saved: it must be a multiple of evaluate_every_steps={evaluate}"
        yield Finding(message, "training.save_every_steps")


@rule("resume-not-found", "training.resume", "training.resume=auto")
def resume_not_found(config: RunConfig) -> Iterator[str]:
    """Require auto (newest unfinished run of this configuration), never (a new run), or an existing folder."""
    value = config.training.resume
    if value not in RESUME_WORDS and not (value and resolve_path(value).is_dir()):
        yield f"'{value}' is neither auto nor never, and there is no folder {resolve_path(value)}"


@rule("task-file-not-found", "evaluation.tasks", "evaluation.tasks=[gsm8k], with files that exist")
def task_file_not_found(config: RunConfig) -> Iterator[str]:
    """Require every task file to exist: it is read after the training, hours too late."""
    for task in config.evaluation.tasks:
        if is_task_file(task) and not resolve_path(task).is_file():
            yield f"there is no file {resolve_path(task)}"
