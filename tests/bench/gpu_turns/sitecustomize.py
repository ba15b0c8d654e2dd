"""Python reads this at its start where `gpu_queue` puts this folder on PYTHONPATH: training waits for its turn.

Everything up to `trainer.train()` (imports, data, random weights) is done on the CPU and can overlap with other runs;
from there on the ranks of a run wait until `gpu_queue` gives them their GPUs, and say when they are through. Files in
$TUNEBOOK_BENCH_TURN carry the messages, so that nothing of Tunebook itself has to know of it. While a model is saved it
still fills its GPUs: with $TUNEBOOK_BENCH_KEEPS_GPUS a run gives them back only when it has ended. Where
$TUNEBOOK_BENCH_PROFILE names a file, rank 0 writes there which kernels one optimizer step has spent its time in; where
$TUNEBOOK_BENCH_PEAK does, what filled its GPU at the peak of one; without who asked for it, where
$TUNEBOOK_BENCH_PEAK_SIZES is there.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_TRAINER = "tunebook.train.trainer"
_POLL_S = 0.02


class _PatchedTrainer(importlib.abc.MetaPathFinder):
    """Finds the trainer's module where it is, and makes its `train` wait once it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _TRAINER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        loader: Any = spec.loader if spec else None
        execute = loader.exec_module

        def execute_and_patch(module: Any) -> None:
            execute(module)
            _take_turns(module.RecipeTrainer, Path(os.environ["TUNEBOOK_BENCH_TURN"]))

        loader.exec_module = execute_and_patch
        return spec


def _take_turns(trainer: Any, turn: Path) -> None:
    train = trainer.train

    def train_in_turn(self: Any, *args: Any, **kwargs: Any) -> Any:
        rank = os.environ.get("RANK", "0")
        (turn / f"ready-{rank}").touch()
        while not (turn / "go").exists():
            time.sleep(_POLL_S)
        if "TUNEBOOK_BENCH_PROFILE" in os.environ and rank == "0":
            from gpu_profile import OneStep

            self.add_callback(OneStep(Path(os.environ["TUNEBOOK_BENCH_PROFILE"])))
        if "TUNEBOOK_BENCH_PEAK" in os.environ and rank == "0":
            from gpu_peak import PeakOfOneStep

            has_origins = "TUNEBOOK_BENCH_PEAK_SIZES" not in os.environ
            self.add_callback(PeakOfOneStep(Path(os.environ["TUNEBOOK_BENCH_PEAK"]), has_origins=has_origins))
        try:
            done = train(self, *args, **kwargs)
            _make_room(self)
            return done
        finally:
            if "TUNEBOOK_BENCH_KEEPS_GPUS" not in os.environ:
                (turn / f"done-{rank}").touch()

    trainer.train = train_in_turn


def _make_room(trainer: Any) -> None:
    """What saving the final model needs no more: it would not leave enough for the next run's first steps."""
    import torch

    wrapper: Any = getattr(trainer, "optimizer", None)  # accelerate's, around torch's or DeepSpeed's
    state = getattr(getattr(wrapper, "optimizer", None), "state", None)
    if isinstance(state, dict) and "DeepSpeed" not in type(wrapper).__name__:
        state.clear()
    torch.cuda.empty_cache()


def _run_the_other() -> None:
    """An environment may have a sitecustomize of its own, which this one hides."""
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_run_the_other()
if "TUNEBOOK_BENCH_TURN" in os.environ:
    sys.meta_path.insert(0, _PatchedTrainer())
