"""Python reads this at its start where `gpu_queue` puts this folder on PYTHONPATH: training waits for its turn.

Everything up to `trainer.train()` (imports, data, random weights) is done on the CPU and can overlap with other runs;
from there on the ranks of a run wait until `gpu_queue` gives them their GPUs, and say when they are through. Files in
$TUNEBOOK_BENCH_TURN carry the messages, so that nothing of Tunebook itself has to know of it. What waits there has its
model on its GPUs, and NCCL's memory: with $TUNEBOOK_BENCH_WAITS_EARLY a run waits when its libraries are imported, and
holds nothing. While a model is saved it still fills its GPUs: with $TUNEBOOK_BENCH_KEEPS_GPUS a run gives them back
only when it has ended. Where $TUNEBOOK_BENCH_PROFILE names a file, rank 0 writes there which kernels one optimizer step
has spent its time in; where $TUNEBOOK_BENCH_PEAK does, what filled its GPU at the peak of one, the third or
$TUNEBOOK_BENCH_PEAK_STEP; without who asked for it, where $TUNEBOOK_BENCH_PEAK_SIZES is there.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_WAITS_EARLY = "TUNEBOOK_BENCH_WAITS_EARLY" in os.environ
_POLL_S = 0.02


class _Patched(importlib.abc.MetaPathFinder):
    """Finds modules where they are, and changes each once it is loaded."""

    def __init__(self, changes: dict[str, Callable[[Any], None]]) -> None:
        self.changes = changes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        loader: Any = spec.loader if spec else None
        execute = loader.exec_module

        def execute_and_change(module: Any) -> None:
            execute(module)
            self.changes[fullname](module)

        loader.exec_module = execute_and_change
        return spec


def _wait() -> None:
    """Until this run's turn has come. It stays its turn."""
    (_turn() / f"ready-{_rank()}").touch()
    while not (_turn() / "go").exists():
        time.sleep(_POLL_S)


def _turn() -> Path:
    return Path(os.environ["TUNEBOOK_BENCH_TURN"])


def _rank() -> str:
    return os.environ.get("RANK", "0")


def _meet_in_turn(module: Any) -> None:
    """The ranks' first words to each other fill memory of theirs: with the libraries at hand they wait before these."""
    meet = module.meet

    def meet_in_turn(*args: Any, **kwargs: Any) -> Any:
        importlib.import_module("tunebook.train.run")
        _wait()
        return meet(*args, **kwargs)

    module.meet = meet_in_turn


def _train_in_turn(module: Any) -> None:
    trainer = module.RecipeTrainer
    train = trainer.train
    if _WAITS_EARLY and "RANK" not in os.environ:  # one rank meets nobody
        _wait()

    def train_in_turn(self: Any, *args: Any, **kwargs: Any) -> Any:
        _wait()
        if "TUNEBOOK_BENCH_PROFILE" in os.environ and _rank() == "0":
            from gpu_profile import OneStep

            self.add_callback(OneStep(Path(os.environ["TUNEBOOK_BENCH_PROFILE"])))
        if "TUNEBOOK_BENCH_PEAK" in os.environ and _rank() == "0":
            from gpu_peak import STEP, PeakOfOneStep

            has_origins = "TUNEBOOK_BENCH_PEAK_SIZES" not in os.environ
            step = int(os.environ.get("TUNEBOOK_BENCH_PEAK_STEP", STEP))
            file = Path(os.environ["TUNEBOOK_BENCH_PEAK"])
            self.add_callback(PeakOfOneStep(file, has_origins=has_origins, step=step))
        if getattr(self, "is_fsdp_enabled", False):
            from gpu_passes import EndOfPasses

            self.add_callback(EndOfPasses(self))
        try:
            done = train(self, *args, **kwargs)
            _make_room(self)
            return done
        finally:
            if "TUNEBOOK_BENCH_KEEPS_GPUS" not in os.environ:
                (_turn() / f"done-{_rank()}").touch()

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
    _CHANGES = {"tunebook.train.trainer": _train_in_turn}
    if _WAITS_EARLY:
        _CHANGES["tunebook.launch.first_collective"] = _meet_in_turn
    sys.meta_path.insert(0, _Patched(_CHANGES))
