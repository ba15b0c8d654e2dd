"""One evaluation from start to end: load the tasks, run each, write the record.

If a task fails, the others still run, and the failures are listed at the end.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.config.schema import RunConfig
from tunebook.errors import TunebookError, first_line
from tunebook.evaluate.code.judging import judge_programs, require_sandbox
from tunebook.evaluate.contamination import check_evaluated, with_scores
from tunebook.evaluate.harness import SEEDS, HarnessSettings, LoadedTask, load_tasks, prepare_environment, run_task
from tunebook.evaluate.placement import ONE_PROCESS, Placement
from tunebook.evaluate.results import choose_samples, resume_command, task_answers, task_scores
from tunebook.evaluate.task_files import Task
from tunebook.evaluate.trained_model import (
    bound_tokenizer,
    load_to_answer,
    model_identity,
    trained_architecture,
    uses_gpu,
)
from tunebook.files import atomic_write_json, atomic_write_text
from tunebook.model.processor import load_image_processor
from tunebook.record.answer_faults import count_faults
from tunebook.record.model_origin import Origin

if TYPE_CHECKING:
    from tunebook.evaluate.request_model import RequestModel

ANSWERS_FOLDER = "parts"  # of the kept answers of tasks


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One requested evaluation."""

    run: Path
    when: str  # before, after, or the name of a later evaluation; names the files
    config: RunConfig
    model: Path | None  # None: the weights that training starts from
    tasks: list[Task]
    trained: Origin | None = None  # the training's tokenizer, template and system prompt; None: unknown
    placement: Placement = ONE_PROCESS
    process: int = 0  # of the placement's processes; the first writes the results

    @property
    def folder(self) -> Path:
        """The folder of its files."""
        return self.run / "evaluation"

    @property
    def is_local(self) -> bool:
        """Whether the tasks, the model and its tokenizer are all local, so that the hub is not needed."""
        model = self.config.model
        is_model_local = model.path is not None and model.tokenizer is None
        return is_model_local and all(task.has_own_data for task in self.tasks)

    def report(self, text: str) -> None:
        """Print a line, in the first process."""
        if self.process == 0:
            print(f"evaluation {self.when}: {text}", file=sys.stderr, flush=True)


@dataclass(kw_only=True)
class _Results:
    """What the finished tasks gave, merged from the harness' results, and the errors of the others."""

    merged: dict[str, dict[str, Any]] = field(default_factory=dict)
    finished: list[LoadedTask] = field(default_factory=list)
    failed: dict[str, Exception] = field(default_factory=dict)


def evaluate(evaluation: Evaluation, started: float) -> None:
    """Run an evaluation that began at the monotonic time `started`, and write its record.

    The answers of every finished task are kept at once, and used by the next evaluation of the same model.
    Raises: RequestError for tasks that cannot be loaded; an error with the failed tasks after the results of the others
    are written.
    """
    require_sandbox(evaluation.tasks)
    prepare_environment(is_offline=evaluation.is_local)
    from lm_eval.models.utils import resolve_max_length

    config = evaluation.config
    evaluation.folder.mkdir(exist_ok=True)
    tokenizer, bound = bound_tokenizer(config, evaluation.model, evaluation.trained)
    file = evaluation.folder / f"{evaluation.when}.json"
    with tempfile.TemporaryDirectory(prefix="tunebook-evaluation-") as cache:
        settings = HarnessSettings(
            tokenizer=tokenizer,
            max_length=resolve_max_length(trained_architecture(config, evaluation.model), tokenizer),
            num_fewshot=config.evaluation.num_fewshot,
            limit=config.evaluation.limit,
            system_prompt=config.dataset.system_prompt,
            load_processor=lru_cache(
                partial(load_image_processor, config.model, tokenizer, config.dataset.max_image_pixels)
            ),
            download_images=config.dataset.download_images,
        )
        loaded = load_tasks(evaluation.tasks, Path(cache), settings)
        model = _load_model(evaluation, settings, bound)
        results = _run_tasks(evaluation, loaded, model, settings)
        if results.finished and evaluation.process == 0:
            _write_results(evaluation, results, bound | model.prompted(), model, file, started)
    if results.failed:
        raise _failure(results, file, resume_command(evaluation.run, evaluation.when))


