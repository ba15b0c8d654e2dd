"""Rules about validation, resuming and evaluation, and about the launcher and the text in its scripts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict

from tunebook.config.book import is_task_file, resolve_path
from tunebook.config.choices import RESUME_WORDS, LauncherName
from tunebook.config.keys import texts_of
from tunebook.config.launchers import LauncherConfig, RayConfig, SlurmConfig
from tunebook.config.schema import RunConfig
from tunebook.config.unsafe_text import shown
from tunebook.plan.rules.frame import Finding, rule


@rule("validation-missing", fix="dataset.validation_share=0.05 or dataset.validation_split=SPLIT")
def validation_missing(config: RunConfig) -> Iterator[Finding]:
    """Refuse evaluation in the run, the best model and early stopping without documents to measure on."""
    data, training = config.dataset, config.training
    if data.validation_split or data.validation_path or data.validation_share:
        return
    for field in ("evaluate_every_steps", "load_best_at_end", "early_stopping_patience"):
        if getattr(training, field):
            yield Finding("this needs documents to validate on, and there are none", f"training.{field}")


@rule("best-needs-evaluations", fix="training.evaluate_every_steps=100 training.save_every_steps=100")
def best_needs_evaluations(config: RunConfig) -> Iterator[Finding]:
    """Require validations during the run for early stopping and the best model, and checkpoints of their steps.

    Both compare validations, and the best model is loaded from the checkpoint of its step.
    """
    training, is_best = config.training, config.training.load_best_at_end
    evaluate, save = training.evaluate_every_steps, training.save_every_steps
    if evaluate is None and (is_best or training.early_stopping_patience):
        key = "training.load_best_at_end" if is_best else "training.early_stopping_patience"
        yield Finding("this compares validations, and training.evaluate_every_steps is not set", key)
    elif is_best and evaluate is not None and (save is None or save % evaluate):
        message = f"the best step is saved only if this is a multiple of evaluate_every_steps={evaluate}"
        yield Finding(message, "training.save_every_steps")


@rule("resume-not-found", "training.resume", "training.resume=auto")
def resume_not_found(config: RunConfig) -> Iterator[str]:
    """Require auto (newest unfinished run of this configuration), never (a new run), or an existing folder."""
    value = config.training.resume
    if value not in RESUME_WORDS and not (value and resolve_path(value).is_dir()):
        yield f"'{value}' is neither auto nor never, and there is no folder {resolve_path(value)}"


@rule("task-file-not-found", "evaluation.tasks", "a file that exists, or a task by its name: evaluation.tasks=[gsm8k]")
def task_file_not_found(config: RunConfig) -> Iterator[str]:
    """Require every task file to exist: it is read after the training, hours too late."""
    for task in config.evaluation.tasks:
        if is_task_file(task) and not resolve_path(task).is_file():
            yield f"there is no file {resolve_path(task)}"


# sbatch options that the rendered script sets, and those that would run the same folder more than once.
_RESERVED = {
    *("--array", "-a", "--wrap", "--signal", "--output", "-o", "--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node"),
    *("--requeue", "--no-requeue", "--time", "-t", "--wait", "-W", "--parsable"),
}
# Text for the model and names inside data files: no script uses it, so it may hold anything.
_FREE = {
    *("system_prompt", "pad_token", "eos_token", "text_field", "ignore_keys", "chat_template_kwargs"),
    *("question_template", "answer_template"),
}
_SCHEMAS = {LauncherName.local: LauncherConfig, LauncherName.slurm: SlurmConfig, LauncherName.ray: RayConfig}


@rule("launcher-settings-mismatch", "launcher.name", "launcher=slurm, launcher=ray or launcher=local")
def launcher_settings_mismatch(config: RunConfig) -> Iterator[str]:
    """Refuse a launcher in another launcher's schema; slurm and ray have their own schemas.

    Changing only launcher.name leaves the other launcher's settings in place; choose the group, such as
    launcher=slurm.
    """
    if type(config.launcher) is not _SCHEMAS[config.launcher.name]:
        yield f"{config.launcher.name.name} is set in a group with the settings of another launcher"


@rule("node-rank-range")
def node_rank_range(config: RunConfig) -> Iterator[Finding]:
    """Refuse a node rank beyond the last node, and a later node without the address of node 0.

    With launcher=local, each node is started by hand. Node 0 prepares the data and starts the run.
    """
    launcher, num_nodes = config.launcher, config.hardware.num_nodes
    if launcher.name is not LauncherName.local:
        return
    if launcher.node_rank >= num_nodes:
        message = f"{launcher.node_rank} is beyond the last of {num_nodes} nodes, numbered from 0"
        yield Finding(message, "launcher.node_rank", f"hardware.num_nodes={launcher.node_rank + 1}")
    elif launcher.node_rank and not launcher.master_address:
        message = f"node {launcher.node_rank} needs the name or address of node 0"
        yield Finding(message, "launcher.master_address", "launcher.master_address=HOST")


@rule(
    "sbatch-option-reserved",
    "launcher.extra_args",
    "hardware.num_nodes, launcher.time_limit, launcher.requeue, launcher.wait or launcher.stop_timeout_s instead",
)
def sbatch_option_reserved(config: RunConfig) -> Iterator[str]:
    """Refuse sbatch options that Tunebook sets: output, nodes, warning and requeue belong together.

    An array would run every task in the same run folder; `tunebook sweep` starts several runs.
    """
    for option in config.launcher.extra_args if isinstance(config.launcher, SlurmConfig) else []:
        # --nodes of --nodes=3 and "--nodes 3", -N of -N3
        name = re.split(r"[=\s]", option, maxsplit=1)[0] if option.startswith("--") else option[:2]
        if name in _RESERVED:
            yield f"Tunebook sets {name} itself"


@rule("ray-settings-form")
def ray_settings_form(config: RunConfig) -> Iterator[Finding]:
    """Require auto, local or HOST:PORT as Ray's address.

    A Ray client's address (ray://) reaches a proxy, which Ray Train does not run through.
    """
    settings = config.launcher
    if not isinstance(settings, RayConfig):
        return
    if settings.address not in ("auto", "local") and not re.fullmatch(r"[^/:\s]+:\d{1,5}", settings.address):
        message = f"'{settings.address}' is neither auto, local nor HOST:PORT"
        yield Finding(message, "launcher.address", "launcher.address=auto")


@rule("control-characters", fix="type the text without it")
def control_characters(config: RunConfig) -> Iterator[Finding]:
    """Refuse control characters in all text except text that only a model or a data file uses.

    Values reach job scripts and command lines. A line break there ends a comment or an option, and what follows would
    be run as a command. A terminal would obey an escape.
    """
    for key, text in texts_of(asdict(config)):
        if shown(text) != text and _FREE.isdisjoint(key.split(".")):
            yield Finding(f"{shown(text)} holds a control character", shown(key))
