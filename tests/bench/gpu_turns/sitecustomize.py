"""Python imports this file at startup where `gpu_queue` puts its folder on PYTHONPATH: training waits for its turn.

Imports, data and random weights need no GPU and overlap with other runs. Then the ranks of a run wait until `gpu_queue`
gives them their GPUs, and report when they are done. Files in $TUNEBOOK_BENCH_TURN carry these messages, so Tunebook
itself knows nothing of them. More variables:

    TUNEBOOK_BENCH_WAITS_EARLY  wait after the imports, before the model and NCCL take GPU memory
    TUNEBOOK_BENCH_WAITS_DRAWN  one rank waits with random weights in host memory, before the trainer moves them
    TUNEBOOK_BENCH_UNSAVED      write no model at the end
    TUNEBOOK_BENCH_ALLOWS       rules that are not checked, by id, with commas: what they refuse is to be measured
    TUNEBOOK_BENCH_KEEPS_GPUS   keep the GPUs until the run has ended: saving a model also needs GPU memory
    TUNEBOOK_BENCH_PROFILE      rank 0 writes the kernels of one optimizer step to this file
    TUNEBOOK_BENCH_PEAK         rank 0 writes what fills its GPU at the peak of a step to this file, others to this name
                                with .rank1 and so on: of the third step or of $TUNEBOOK_BENCH_PEAK_STEPS (2 or 1-3);
                                with $TUNEBOOK_BENCH_PEAK_SIZES without call stacks
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_WAITS_EARLY = "TUNEBOOK_BENCH_WAITS_EARLY" in os.environ
_WAITS_DRAWN = "TUNEBOOK_BENCH_WAITS_DRAWN" in os.environ
_ALLOWS = [rule for rule in os.environ.get("TUNEBOOK_BENCH_ALLOWS", "").split(",") if rule]
_POLL_S = 0.02


class _Patched(importlib.abc.MetaPathFinder):
    """Finds modules as usual and changes each after it is loaded."""

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
    """Wait for this run's turn, which lasts until it ends."""
    (_turn() / f"ready-{_rank()}").touch()
    while not (_turn() / "go").exists():
        time.sleep(_POLL_S)


def _turn() -> Path:
    return Path(os.environ["TUNEBOOK_BENCH_TURN"])


def _rank() -> str:
    return os.environ.get("RANK", "0")


def _meet_in_turn(module: Any) -> None:
    """The first collective allocates GPU memory, so ranks import their libraries and wait before it."""
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
    if _WAITS_DRAWN:
        build = trainer.__init__

        def build_in_turn(self: Any, *args: Any, **kwargs: Any) -> None:
            _wait()
            build(self, *args, **kwargs)

        trainer.__init__ = build_in_turn

    def train_in_turn(self: Any, *args: Any, **kwargs: Any) -> Any:
        _wait()
        if "TUNEBOOK_BENCH_PROFILE" in os.environ and _rank() == "0":
            from gpu_profile import OneStep

            self.add_callback(OneStep(Path(os.environ["TUNEBOOK_BENCH_PROFILE"])))
        if "TUNEBOOK_BENCH_PEAK" in os.environ:
            from gpu_peak import STEP, PeakOfSteps

            has_origins = "TUNEBOOK_BENCH_PEAK_SIZES" not in os.environ
            first, _, last = os.environ.get("TUNEBOOK_BENCH_PEAK_STEPS", str(STEP)).partition("-")
            file = Path(os.environ["TUNEBOOK_BENCH_PEAK"] + (f".rank{_rank()}" if _rank() != "0" else ""))
            self.add_callback(PeakOfSteps(file, int(first), int(last or first), has_origins=has_origins))
        if getattr(self, "is_fsdp_enabled", False):
            from gpu_profile import EndOfPasses

            self.add_callback(EndOfPasses(self))
        try:
            done = train(self, *args, **kwargs)
            _make_room(self)
            return done
        finally:
            (_turn() / f"host-{_rank()}").write_text(json.dumps(_host_gib()))
            # DeepSpeed's engine holds its weights and states until the process ends.
            if "TUNEBOOK_BENCH_KEEPS_GPUS" not in os.environ and not getattr(self, "is_deepspeed_enabled", False):
                (_turn() / f"done-{_rank()}").touch()

    trainer.train = train_in_turn


def _host_gib() -> dict[str, float]:
    """The process's host memory at the end of training and at its peak, and PyTorch's page-locked blocks."""
    import torch

    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0) if torch.cuda.is_available() else 0
    now, peak = (round(int(status[name].split()[0]) / 2**20, 3) for name in ("VmRSS", "VmHWM"))
    return {"host_gib": now, "host_peak_gib": peak, "host_pinned_gib": round(pinned / 2**30, 3)}


def _save_nothing(module: Any) -> None:
    train = module.train

    def train_unsaved(folder: Path, *args: Any, **kwargs: Any) -> Any:
        (folder / module.UNSAVED_FILE).touch()
        return train(folder, *args, **kwargs)

    module.train = train_unsaved


def allow(rules: Any, ids: Sequence[str]) -> None:
    """Make `check` of `tunebook.plan.rules` leave out the problems of some rules."""
    check = rules.check

    def check_others(*args: Any, **kwargs: Any) -> list[Any]:
        return [problem for problem in check(*args, **kwargs) if problem.id not in ids]

    rules.check = check_others


def _make_room(trainer: Any) -> None:
    """Free what saving the model does not need, so that the next run has memory for its first steps.

    Without saving, that includes the weights, where no strategy holds them.
    """
    import torch

    if "TUNEBOOK_BENCH_UNSAVED" in os.environ and "TUNEBOOK_BENCH_KEEPS_GPUS" not in os.environ:
        for parameter in trainer.model.parameters():
            parameter.grad, parameter.data = None, torch.empty(0, device=parameter.device)

    wrapper: Any = getattr(trainer, "optimizer", None)  # accelerate's, around torch's or DeepSpeed's
    state = getattr(getattr(wrapper, "optimizer", None), "state", None)
    if isinstance(state, dict) and "DeepSpeed" not in type(wrapper).__name__:
        state.clear()
    torch.cuda.empty_cache()


def _run_the_other() -> None:
    """Run the environment's own sitecustomize, which this one hides."""
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_run_the_other()
if "TUNEBOOK_BENCH_TURN" in os.environ:
    _CHANGES = {"tunebook.train.trainer": _train_in_turn}
    if _WAITS_EARLY:
        _CHANGES["tunebook.launch.first_collective"] = _meet_in_turn
    if "TUNEBOOK_BENCH_UNSAVED" in os.environ:
        _CHANGES["tunebook.train.run"] = _save_nothing
    if _ALLOWS:
        _CHANGES["tunebook.plan.rules"] = lambda rules: allow(rules, _ALLOWS)
    sys.meta_path.insert(0, _Patched(_CHANGES))
