"""`python -m tunebook.evaluate --run DIR --when before|after`: one evaluation, in a process of its own.

Before: the very weights that training starts from, made or loaded as training does it. After: the run folder's
`model/`. Both with the run's own tokenizer and chat template. Writes `evaluation/<when>.json` in the run folder, and
every answer to `evaluation/<when>-answers.jsonl`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from tunebook.checkpoint.verify import MODEL_FOLDER, require_unchanged_model
from tunebook.config.frozen import load_config
from tunebook.config.schema import EvaluationConfig
from tunebook.errors import RequestError, TunebookError
from tunebook.evaluate.batch_size import read_batch_size
from tunebook.evaluate.code.checks import with_samples
from tunebook.evaluate.code.choice import take_words
from tunebook.evaluate.evaluation import Evaluation, evaluate, help_evaluate
from tunebook.evaluate.full_disk import full_disk
from tunebook.evaluate.going_on import AFTER, what_goes_on
from tunebook.evaluate.helping import leave_signals_to_the_first
from tunebook.evaluate.spread import choose_spread, is_for_gpus, loaded_gib
from tunebook.evaluate.suites import suite_settings
from tunebook.evaluate.task_files import resolve_task
from tunebook.hardware.detect import detect_machine
from tunebook.hardware.disk import is_disk_full
from tunebook.model.adapters import holds_model
from tunebook.record.binding import MISMATCHES, recorded_beside, recorded_by_run
from tunebook.record.files import RUN_FILE


def main(words: list[str] | None = None) -> int:
    """Run one evaluation from the command line; the exit code is the error's."""
    started = time.monotonic()
    words = sys.argv[1:] if words is None else words
    request = _parse(words)
    try:
        evaluation = _evaluation_of(request)
        if request.helper is not None:
            leave_signals_to_the_first()
            help_evaluate(evaluation, request.helper)
            return 0
        evaluate(_spread_out(evaluation, request.processes, words), started)
    except TunebookError as error:
        print(f"evaluation: {error.message}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        if not is_disk_full(error):
            raise
        run = request.run.absolute()
        problem = full_disk(run / "evaluation", what_goes_on(run, request.when))
        print(f"evaluation: {problem.message}", file=sys.stderr)
        return problem.exit_code
    return 0


def _parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tunebook.evaluate")
    parser.add_argument("--run", type=Path, required=True, help="the run folder, with its run.yaml")
    parser.add_argument("--when", required=True, help="before, after, or a name for a later evaluation")
    parser.add_argument("--model", type=Path, help="a model folder; default: model/ of the run when --when after")
    parser.add_argument("--suite", help="instead of the run's own evaluation settings")
    parser.add_argument("--task", action="append", help="instead of evaluation.tasks; may be repeated")
    parser.add_argument("--limit", type=int, help="items per task; default: evaluation.limit")
    parser.add_argument("--code", action="append", default=[], help="evaluation.code.KEY=VALUE, instead of the run's")
    parser.add_argument("--confirm_run_unsafe_code", action="store_true", help="run programs without a sandbox")
    parser.add_argument("--num-fewshot", type=int, help="examples before each item; default: the task's own")
    parser.add_argument("--batch-size", help="requests at once, or auto; default: evaluation.batch_size")
    parser.add_argument("--fresh", action="store_true", help="evaluate finished tasks once more")
    parser.add_argument("--processes", type=int, help="that share the requests; default: one for each GPU")
    parser.add_argument("--helper", type=int, help="the descriptor of a pipe, in a process that answers another's")
    parser.add_argument("--allow-mismatch", action="append", default=[], choices=MISMATCHES, help="what may differ")
    parser.add_argument("--config", type=Path, help="of a model that belongs to no run; default: run.yaml")
    return parser.parse_args(words)


def _evaluation_of(request: argparse.Namespace) -> Evaluation:
    run: Path = request.run.absolute()
    config = load_config(request.config or run / RUN_FILE)
    if request.suite is not None:
        config = replace(config, evaluation=suite_settings(request.suite, config))
    config = replace(config, evaluation=_with_options(config.evaluation, request))
    named = request.task or config.evaluation.tasks
    model: Path | None = request.model
    if model is None and request.when == AFTER:
        model = run / MODEL_FOLDER
        require_unchanged_model(run)
    if model is not None and not holds_model(model):
        raise RequestError(
            f"{model} has neither config.json nor adapter_config.json, so there is no model to "
            "evaluate; name a model folder with --model",
            problem_id="model-folder",
        )
    return Evaluation(
        run=run,
        when=request.when,
        config=config,
        model=None if model is None else model.absolute(),
        tasks=[with_samples(resolve_task(task), config.evaluation.code) for task in named],
        limit=config.evaluation.limit,
        trained=recorded_by_run(run) if request.config is None else recorded_beside(model),
        allowed=tuple(request.allow_mismatch),
        is_fresh=request.fresh,
    )


def _spread_out(evaluation: Evaluation, num_processes: int | None, words: list[str]) -> Evaluation:
    """The evaluation with the GPUs that it uses; this process sees only its own from here on."""
    config = evaluation.config
    gpus = detect_machine().gpus if is_for_gpus(config) else []
    spread = choose_spread(loaded_gib(config, evaluation.model) if gpus else None, gpus, num_processes)
    os.environ.update(spread.environments(os.environ)[0])
    helper_command = (sys.executable, "-m", "tunebook.evaluate", *words, "--helper")
    return replace(evaluation, spread=spread, helper_command=helper_command)


def _with_options(settings: EvaluationConfig, request: argparse.Namespace) -> EvaluationConfig:
    """The settings with what the command line says instead."""
    said = {key: getattr(request, key) for key in ("limit", "num_fewshot")}
    settings = replace(settings, **{key: value for key, value in said.items() if value is not None})
    is_unsafe = settings.confirm_run_unsafe_code or request.confirm_run_unsafe_code
    settings = replace(take_words(settings, request.code), confirm_run_unsafe_code=is_unsafe)
    if request.batch_size is None:
        return settings
    return replace(settings, batch_size=read_batch_size(request.batch_size))
