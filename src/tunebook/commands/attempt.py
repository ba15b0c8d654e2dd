"""One attempt at a run whose folder is set up: evaluate, start the ranks, evaluate, record how it ended.

It runs where `tunebook train` was typed. In a Slurm job it runs on the first node, once per turn of the job.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from tunebook.checkpoint.choose import same_command
from tunebook.checkpoint.verify import newest_checkpoint
from tunebook.config.schema import RunConfig, world_size
from tunebook.errors import StoppedError, TunebookError
from tunebook.evaluate.code.judging import check_code
from tunebook.evaluate.command import run_worker, show_scores, worker_error
from tunebook.evaluate.results import AFTER, BEFORE, is_evaluated, resume_command
from tunebook.files import read_json
from tunebook.launch.commands import (
    endpoint_of,
    evaluation_command,
    ranks_command,
    show_command,
    uses_other_machines,
)
from tunebook.launch.container import is_contained
from tunebook.launch.local import START_FILE, announce_start, note_for_other_nodes
from tunebook.launch.logs import launcher_log, make_logs, torchrun_log
from tunebook.launch.outcome import training_outcome
from tunebook.launch.resume import is_trained
from tunebook.launch.supervise import ProcessEnd, StopRequests, run_and_wait
from tunebook.processes import EarlyStart
from tunebook.record.contamination import CHECK, CONTAMINATION_FILE, is_checked, needs_check
from tunebook.record.manifest import finish_manifest, state_of_exit_code
from tunebook.record.metrics import is_training_line, read_metrics
from tunebook.record.run_folder import STOP_FILE, Outcome, has_outcome, noted_checkpoint, read_outcomes
from tunebook.record.start_up import StartClock, note_launch
from tunebook.terminal import print_text
from tunebook.train.environment import rank_environment

REPORT_FILE = "report.html"


@dataclass(kw_only=True)
class Attempt:
    """The inputs of one attempt. The caller listens for `requests`, until the end is recorded."""

    config: RunConfig
    folder: Path
    lock: int  # descriptor that locks the folder; the ranks keep it open
    console: Console
    requests: StopRequests
    clock: StartClock = field(default_factory=StartClock)  # of this process, until the ranks start
    early: EarlyStart = field(default_factory=EarlyStart)  # may have started the only rank

    def carry_out(self) -> int:
        """Run the whole attempt; return the exit code of the run's outcome. Errors are recorded, then raised."""
        try:
            outcome = self._train_and_evaluate()
        except BaseException as error:
            self._record_end(self._outcome_of(error))
            raise
        is_reported = self._record_end(outcome)
        files = [self.folder / "evaluation" / f"{when}.json" for when in (BEFORE, AFTER)]
        if files[-1].is_file():
            show_scores([read_json(file) for file in files if file.is_file()], self.folder, self.console)
        end, color = (outcome.reason, "red") if outcome.exit_code else ("finished", "green")
        print_text(end, self.console, style=color)
        print_text(f"run folder: {self.folder}", self.console)
        if is_reported:
            print_text(f"report: {self.folder / REPORT_FILE}", self.console)
        return outcome.exit_code

    def _train_and_evaluate(self) -> Outcome:
        evaluation, is_done = self.config.evaluation, is_trained(self.folder, self.config)
        if (evaluation.before or evaluation.after) and not is_contained(self.config):
            check_code(evaluation.tasks)  # now, and not after hours of training
        if not is_done and needs_check(self.config):
            self._check_contamination()
        if evaluation.tasks and evaluation.before and not is_evaluated(self.folder, BEFORE):
            self._evaluate(BEFORE)
            self.clock.passed("evaluation_before")
        if is_done:
            self.early.cancel()
        outcome = read_outcomes(self.folder, world_size(self.config)) if is_done else self._train()
        if outcome.exit_code == 0 and evaluation.tasks and evaluation.after:
            self._evaluate(AFTER)
        return outcome

    def _refuse_if_stopped(self) -> None:
        """Start nothing new after a stop request. Raises: StoppedError."""
        if self.requests.first is not None:
            message = f"stopped by {self.requests.first} between two phases; {same_command(self.config)} continues"
            raise StoppedError(message, problem_id="stopped")

    def _check_contamination(self) -> None:
        """Look for evaluation items in the training documents, unless an earlier attempt has. Raises: StoppedError."""
        if is_checked(self.folder, self.config):
            return
        (self.folder / CONTAMINATION_FILE).unlink(missing_ok=True)  # of other data or tasks
        end = self._run_worker(CHECK)
        if end.stopped_by is not None or end.exit_code == StoppedError.exit_code:
            raise worker_error(end, CHECK, resume_command(self.folder, BEFORE))
        if end.exit_code != 0:
            warning = "warning: the training documents were not compared with the evaluation"
            print_text(warning, self.console, style="yellow")
        self.clock.passed("contamination")

    def _evaluate(self, when: str) -> None:
        end = self._run_worker(when)
        if end.exit_code != 0:
            raise worker_error(end, when, resume_command(self.folder, when))

    def _run_worker(self, when: str) -> ProcessEnd:
        self._refuse_if_stopped()
        if is_contained(self.config):
            command = evaluation_command(self.config, self.folder, when)
            show_command(command, self.console)
            return run_and_wait(command, os.environ, [self.lock], requests=self.requests)
        return run_worker(self.folder, when, self.requests)

    def _train(self) -> Outcome:
        """Launch the ranks and wait for them."""
        self._refuse_if_stopped()
        return training_outcome(self.config, self.folder, self._start_ranks(), self.console)

    def _start_ranks(self) -> ProcessEnd:
        config, folder = self.config, self.folder
        is_elsewhere = uses_other_machines(config)
        note_launch(folder, self.clock)
        log = launcher_log(folder) if is_elsewhere else torchrun_log(folder, 0) if world_size(config) > 1 else None
        if log is not None:
            make_logs(folder)
        (folder / STOP_FILE).unlink(missing_ok=True)
        announce_start(config, folder)
        if (note := note_for_other_nodes(config)) is not None:
            print_text(note, self.console)
        command = ranks_command(config, folder, endpoint_of(config))
        if is_elsewhere:  # the others are in the plan
            show_command(command, self.console)
        try:
            return run_and_wait(
                command,
                os.environ if is_elsewhere else rank_environment(config, os.environ),
                [self.lock],
                log=log,
                stop_timeout_s=config.launcher.stop_timeout_s,
                stop_file=folder / STOP_FILE,
                end_timeout_s=config.launcher.timeout_s,
                requests=self.requests,
                early=self.early,
            )
        finally:
            (folder / START_FILE).unlink(missing_ok=True)

    def _outcome_of(self, error: BaseException) -> Outcome:
        """Return the outcome of a run whose launcher failed; keep the ranks' progress."""
        if isinstance(error, TunebookError):
            code, reason = error.exit_code, error.message
        else:
            code, reason = 1, f"{type(error).__name__}: {error}"
        if has_outcome(self.folder):
            return replace(read_outcomes(self.folder, world_size(self.config)), exit_code=code, reason=reason)
        checkpoint = noted_checkpoint(self.folder, newest_checkpoint(self.folder))
        steps = [line["step"] for line in read_metrics(self.folder) if is_training_line(line)]
        return Outcome(rank=0, exit_code=code, reason=reason, step=max(steps, default=None), last_checkpoint=checkpoint)

    def _record_end(self, outcome: Outcome) -> bool:
        """Write the run's end to manifest and report; return whether that worked. A full disk hides no other error."""
        from tunebook.record.report import write_report

        try:
            finish_manifest(
                self.folder,
                state_of_exit_code(outcome.exit_code),
                outcome.exit_code,
                None if outcome.exit_code == 0 else outcome.reason,
                step=outcome.step,
                last_checkpoint=outcome.last_checkpoint,
            )
            write_report(self.folder, self.folder / REPORT_FILE)
        except (OSError, TunebookError) as error:
            warning = f"warning: the end of this run is not in its records: {error}"
            print_text(warning, self.console, style="yellow")
            return False
        return True
