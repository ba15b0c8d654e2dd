"""Named sets of tasks for `tunebook eval suite=NAME`: the evaluation groups of the book, and `quick`.

A group is taken as a whole, as `evaluation=NAME` would in a training: its tasks, limit, examples and batch size.
`quick` is the local tasks that the run's recipe ships, which need no download, with the run's own other settings.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tunebook.config.book import book_root, recipe_folders
from tunebook.config.interpolation import to_object
from tunebook.config.schema import EvaluationConfig, RunConfig
from tunebook.errors import RequestError, did_you_mean
from tunebook.evaluate.task_files import is_task_file

QUICK = "quick"


def suite_settings(name: str, config: RunConfig) -> EvaluationConfig:
    """What a suite evaluates for a run of this configuration.

    Raises: RequestError for an unknown suite, with the nearest, and for `quick` where the recipe ships no tasks.
    """
    if name == QUICK:
        return _quick(config)
    groups = _groups()
    if name not in groups:
        known = sorted([*groups, QUICK])
        raise RequestError(
            f"there is no suite '{name}'.{did_you_mean(name, known)} Suites: {', '.join(known)}. Single tasks of "
            "lm-evaluation-harness, or YAML files of your own, are named by tasks=a,b",
            problem_id="unknown-suite",
        )
    return groups[name]


def _groups() -> dict[str, EvaluationConfig]:
    """The evaluation groups of the book that name tasks, by name."""
    found = {}
    for file in sorted((book_root() / "hydra_configs" / "evaluation").glob("*.yaml")):
        settings = _read_group(file)
        if settings is not None and settings.tasks:
            found[file.stem] = settings
    return found


def _read_group(file: Path) -> EvaluationConfig | None:
    """One group over the schema's defaults; None where its tasks are left to the user."""
    try:
        values = OmegaConf.create(yaml.safe_load(file.read_text(encoding="utf-8")) or {})
        merged = OmegaConf.merge(OmegaConf.structured(EvaluationConfig), values)
        if OmegaConf.is_missing(merged, "tasks"):
            return None
        settings = to_object(merged)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise RequestError(
            f"{file} is no evaluation group: {str(error).splitlines()[0]}; its keys are those of `evaluation`",
            problem_id="suite-file",
        ) from error
    assert isinstance(settings, EvaluationConfig)
    return settings


def _quick(config: RunConfig) -> EvaluationConfig:
    tasks = _shipped_tasks(config.recipe) if config.recipe else []
    tasks = tasks or [task for task in config.evaluation.tasks if is_task_file(task)]
    if not tasks:
        missing = f"{config.recipe} ships none" if config.recipe else "this run has no recipe"
        raise RequestError(
            f"suite={QUICK} is the tasks that a run's recipe ships in its folder tasks/, and {missing}; name another "
            f"suite ({', '.join(sorted(_groups()))}), or tasks=a,b",
            problem_id="unknown-suite",
        )
    return replace(config.evaluation, tasks=tasks)


def _shipped_tasks(recipe: str) -> list[str]:
    folders = (folder / recipe / "tasks" for folder in recipe_folders([]))
    return [str(file) for folder in folders for file in sorted(folder.glob("*.yaml"))]
