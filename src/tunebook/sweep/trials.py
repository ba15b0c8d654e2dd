"""Run the trials of a study on this machine: each a child process `tunebook train`, one or several at a time.

Ctrl-C reaches a trial only through this process, once, so that it can save and end. If this process is killed, the
kernel asks its trials to save and end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import optuna

from tunebook.config.override_text import command_words
from tunebook.errors import StoppedError
from tunebook.hardware.detect import VISIBLE_VARIABLE
from tunebook.launch.supervise import StopRequests, start_command
from tunebook.record.run_folder import LOCK_FILE, is_worked_in
from tunebook.sweep.space import title_of
from tunebook.sweep.study import Study

_POLL_S = 0.5
_KILLED_BY_REQUEST = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGUSR1)  # before it could handle the request
_SAVES_WITHIN_S = 600.0  # the ranks of a killed trial, which may hold a large model

CommandOf = Callable[[Study, optuna.Trial], list[str]]
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The GPUs and cores of one trial at a time; empty: all that this process may use."""

    gpus: Sequence[str] = ()  # as in CUDA_VISIBLE_DEVICES
    cores: Sequence[int] = ()


def divide(gpus: Sequence[str], cores: Sequence[int], num_slots: int) -> list[Slot]:
    """Divide a machine evenly; the remainder stays idle."""
    if num_slots == 1:
        return [Slot()]
    num_gpus, num_cores = len(gpus) // num_slots, len(cores) // num_slots
    return [
        Slot(
            gpus=gpus[index * num_gpus : (index + 1) * num_gpus],
            cores=cores[index * num_cores : (index + 1) * num_cores],
        )
        for index in range(num_slots)
    ]


def train_command(study: Study, trial: optuna.Trial) -> list[str]:
    """Return the command that trains one trial; in a Slurm job it starts its ranks there."""
    sweep = study.sweep
    overrides = sweep.space.overrides(trial.params)
    if sweep.is_array:
        overrides = [*(word for word in overrides if not word.startswith("launcher")), "launcher=local"]
    words = command_words("train", sweep.recipe, overrides, map(Path, sweep.recipes_dirs))
    return [sys.executable, "-m", *words, "--run-folder", str(study.run_folder(trial.number))]


class TrialStopRequests(StopRequests):
    """Forwards this process's stop requests to its trials."""

    def __init__(self) -> None:
        super().__init__(self._send)
        self.processes: list[subprocess.Popen[bytes]] = []

    def _send(self, number: signal.Signals) -> None:
        for process in list(self.processes):
            process.send_signal(number)


@dataclass(kw_only=True)
class RunningTrial:
    """A trial and its process."""

    trial: optuna.Trial
    process: subprocess.Popen[bytes]
    slot: Slot
    started: float = field(default_factory=time.monotonic)
    ended: float | None = None
    worse_at: int | None = None  # the step at which it was found worse than the others, and asked to stop

    def has_ended(self, run_folder: Path) -> bool:
        """Whether its process has ended, and after a kill also its ranks, which save first and hold their GPUs."""
        code = self.process.poll()
        if code is None:
            return False
        self.ended = self.ended or time.monotonic()
        is_over = code >= 0 or time.monotonic() - self.ended > _SAVES_WITHIN_S
        return is_over or not is_at_work(run_folder)


def is_at_work(run_folder: Path) -> bool:
    """Whether processes of a trial hold its run folder."""
    return (run_folder / LOCK_FILE).is_file() and is_worked_in(run_folder)


def run_trials(
    study: Study,
    slots: Sequence[Slot],
    stop: TrialStopRequests,
    say: Say,
    command_of: CommandOf = train_command,
    next_trial: Callable[[], optuna.Trial | None] | None = None,
) -> None:
    """Run trials until none is left, or until those that run have ended after a stop request."""
    next_trial = next_trial or study.next_trial
    free, running = [*slots], list[RunningTrial]()
    while True:
        while free and stop.first is None and (trial := next_trial()) is not None:
            running.append(_start(study, trial, free.pop(0), stop, command_of(study, trial)))
            what = f"{title_of(trial.params)}, prints to {study.log_file(trial.number).name}"
            say(f"trial {trial.number + 1} of {study.num_trials}: {what}")
        if not running:
            return
        time.sleep(_POLL_S)
        for one in [*running]:
            has_ended = one.has_ended(study.run_folder(one.trial.number))
            if study.sweep.prune and one.worse_at is None:  # also of an ended trial: it counts in the median
                one.worse_at = study.worse_at(one.trial)
                if one.worse_at is not None:
                    one.process.terminate()
            if has_ended:
                running.remove(one)
                stop.processes.remove(one.process)
                free.append(one.slot)
                _finish(study, one, stop, say)


def _start(study: Study, trial: optuna.Trial, slot: Slot, stop: TrialStopRequests, command: list[str]) -> RunningTrial:
    environment = os.environ | ({VISIBLE_VARIABLE: ",".join(slot.gpus)} if slot.gpus else {})
    process = start_command(command, environment, output=study.log_file(trial.number)).process
    stop.processes.append(process)
    if stop.first is not None:  # it came before the process was known
        process.terminate()
    if slot.cores and hasattr(os, "sched_setaffinity"):  # Linux only
        with suppress(ProcessLookupError):
            os.sched_setaffinity(process.pid, slot.cores)  # while it has one thread: later threads inherit this
    return RunningTrial(trial=trial, process=process, slot=slot)


def _finish(study: Study, one: RunningTrial, stop: TrialStopRequests, say: Say) -> None:
    code, how, was_pruned = one.process.returncode, None, False
    if one.worse_at is not None and code != 0:
        how = f"pruned at step {one.worse_at}: {study.sweep.metric} worse than the median of the trials before"
        code, was_pruned = StoppedError.exit_code, True
    elif stop.first is not None and code in (StoppedError.exit_code, *_KILLED_BY_REQUEST):
        code, how = StoppedError.exit_code, f"stopped by {stop.first}"
    elif code < 0:
        code, how = 1, f"failed: killed by signal {-code} (more in {study.log_file(one.trial.number).name})"
    seconds = time.monotonic() - one.started
    result = study.finish(one.trial.number, code, seconds=seconds, how=how, was_pruned=was_pruned)
    say(f"trial {one.trial.number + 1} of {study.num_trials}: {result.how_it_ended}, after {result.seconds:.0f} s")
