"""One evaluation from start to end: load the model, run the harness, write the record."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.config.book import resolve_path
from tunebook.config.choices import Source
from tunebook.config.schema import RunConfig
from tunebook.errors import RequestError
from tunebook.evaluate.baseline import score_baseline
from tunebook.evaluate.bound_model import check_tokenizer, compute_dtype, load_trained, uses_gpu
from tunebook.evaluate.harness import SEEDS, HarnessSettings, is_rendered, prepare_environment, run_harness
from tunebook.evaluate.progress import AnswerProgress
from tunebook.evaluate.results import Answer, choose_samples, task_answers, task_scores
from tunebook.evaluate.task_files import TaskFile
from tunebook.record.atomic_files import atomic_write_json, atomic_write_text

if TYPE_CHECKING:
    from tunebook.evaluate.run_model import RunModel


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One evaluation to do."""

    run: Path
    when: str  # before, after, or the name of a later evaluation; names the files
    config: RunConfig
    model: Path | None  # None: the weights that training starts from
    tasks: list[TaskFile | str]
    limit: int | None  # items per task; None: all


def evaluate(evaluation: Evaluation, started: float) -> Path:
    """Do it and write its record; seconds are counted from `started`, a monotonic time. Returns the record's file."""
    if not evaluation.tasks:
        raise RequestError(
            "evaluation.tasks is empty, so there is nothing to evaluate; name tasks, such as "
            "evaluation.tasks=[book:recipes/quickstart/tasks/quickstart.yaml]",
            problem_id="no-tasks",
        )
    prepare_environment(is_offline=_is_local(evaluation))
    folder = evaluation.run / "evaluation"
    folder.mkdir(exist_ok=True)
    with AnswerProgress(f"evaluation {evaluation.when}") as progress, tempfile.TemporaryDirectory() as cache:
        model = _load(evaluation, progress)
        settings = HarnessSettings(
            num_fewshot=evaluation.config.evaluation.num_fewshot,
            limit=evaluation.limit,
            system_prompt=evaluation.config.dataset.system_prompt,
            items_folder=folder,
            cache_folder=Path(cache),
        )
        results = run_harness(model, evaluation.tasks, settings)
    answers = [answer for name in results["samples"] for answer in task_answers(name, results)]
    _write_answers(answers, folder / f"{evaluation.when}-answers.jsonl")
    record = _record(evaluation, model, results, answers)
    record["seconds"] = round(time.monotonic() - started, 1)
    file = folder / f"{evaluation.when}.json"
    atomic_write_json(file, record)
    return file


def _is_local(evaluation: Evaluation) -> bool:
    """Whether neither the tasks nor the model and its tokenizer can need the hub."""
    model = evaluation.config.model
    is_model_local = model.path is not None and model.tokenizer is None
    return is_model_local and all(is_rendered(task) for task in evaluation.tasks)


def _load(evaluation: Evaluation, progress: AnswerProgress) -> RunModel:
    """The model on its device with the run's tokenizer, whose template must be the one that was trained with."""
    from tunebook.evaluate.run_model import RunModel
    from tunebook.model.tokenizer import load_tokenizer

    config = evaluation.config
    tokenizer = load_tokenizer(config.model)
    check_tokenizer(evaluation.run, tokenizer)
    model: Any = load_trained(config, evaluation.model)
    if uses_gpu(config):
        model = model.to("cuda")
    return RunModel(
        model,
        tokenizer,
        batch_size=config.evaluation.batch_size,
        compute_dtype=compute_dtype(config),
        progress=progress,
    )


def _record(evaluation: Evaluation, model: RunModel, results: dict[str, Any], answers: list[Answer]) -> dict[str, Any]:
    config = evaluation.config.evaluation
    return {
        "when": evaluation.when,
        "model": _describe_model(evaluation),
        "tasks": task_scores(results),
        "samples": choose_samples(answers),
        "baseline": score_first_baseline(evaluation),
        "harness_version": version("lm_eval"),
        "seeds": SEEDS,
        "limit": evaluation.limit,
        "batch_size": config.batch_size,
        "device": str(model.device),
    }


def _describe_model(evaluation: Evaluation) -> str:
    if evaluation.model is not None:
        is_inside = evaluation.model.is_relative_to(evaluation.run)
        return str(evaluation.model.relative_to(evaluation.run) if is_inside else evaluation.model)
    model = evaluation.config.model
    return f"{model.name or model.path} ({model.weights.name} weights)"


def score_first_baseline(evaluation: Evaluation) -> dict[str, Any] | None:
    """The score of the first task that has a baseline, on the same items and the file that the run trains on.

    None where there is no such task, no such one file, or a limit: a baseline always answers every item.
    """
    dataset = evaluation.config.dataset
    if dataset.source is not Source.files or dataset.path is None or evaluation.limit is not None:
        return None
    train_file = resolve_path(dataset.path)
    for task in evaluation.tasks if train_file.is_file() else ():
        if isinstance(task, TaskFile) and task.baseline is not None and task.conversations is not None:
            return score_baseline(task.baseline, train_file, task.conversations)
    return None


def _write_answers(answers: Iterable[Answer], file: Path) -> None:
    lines = [json.dumps(asdict(answer), ensure_ascii=False) for answer in answers]
    atomic_write_text(file, "\n".join([*lines, ""]))
