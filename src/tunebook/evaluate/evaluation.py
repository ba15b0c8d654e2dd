"""One evaluation from start to end: load the tasks, reuse or compute each result, write the record."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tunebook.config.book import resolve_path
from tunebook.config.choices import Source
from tunebook.config.schema import RunConfig
from tunebook.errors import RequestError
from tunebook.evaluate.code.judging import judge_programs, require_sandbox
from tunebook.evaluate.contamination import check_evaluated, check_run, with_scores
from tunebook.evaluate.harness import SEEDS, HarnessSettings, load_tasks, prepare_environment
from tunebook.evaluate.placement import ONE_PROCESS, Placement
from tunebook.evaluate.results import Answer, choose_samples, task_answers, task_scores, with_cuts
from tunebook.evaluate.resume import FOLDER as RESULTS_FOLDER
from tunebook.evaluate.resume import ResultCache, model_identity, resume_command
from tunebook.evaluate.task_files import Task
from tunebook.evaluate.task_runs import TaskRuns, describe_error, failure
from tunebook.evaluate.trained_model import (
    load_padded_tokenizer,
    load_to_answer,
    tokenizer_of_run,
    trained_architecture,
    uses_gpu,
)
from tunebook.files import atomic_write_json, atomic_write_text
from tunebook.model.adapters import is_adapter
from tunebook.record.answer_faults import count_faults
from tunebook.record.model_origin import Origin, check_base, check_bound

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tunebook.evaluate.request_model import RequestModel


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One requested evaluation."""

    run: Path
    when: str  # before, after, or the name of a later evaluation; names the files
    config: RunConfig
    model: Path | None  # None: the weights that training starts from
    tasks: list[Task]
    trained: Origin | None = None  # the training's tokenizer, template and system prompt; None: unknown
    allowed: tuple[str, ...] = ()  # those of `trained` that may differ
    is_fresh: bool = False  # evaluate finished tasks again
    placement: Placement = ONE_PROCESS
    process: int = 0  # of the placement's processes; the first writes the results

    @property
    def folder(self) -> Path:
        """The folder of its files."""
        return self.run / "evaluation"

    def say(self, text: str) -> None:
        """Print a line, in the first process."""
        if self.process == 0:
            print(f"evaluation {self.when}: {text}", file=sys.stderr, flush=True)


def evaluate(evaluation: Evaluation, started: float) -> Path:
    """Run an evaluation that began at the monotonic time `started`; return the file of its record.

    Every finished task is saved at once and reused by the next evaluation of the same model with the same request.
    Raises: the first failed task's error, after the results of the others are written.
    """
    if not evaluation.tasks:
        raise RequestError(
            "evaluation.tasks is empty, so there is nothing to evaluate; name tasks, such as "
            "evaluation.tasks=[book:recipes/quickstart/tasks/quickstart.yaml]",
            problem_id="no-tasks",
        )
    require_sandbox(evaluation.tasks)
    prepare_environment(is_offline=_is_local(evaluation))
    evaluation.folder.mkdir(exist_ok=True)
    tokenizer, bound = _bound_tokenizer(evaluation)
    with tempfile.TemporaryDirectory(prefix="tunebook-evaluation-") as cache:
        runs = _task_runs(evaluation, tokenizer, bound, Path(cache))
        runs.run()
    file = evaluation.folder / f"{evaluation.when}.json"
    if runs.done and evaluation.process == 0:
        _write_results(evaluation, runs, bound, file, started)
    if error := failure(runs, str(file), resume_command(evaluation.run, evaluation.when)):
        raise error
    return file


def check_contamination(evaluation: Evaluation) -> None:
    """Look for the tasks' items and the validation part in the training documents, and write what was found."""
    prepare_environment(is_offline=_is_local(evaluation))
    check_run(evaluation.run, evaluation.config, evaluation.tasks)


