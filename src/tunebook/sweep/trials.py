"""Run the trials of a study on this machine: each a child process `tunebook train`, one or several at a time.

Ctrl-C reaches a trial only through this process, once, so that it can save and end. If this process is killed, its
trials save and end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import optuna

from tunebook.config.override_text import command_words
from tunebook.errors import StoppedError
from tunebook.hardware.detect import VISIBLE_VARIABLE
from tunebook.launch.supervise import StopRequests
from tunebook.processes import kill_descendants, own_cores, start
from tunebook.sweep.space import title_of
from tunebook.sweep.study import Study

_POLL_S = 0.5
_KILLED_BY_REQUEST = (-signal.SIGTERM, -signal.SIGKILL)  # before it could handle the request

CommandOf = Callable[[Study, optuna.Trial], list[str]]
Say = Callable[[str], None]


def divide(gpus: Sequence[str], num_slots: int) -> list[dict[str, str]]:
    """Divide a machine evenly: for each trial at a time, variables that name its GPUs and its number of threads."""
    if num_slots == 1:
        return [{}]
    num_gpus = len(gpus) // num_slots
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, len(own_cores()) // num_slots)))
    slots = [{"OMP_NUM_THREADS": threads} for _ in range(num_slots)]
    if num_gpus:
        for index, slot in enumerate(slots):
            slot[VISIBLE_VARIABLE] = ",".join(gpus[index * num_gpus : (index + 1) * num_gpus])
    return slots


def train_command(study: Study, trial: optuna.Trial) -> list[str]:
    """Return the command that trains one trial; in a Slurm job it starts its ranks there."""
    sweep = study.sweep
    overrides = sweep.space.overrides(trial.params)
    if sweep.is_array:
        overrides = [*(word for word in overrides if not word.startswith("launcher")), "launcher=local"]
    words = command_words("train", sweep.recipe, overrides, map(Path, sweep.recipes_dirs))
    return [sys.executable, "-m", *words, "--run-folder", str(study.run_folder(trial.number))]


@dataclass(kw_only=True)
class RunningTrial:
    """A trial and its process."""

    trial: optuna.Trial
    process: subprocess.Popen[bytes]
    slot: dict[str, str]
    started: float = field(default_factory=time.monotonic)
    worse_at: int | None = None  # the step at which it was found worse than the others, and asked to stop


def run_trials(
    study: Study,
    slots: Sequence[dict[str, str]],
    stop: StopRequests,
    say: Say,
    command_of: CommandOf = train_command,
    next_trial: Callable[[], optuna.Trial | None] | None = None,
) -> None:
    """Run trials until none is left, or until those that run have ended after a stop request; a second one kills them.

    Each of the `slots` is the environment of one trial at a time.
    """
    next_trial = next_trial or study.next_trial
    free, running, are_asked = [*slots], list[RunningTrial](), False
    while True:
        while free and stop.first is None and (trial := next_trial()) is not None:
            slot = free.pop(0)
            process = start(command_of(study, trial), os.environ | slot, output=study.log_file(trial.number))
            running.append(RunningTrial(trial=trial, process=process, slot=slot))
            what = f"{title_of(trial.params)} with its output in {study.log_file(trial.number).name}"
            say(f"trial {trial.number + 1} of {study.num_trials}: {what}")
        if not running:
            return
        time.sleep(_POLL_S)
        if stop.first is not None and not are_asked:
            are_asked = True
            say("stopping: running trials save and end; Ctrl-C again to quit unsaved")
            for one in running:
                one.process.terminate()
        for one in [*running]:
            if stop.is_urgent:
                kill_descendants(one.process.pid)
                one.process.kill()
            has_ended = one.process.poll() is not None
            if study.sweep.prune and one.worse_at is None:  # also of an ended trial: it counts in the median
                one.worse_at = study.worse_at(one.trial)
                if one.worse_at is not None:
                    one.process.terminate()
            if has_ended:
                running.remove(one)
                free.append(one.slot)
                _finish(study, one, stop, say)


def _finish(study: Study, one: RunningTrial, stop: StopRequests, say: Say) -> None:
    with one.process:  # closes its input
        code = one.process.returncode
    how, was_pruned = None, False
    if one.worse_at is not None and code != 0:
        how = f"pruned at step {one.worse_at}: {study.sweep.metric} is worse than the median of the earlier trials"
        code, was_pruned = StoppedError.exit_code, True
    elif stop.first is not None and code in (StoppedError.exit_code, *_KILLED_BY_REQUEST):
        code, how = StoppedError.exit_code, f"stopped by {stop.first}"
    elif code < 0:
        code, how = 1, f"failed: killed by signal {-code} (more in {study.log_file(one.trial.number).name})"
    seconds = time.monotonic() - one.started
    result = study.finish(one.trial.number, code, seconds=seconds, ending=how, was_pruned=was_pruned)
    say(f"trial {one.trial.number + 1} of {study.num_trials}: {result.how_it_ended}, after {result.seconds:.0f} s")
