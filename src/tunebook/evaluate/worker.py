"""`python -m tunebook.evaluate --run DIR --when before|after`: one evaluation, in its own process.

Before: the exact weights that training starts from, made or loaded as in training. After: the run folder's `model/`.
Both use the run's own tokenizer and chat template. Writes `evaluation/<when>.json` in the run folder, and every answer
to `evaluation/<when>-answers.jsonl`. `--when contamination` does not evaluate: it looks for the tasks' items in the
training documents, and writes `contamination.json`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from tunebook.checkpoint.verify import require_unchanged_model
from tunebook.config.frozen import load_config
from tunebook.errors import RequestError, TunebookError
from tunebook.evaluate.contamination import check_run
from tunebook.evaluate.evaluation import Evaluation, evaluate
from tunebook.evaluate.harness import prepare_environment
from tunebook.evaluate.placement import place
from tunebook.evaluate.results import AFTER
from tunebook.evaluate.task_files import resolve_tasks
from tunebook.evaluate.trained_model import uses_gpu
from tunebook.model.adapters import holds_model
from tunebook.processes import die_with_parent, ending, free_port
from tunebook.record.contamination import CHECK
from tunebook.record.model_origin import origin_of, read_origin
from tunebook.record.run_folder import LOG_FILE, MODEL_FOLDER, RUN_FILE
from tunebook.terminal import quiet_libraries


def main(arguments: list[str] | None = None) -> int:
    """Run one evaluation, in a process for each copy of the model; return the exit code, which is the error's."""
    started = time.monotonic()
    request = _parse(arguments)
    try:
        with quiet_libraries(request.run / LOG_FILE):
            evaluation = _evaluation_of(request)
            if request.when == CHECK:
                prepare_environment(is_offline=evaluation.is_local)
                check_run(evaluation.run, evaluation.config, evaluation.tasks)
                return 0
            placement = place(evaluation.config, evaluation.model, request.processes)
            evaluation = replace(evaluation, placement=placement)
            if placement.num_processes == 1:
                evaluate(evaluation, started)
                return 0
        return _evaluate_together(evaluation, started)
    except TunebookError as error:
        print(f"evaluation: {error.message}", file=sys.stderr)
        return error.exit_code


def _evaluate_together(evaluation: Evaluation, started: float) -> int:
    """Start the processes and wait for them; return the exit code of the first that fails, and end the others."""
    from torch.multiprocessing.spawn import ProcessExitedException, spawn

    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"  # the processes import it with torch
    with tempfile.TemporaryDirectory(prefix="tunebook-evaluation-") as folder:
        error_file = Path(folder) / "error"
        shared = (evaluation, started, free_port(), error_file)
        count = evaluation.placement.num_processes
        try:
            spawn(_evaluate_share, shared, nprocs=count, daemon=True)  # type: ignore[no-untyped-call]
        except ProcessExitedException as error:
            reason = f"one of its processes {ending(error.exit_code)}"
            print(f"evaluation: {error_file.read_text() if error_file.exists() else reason}", file=sys.stderr)
            return max(1, error.exit_code)
    return 0


def _evaluate_share(process: int, evaluation: Evaluation, started: float, port: int, error_file: Path) -> None:
    """Be one of several processes, on a GPU of its own."""
    from accelerate import PartialState

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the first process, which ends these
    die_with_parent()  # answers of finished tasks are kept
    size = str(evaluation.placement.num_processes)
    os.environ |= {"RANK": str(process), "LOCAL_RANK": str(process), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    # Processes wait for each other as long as the longest share takes.
    PartialState(cpu=not uses_gpu(evaluation.config), timeout=timedelta(weeks=4))
    try:
        with quiet_libraries(evaluation.run / LOG_FILE):
            evaluate(replace(evaluation, process=process), started)
    except TunebookError as problem:
        with suppress(FileExistsError), error_file.open("x") as file:  # the others often fail in the same way
            file.write(problem.message)
        sys.exit(problem.exit_code)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tunebook.evaluate")
    parser.add_argument("--run", type=Path, required=True, help="the run folder, with its run.yaml")
    parser.add_argument("--when", required=True, help="before, after, or a name for a later evaluation")
    parser.add_argument("--model", type=Path, help="a model folder; default: model/ of the run when --when after")
    parser.add_argument("--processes", type=int, help="processes that share the requests; default: one for each GPU")
    parser.add_argument("--config", type=Path, help="a configuration with other tasks, or of a model without a run")
    return parser.parse_args(arguments)


def _evaluation_of(request: argparse.Namespace) -> Evaluation:
    run: Path = request.run.absolute()
    config = load_config(request.config or run / RUN_FILE)
    model: Path | None = request.model
    if model is None and request.when == AFTER:
        model = run / MODEL_FOLDER
        require_unchanged_model(run)
    if model is not None and not holds_model(model):
        raise RequestError(f"there is no model in {model} to evaluate", problem_id="model-folder")
    return Evaluation(
        run=run,
        when=request.when,
        config=config,
        model=None if model is None else model.absolute(),
        tasks=resolve_tasks(config.evaluation.tasks),
        trained=origin_of(run) if (run / RUN_FILE).is_file() else read_origin(model) if model is not None else None,
    )