def _task_runs(
    evaluation: Evaluation,
    tokenizer: PreTrainedTokenizerBase,
    bound: dict[str, Any],
    cache: Path,
) -> TaskRuns:
    from lm_eval.models.utils import resolve_max_length

    config = evaluation.config
    settings = HarnessSettings(
        tokenizer=tokenizer,
        max_length=resolve_max_length(trained_architecture(config, evaluation.model), tokenizer),
        num_fewshot=config.evaluation.num_fewshot,
        limit=config.evaluation.limit,
        system_prompt=config.dataset.system_prompt,
        items_folder=evaluation.folder,
        cache_folder=cache,
    )

    def load_model() -> RequestModel:
        evaluation.say(f"{_describe_model(evaluation)} is loaded {evaluation.placement.text}")
        return _load(evaluation, tokenizer)

    return TaskRuns(
        loaded=load_tasks(evaluation.tasks, settings),
        settings=settings,
        ingredients={
            "model": model_identity(config, evaluation.model),
            "tokenizer_sha256": bound["tokenizer_sha256"],
            "chat_template_sha256": bound["chat_template_sha256"],
            "system_prompt": settings.system_prompt,
            "num_fewshot": settings.num_fewshot,
            "limit": settings.limit,
            "max_length": settings.max_length,
            "seeds": SEEDS,
            "harness_version": version("lm_eval"),
            "on_gpu": uses_gpu(config),
        },
        cache=ResultCache(folder=evaluation.folder / RESULTS_FOLDER),
        load_model=load_model,
        say=evaluation.say,
        is_fresh=evaluation.is_fresh,
    )


def _is_local(evaluation: Evaluation) -> bool:
    """Return whether the tasks, the model and its tokenizer are all local, so that the hub is not needed."""
    model = evaluation.config.model
    is_model_local = model.path is not None and model.tokenizer is None
    return is_model_local and all(task.has_own_data for task in evaluation.tasks)


def _bound_tokenizer(evaluation: Evaluation) -> tuple[PreTrainedTokenizerBase, dict[str, Any]]:
    """Load the run's tokenizer and compare it with the training's; return it and the record of the comparison.

    If the model needs the weights that the run started from, they are compared too.
    """
    config, trained = evaluation.config, evaluation.trained
    tokenizer = load_padded_tokenizer(tokenizer_of_run(config.model, evaluation.model))
    bound = check_bound(trained, tokenizer, config.dataset.system_prompt, evaluation.allowed)
    if evaluation.model is None or is_adapter(evaluation.model):
        bound["mismatches"] = [*bound["mismatches"], *check_base(trained, config.model, evaluation.allowed)]
    return tokenizer, bound


def _load(evaluation: Evaluation, tokenizer: PreTrainedTokenizerBase) -> RequestModel:
    """Load the model on its device, ready to answer."""
    from tunebook.evaluate.request_model import RequestModel

    config = evaluation.config
    model, dtype, note = load_to_answer(config, evaluation.model, is_sharded=evaluation.placement.is_sharded)
    if note:
        evaluation.say(note)
    return RequestModel(
        model,
        tokenizer,
        batch_size=config.evaluation.batch_size,
        compute_dtype=dtype,
        process=evaluation.process,
        num_processes=evaluation.placement.num_processes,
    )


def _write_results(evaluation: Evaluation, runs: TaskRuns, bound: dict[str, Any], file: Path, started: float) -> None:
    """Have the programs judged; write the record and every answer."""
    scores = runs.scores()
    answers = {name: result.answers for name, result in runs.done.items()}
    results = runs.generated()
    finished = [task for task in evaluation.tasks if task.name in runs.done]
    code = judge_programs(
        results,
        finished,
        evaluation.folder / f"{evaluation.when}-programs.jsonl",
        say=evaluation.say,
    )
    if code is not None:
        scores |= task_scores(results)
        answers |= {name: with_cuts(task_answers(name, results), answers[name]) for name in code["tasks"]}
    everything = [answer for found in answers.values() for answer in found]
    lines = [json.dumps(asdict(answer), ensure_ascii=False) for answer in everything]
    atomic_write_text(evaluation.folder / f"{evaluation.when}-answers.jsonl", "\n".join([*lines, ""]))
    record = _record(evaluation, runs, bound, scores, everything)
    record["code"] = code
    record["answer_faults"] = count_faults(answers)
    finished_tasks = {name: task for name, task in runs.loaded.tasks.items() if name in runs.done}
    checked = check_evaluated(evaluation.run, evaluation.config, finished_tasks)
    record["contamination"] = with_scores(checked, answers, scores) if checked else None
    record["seconds"] = round(time.monotonic() - started, 1)
    atomic_write_json(file, record)


