"""Python imports this file at startup where `gpu_queue.py` puts its folder on PYTHONPATH: ranks wait for their turn.

Once a rank has imported its libraries, before it connects to the others or touches a GPU, it waits for its GPUs, and
again when it has warmed up (`turns.py`). Tunebook itself knows nothing of it. More variables:

    TUNEBOOK_BENCH_UNSAVED  write no model at the end
    TUNEBOOK_BENCH_PROFILE  rank 0 traces the kernels of one step: NAME.kernels.txt and NAME.trace.json.gz
    TUNEBOOK_BENCH_MEMORY   rank 0 traces the memory of the third step: NAME.memory.pickle, for pytorch.org/memory_viz
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import turns

_RANK_MODULE = "tunebook.train.run"  # every rank calls its `run_rank` before it connects


class _RankFinder(importlib.abc.MetaPathFinder):
    """Finds the ranks' module as usual, and lets its `run_rank` wait."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _RANK_MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        loader: Any = spec.loader if spec else None
        execute = loader.exec_module

        def execute_and_change(module: Any) -> None:
            execute(module)
            from transformers import Trainer  # of every method

            _add_traces(Trainer)
            run_rank = module.run_rank

            def wait_and_run(folder: Path, *rest: Any) -> Any:
                if "TUNEBOOK_BENCH_UNSAVED" in os.environ:
                    (folder / ".unsaved").touch()
                turns.wait_for_gpus()
                result = run_rank(folder, *rest)
                turns.end_training()
                return result

            module.run_rank = wait_and_run

        loader.exec_module = execute_and_change
        return spec


def _add_traces(trainer_class: Any) -> None:
    train = trainer_class.train

    def train_traced(self: Any, *args: Any, **kwargs: Any) -> Any:
        from traces import callbacks

        for callback in callbacks(self):
            self.add_callback(callback)
        return train(self, *args, **kwargs)

    trainer_class.train = train_traced


def _run_the_other() -> None:
    """Run the environment's own sitecustomize, which this one hides."""
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_run_the_other()
if turns.FOLDER in os.environ:
    sys.meta_path.insert(0, _RankFinder())
