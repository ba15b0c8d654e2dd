"""`python -m tunebook.evaluate --run DIR --when before|after`: one evaluation, in a process of its own.

Before: the very weights that training starts from, made or loaded as training does it. After: the run folder's
`model/`. Both with the run's own tokenizer and chat template. Writes `evaluation/<when>.json` in the run folder, and
every answer to `evaluation/<when>-answers.jsonl`.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

from tunebook.config.frozen import load_config
from tunebook.errors import RequestError, TunebookError
from tunebook.evaluate.evaluation import Evaluation, evaluate
from tunebook.evaluate.suites import suite_settings
from tunebook.evaluate.task_files import resolve_task
from tunebook.model.adapters import holds_model

AFTER = "after"


def main(words: list[str] | None = None) -> int:
    """Run one evaluation from the command line; the exit code is the error's."""
    started = time.monotonic()
    try:
        evaluate(_read_request(words), started)
    except TunebookError as error:
        print(f"evaluation: {error.message}", file=sys.stderr)
        return error.exit_code
    return 0


def _read_request(words: list[str] | None) -> Evaluation:
    parser = argparse.ArgumentParser(prog="python -m tunebook.evaluate")
    parser.add_argument("--run", type=Path, required=True, help="the run folder, with its run.yaml")
    parser.add_argument("--when", required=True, help="before, after, or a name for a later evaluation")
    parser.add_argument("--model", type=Path, help="a model folder; default: model/ of the run when --when after")
    parser.add_argument("--suite", help="instead of the run's own evaluation settings")
    parser.add_argument("--task", action="append", help="instead of evaluation.tasks; may be repeated")
    parser.add_argument("--limit", type=int, help="items per task; default: evaluation.limit")
    request = parser.parse_args(words)
    run: Path = request.run.absolute()
    config = load_config(run / "run.yaml")
    if request.suite is not None:
        config = replace(config, evaluation=suite_settings(request.suite, config))
    model: Path | None = request.model
    if model is None and request.when == AFTER:
        model = run / "model"
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
        tasks=[resolve_task(task) for task in request.task or config.evaluation.tasks],
        limit=config.evaluation.limit if request.limit is None else request.limit,
    )