def _record(
    evaluation: Evaluation, runs: TaskRuns, bound: dict[str, Any], scores: dict[str, Any], answers: list[Answer]
) -> dict[str, Any]:
    config = evaluation.config.evaluation
    prompted = next(iter(runs.done.values())).bound
    return {
        "when": evaluation.when,
        "model": _describe_model(evaluation),
        "bound": bound | {key: value for key, value in prompted.items() if key != "device"},
        "tasks": scores,
        "failed": {name: describe_error(error) for name, error in runs.failed.items()},
        "samples": choose_samples(answers),
        "baseline": score_first_baseline(evaluation),
        "harness_version": version("lm_eval"),
        "seeds": SEEDS,
        "limit": evaluation.config.evaluation.limit,
        "batch_size": "auto" if config.batch_size is None else config.batch_size,
        "batch_sizes": {name: result.batch_size for name, result in runs.done.items()},
        "device": prompted["device"],
        "spread": {
            "text": evaluation.placement.text,
            "processes": evaluation.placement.num_processes,
            "is_sharded": evaluation.placement.is_sharded,
        },
        "taken": runs.reused,
    }


def _describe_model(evaluation: Evaluation) -> str:
    if evaluation.model is not None:
        is_inside = evaluation.model.is_relative_to(evaluation.run)
        return str(evaluation.model.relative_to(evaluation.run) if is_inside else evaluation.model)
    model = evaluation.config.model
    return f"{model.name or model.path} ({model.weights.name} weights)"


def score_first_baseline(evaluation: Evaluation) -> dict[str, Any] | None:
    """Score the first task that has a baseline, on the same items and the file that the run trains on.

    None without such a task or file, and with a limit, because a baseline always answers every item.
    """
    dataset = evaluation.config.dataset
    if dataset.source is not Source.files or dataset.path is None or evaluation.config.evaluation.limit is not None:
        return None
    train_file = resolve_path(dataset.path)
    for task in evaluation.tasks if train_file.is_file() else ():
        if task.baseline is not None and task.conversations is not None:
            return score_baseline(task.baseline, train_file, task.conversations)
    return None


def score_baseline(file: Path, train_file: Path, heldout_file: Path) -> dict[str, Any]:
    """Score a task's items without a model, by the Python file that its `metadata.baseline` names.

    The file defines `NAME`, a short text, and `score(train_file, heldout_file) -> dict[str, float]`: the share of
    held-out items answered correctly, under `overall` and under each group. Returns: `{name, value, groups: {group:
    {value}}}`. Raises: RequestError for a file that breaks this contract.
    """
    module = _import_file(file)
    try:
        scores: dict[str, float] = dict(module.score(train_file, heldout_file))
        name, overall = str(module.NAME), float(scores.pop("overall"))
    except (AttributeError, KeyError) as error:
        raise RequestError(
            f"{file}, a task's baseline, must define NAME and score(train_file, heldout_file), which returns a share "
            f"under 'overall': {type(error).__name__} {error}",
            problem_id="task-file",
        ) from error
    return {"name": name, "value": overall, "groups": {group: {"value": scores[group]} for group in sorted(scores)}}


def _import_file(file: Path) -> ModuleType:
    spec = spec_from_file_location(f"tunebook_baseline_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.path.insert(0, str(file.parent))  # it may import files next to it, such as the data generator
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(file.parent))
    return module
