"""Run the trials of a sweep: one after the other, or in parallel threads that each wait for a process or a job."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tunebook.config.schema import RunConfig
from tunebook.errors import TunebookError
from tunebook.sweep.folder import SweepFolder
from tunebook.sweep.shares import Shares
from tunebook.sweep.trial_process import (
    Stopping,
    TrialEnd,
    Watch,
    begin_trial,
    run_trial,
    wait_until_free,
    write_trial_end,
)
from tunebook.sweep.trials import Trial

CommandOf = Callable[[Trial, Path], list[str]]  # builds a trial's command, given its run folder
RunTrial = Callable[[Trial, Watch | None], None]


class TrialList:
    """A list of trials, in order; finished trials do not run again. Thread-safe. A search adds proposals to it."""

    def __init__(self, trials: list[Trial], folder: SweepFolder) -> None:
        self.trials = list(trials)  # known so far
        self._left = [trial for trial in trials if not folder.is_done(trial)]
        self._lock = threading.Lock()

    def next_trial(self) -> Trial | None:
        """Return the next trial to run; None if none is left."""
        with self._lock:
            return self._left.pop(0) if self._left else None

    def tell(self, trial: Trial) -> None:
        """Record that a trial has ended."""

    def watch(self, trial: Trial) -> Watch | None:
        """Return a function that may end the trial early, or None."""
        return None


def run_trials(
    source: TrialList,
    run_one: RunTrial,
    stopping: Stopping,
    num_at_once: int,
    is_last: Callable[[Trial], bool] = lambda trial: False,
) -> None:
    """Run trials until none is left, the sweep is asked to stop, or `is_last` is true of an ended trial."""
    has_ended = threading.Event()

    def work() -> None:
        try:
            while stopping.num_requests == 0 and not has_ended.is_set() and (trial := source.next_trial()) is not None:
                run_one(trial, source.watch(trial))
                source.tell(trial)
                if is_last(trial):
                    has_ended.set()
        except BaseException:
            stopping.request()  # the others save and end; then this is raised
            raise

    if num_at_once == 1:
        work()
        return
    from joblib import Parallel, delayed

    # Threads, since each only waits for the process that trains. joblib's own processes would be killed with all their
    # children on Ctrl-C, and no trial could save.
    Parallel(n_jobs=num_at_once, backend="threading")(delayed(work)() for _ in range(num_at_once))


@dataclass(kw_only=True)
class Runner(ABC):
    """Runs trials of a sweep until they end, and records how they ended."""

    folder: SweepFolder
    command_of: CommandOf
    config_of: Callable[[Trial], RunConfig]
    stopping: Stopping
    num_trials: int

    def __call__(self, trial: Trial, watch: Watch | None) -> None:
        """Run one trial until it ends."""
        try:
            config = self.config_of(trial)
        except TunebookError as error:  # a combination of proposed values may break a rule
            self.fail(trial, error.exit_code, error.message)
        else:
            self.run(trial, config, watch)

    @abstractmethod
    def run(self, trial: Trial, config: RunConfig, watch: Watch | None) -> None:
        """Run a trial whose values are valid."""

    def fail(self, trial: Trial, exit_code: int, reason: str, how: str = "not started") -> None:
        """Record and print why a trial did not start, or ended without a record of its own."""
        end = TrialEnd(exit_code=exit_code, seconds=0.0, was_interrupted=False, reason=reason)
        write_trial_end(end, self.folder.end_file(trial))
        self.say(trial, f"{how}: {reason}")

    def say(self, trial: Trial, text: str) -> None:
        """Print a line about a trial, in one write, since trials run in threads."""
        print(f"\ntrial {trial.number + 1} of {self.num_trials}: {text}\n", end="", flush=True)


@dataclass(kw_only=True)
class RunLocally(Runner):
    """Runs trials on this machine, each on its share of it."""

    shares: Shares
    prints_to_files: bool  # parallel trials would mix their output

    def run(self, trial: Trial, config: RunConfig, watch: Watch | None) -> None:
        """Start the process of a trial when its share is free, and wait for its end."""
        with self.shares.share_of(config) as share:
            if self.stopping.num_requests:
                return
            self.say(trial, trial.title)
            run_folder = self.folder.run_folder(trial)
            earlier_s = begin_trial(self.folder.end_file(trial))
            end = run_trial(
                self.command_of(trial, run_folder),
                self.stopping,
                output=self.folder.output(trial) if self.prints_to_files else None,
                environment=share.environment(os.environ),
                cores=share.cores,
                watch=watch,
            )
            # Processes left by a killed trial save first; its share is not free until they end.
            wait_until_free(run_folder)
            write_trial_end(end.after(earlier_s), self.folder.end_file(trial))
        if self.prints_to_files:
            self.say(trial, end.text)