def _load_model(evaluation: Evaluation, settings: HarnessSettings, bound: dict[str, Any]) -> RequestModel:
    """Load the model on its device, ready to answer."""
    from tunebook.evaluate.request_model import RequestModel

    config, placement = evaluation.config, evaluation.placement
    evaluation.report(f"{_describe_model(evaluation)} is loaded {placement.text}")
    model, dtype = load_to_answer(config, evaluation.model, is_sharded=placement.is_sharded)
    return RequestModel(
        model,
        settings.tokenizer,
        batch_size=config.evaluation.batch_size,
        compute_dtype=dtype,
        folder=evaluation.folder / ANSWERS_FOLDER,
        identity={
            "model": model_identity(config, evaluation.model),
            "tokenizer_sha256": bound["tokenizer_sha256"],
            "max_length": settings.max_length,
            "max_image_pixels": config.dataset.max_image_pixels,
            "harness_version": version("lm_eval"),
            "on_gpu": uses_gpu(config),
        },
        load_processor=settings.load_processor,
        process=evaluation.process,
        num_processes=placement.num_processes,
    )


def _run_tasks(
    evaluation: Evaluation, loaded: list[LoadedTask], model: RequestModel, settings: HarnessSettings
) -> _Results:
    """Run all tasks."""
    results = _Results()
    for number, task in enumerate(loaded, 1):
        name = task.source.name
        evaluation.report(f"{name} (task {number} of {len(loaded)})")
        try:
            task_results = run_task(model, task, settings)
            if not task.source.code:  # programs are judged at the end
                task_scores(task_results)  # refuses a score that is not finite
        except Exception as error:
            results.failed[name] = error
            if not isinstance(error, TunebookError):
                traceback.print_exc(file=sys.stderr)
            evaluation.report(f"{name}: failed, {describe_error(error)}")
            continue
        for key, value in task_results.items():
            results.merged.setdefault(key, {}).update(value)
        results.finished.append(task)
    if model.reused:
        evaluation.report(
            f"kept answers were used for {', '.join(model.reused)}; without {model.folder} they are computed again"
        )
    return results


def describe_error(error: Exception) -> str:
    """Describe an error in one line."""
    return first_line(error) if isinstance(error, TunebookError) else f"{type(error).__name__}: {first_line(error)}"


def _failure(results: _Results, file: Path, command: str) -> TunebookError:
    """Return the error of an evaluation with failed tasks, with the first one's exit code."""
    first = next(iter(results.failed.values()))
    failures = "; ".join(f"{name} ({describe_error(error)})" for name, error in results.failed.items())
    kept = f". The results of the others are in {file}; {command} evaluates again" if results.finished else ""
    count = f"{len(results.failed)} of {len(results.failed) + len(results.finished)} tasks failed"
    return TunebookError(
        f"{count}: {failures}{kept}", problem_id="evaluation-incomplete", exit_code=getattr(first, "exit_code", 1)
    )


def _write_results(
    evaluation: Evaluation, results: _Results, bound: dict[str, Any], model: RequestModel, file: Path, started: float
) -> None:
    """Have the programs judged; write the record and every answer."""
    config = evaluation.config.evaluation
    code = judge_programs(
        results.merged,
        [task.source for task in results.finished],
        evaluation.folder / f"{evaluation.when}-programs.jsonl",
        report=evaluation.report,
    )
    scores = task_scores(results.merged)
    answers = {name: task_answers(name, results.merged) for task in results.finished for name in task.content["tasks"]}
    all_answers = [answer for task in answers.values() for answer in task]
    lines = [json.dumps(asdict(answer), ensure_ascii=False) for answer in all_answers]
    atomic_write_text(evaluation.folder / f"{evaluation.when}-answers.jsonl", "\n".join([*lines, ""]))
    checked = check_evaluated(evaluation.run, evaluation.config, results.finished)
    record = {
        "when": evaluation.when,
        "model": _describe_model(evaluation),
        "device": bound.pop("device"),
        "bound": bound,
        "tasks": scores,
        "failed": {name: describe_error(error) for name, error in results.failed.items()},
        "samples": choose_samples(all_answers),
        "harness_version": version("lm_eval"),
        "seeds": SEEDS,
        "limit": config.limit,
        "batch_size": "auto" if config.batch_size is None else config.batch_size,
        "reused": model.reused,
        "code": code,
        "answer_faults": count_faults(answers, lambda text: len(model.tok_encode(text, add_special_tokens=False))),
        "contamination": with_scores(checked, answers, scores) if checked else None,
        "seconds": round(time.monotonic() - started, 1),
    }
    atomic_write_json(file, record)


def _describe_model(evaluation: Evaluation) -> str:
    if evaluation.model is not None:
        is_inside = evaluation.model.is_relative_to(evaluation.run)
        return str(evaluation.model.relative_to(evaluation.run) if is_inside else evaluation.model)
    model = evaluation.config.model
    return f"{model.name or model.path} ({model.weights.name} weights)"
