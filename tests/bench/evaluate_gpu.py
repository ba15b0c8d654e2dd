"""How fast a model is evaluated, by batch size: one JSON line for each task and batch size.

    python tests/bench/evaluate_gpu.py MODEL TASK.yaml ... [--batch-size 1 8 64 auto] [--limit 500] [--timeout-s 900]

MODEL is a local folder, each TASK a task file of lm-evaluation-harness, such as one of multiple choice and one of
generation. Every line is one evaluation as `tunebook eval model=` does it, in its own process on one GPU, or on the CPU
if there is none. `seconds` are those of the task, from its first prompt to its score; `total_s` adds imports and
loading. `peak_gib` is the most that torch allocated on the GPU. A configuration that fails or takes too long has an
`error` instead, and the others still run; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunebook.config.frozen import config_to_yaml
from tunebook.errors import RequestError, TunebookError
from tunebook.evaluate.command import read_batch_size, settings_as_json
from tunebook.evaluate.target import bare_config, find_target
from tunebook.evaluate.task_files import check_tasks
from tunebook.train.environment import evaluation_environment

PEAK_FILE = "peak.json"


def parse(words: list[str] | None) -> argparse.Namespace:
    """The arguments. Exits with 2 for wrong ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="a model folder")
    parser.add_argument("tasks", metavar="TASK", nargs="+", help="a task file")
    parser.add_argument("--batch-size", nargs="+", default=["1", "8", "32", "auto"], help="requests at once, or auto")
    parser.add_argument("--limit", type=int, help="items per task; default: all")
    parser.add_argument("--timeout-s", type=float, default=900, help="of one configuration; default: 900")
    parser.add_argument("--output", type=Path, help="also append the lines to this file")
    asked = parser.parse_args(words)
    try:
        check_tasks(asked.tasks)
        for size in asked.batch_size:
            read_batch_size(size)
    except RequestError as error:
        parser.error(error.message)
    return asked


def lines(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Evaluate each task with each batch size. Raises: RequestError for a folder without a model."""
    with tempfile.TemporaryDirectory(prefix="tunebook-") as scratch:
        target = find_target(asked.model, Path(scratch), is_model=True)
        if target.folder is None:
            raise RequestError(
                f"{asked.model} is not a local model folder; download the model first", problem_id="model-folder"
            )
        config, file = bare_config(target), Path(scratch) / "model.yaml"
        file.write_text(config_to_yaml(config), encoding="utf-8")
        for task in asked.tasks:
            environment = evaluation_environment(config, os.environ)
            for number, size in enumerate(asked.batch_size):
                folder = Path(scratch) / f"{Path(task).stem}-{number}"
                folder.mkdir()
                batch_size = read_batch_size(size)
                settings = replace(config.evaluation, tasks=[task], batch_size=batch_size, limit=asked.limit)
                words = ["--run", str(folder), "--when", "bench", "--config", str(file), "--model", str(target.folder),
                         "--evaluation", settings_as_json(settings), "--processes", "1"]  # fmt: skip
                line = {"model": str(asked.model), "task": task, "batch_size": size, "limit": asked.limit}
                yield line | measure(folder, words, environment, asked.timeout_s)


def measure(folder: Path, words: list[str], environment: dict[str, str], timeout_s: float) -> dict[str, Any]:
    """One evaluation in a process of its own: what it took, or its `error`."""
    started, command = time.monotonic(), [sys.executable, __file__, "--worker", *words]
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {"error": f"not ended after {timeout_s:g} s"}
    total_s = round(time.monotonic() - started, 1)
    if ended.returncode != 0:
        said = ended.stderr.strip().splitlines() or ["nothing on stderr"]
        return {"error": f"exit code {ended.returncode}: {said[-1][:300]}", "total_s": total_s}
    record = json.loads((folder / "evaluation" / "bench.json").read_text(encoding="utf-8"))
    files = sorted((folder / "evaluation" / "parts").glob("*.json"))  # one per task; a group of tasks has several
    parts = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    scores = {part["task"]: record["tasks"][part["task"]] for part in parts}
    num_items, seconds = sum(score["num_items"] for score in scores.values()), sum(part["seconds"] for part in parts)
    return {
        "chosen_batch_size": min(part["batch_size"] for part in parts),
        "items": num_items,
        "seconds": round(seconds, 1),
        "items_per_s": round(num_items / max(seconds, 0.1), 2),  # seconds are rounded to 0.1
        "total_s": total_s,
        **json.loads((folder / PEAK_FILE).read_text(encoding="utf-8")),
        "device": record["device"],
        "scores": {name: {score["metric"]: score["value"]} for name, score in scores.items()},
    }


def work(words: list[str]) -> int:
    """The process of one evaluation: the product's worker, and then what it allocated on the GPU."""
    from tunebook.evaluate import worker

    code = worker.main(words)
    import torch

    has_gpu = torch.cuda.is_available()
    found = {
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3) if has_gpu else None,
    }
    (Path(words[words.index("--run") + 1]) / PEAK_FILE).write_text(json.dumps(found), encoding="utf-8")
    return code


def main(words: list[str] | None = None) -> int:
    """Print the lines as they come; 1 if a configuration failed."""
    asked, has_failed = parse(words), False
    try:
        for line in lines(asked):
            has_failed = has_failed or "error" in line
            text = json.dumps(line)
            print(text, flush=True)
            if asked.output is not None:
                with asked.output.open("a", encoding="utf-8") as stream:
                    stream.write(text + "\n")
    except TunebookError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return error.exit_code
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(work(sys.argv[2:]) if sys.argv[1:2] == ["--worker"] else main())
