"""One attempt at a run whose folder is set up: evaluate, start the ranks, evaluate, record how it ended.

It runs where `tunebook train` was typed. In a Slurm job it runs on the first node, once per turn of the job.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryFile

from rich.console import Console
from rich.text import Text

from tunebook.checkpoint.choose import same_command
from tunebook.checkpoint.record import step_of
from tunebook.checkpoint.verify import newest_checkpoint
from tunebook.config.schema import RunConfig, world_size
from tunebook.errors import DataError, DoesNotFitError, StoppedError, TunebookError
from tunebook.evaluate.code.judging import check_code
from tunebook.evaluate.command import run_worker, score_table, worker_error
from tunebook.evaluate.results import is_evaluated
from tunebook.evaluate.resume import BEFORE, resume_command
from tunebook.files import read_json
from tunebook.hardware.disk import disk_full, is_disk_full
from tunebook.launch.commands import (
    endpoint_of,
    evaluation_command,
    ranks_command,
    show_command,
    uses_other_machines,
)
from tunebook.launch.container import is_contained
from tunebook.launch.local import START_FILE, announce_start, note_for_other_nodes
from tunebook.launch.logs import (
    first_failure,
    last_text,
    launch_logs,
    launcher_log,
    make_logs,
    quote_log,
    rank_log,
    stuck_collective,
    torchrun_log,
)
from tunebook.launch.resume import is_trained
from tunebook.launch.supervise import ProcessEnd, run_and_wait
from tunebook.processes import ending
from tunebook.record.answer_faults import fault_warnings
from tunebook.record.contamination import (
    CHECK,
    CONTAMINATION_FILE,
    is_checked,
    needs_check,
    refuse_contaminated,
    score_lines,
)
from tunebook.record.manifest import finish_manifest, state_of_exit_code
from tunebook.record.metrics import is_training_line, read_metrics
from tunebook.record.run_folder import (
    RUN_FILE,
    STOP_FILE,
    Outcome,
    has_outcome,
    noted_checkpoint,
    outcome_file,
    read_outcomes,
)
from tunebook.record.start_up import StartClock, note_launch
from tunebook.terminal import print_text
from tunebook.train.environment import rank_environment

REPORT_FILE = "report.html"
_PROBE_BYTES = 4096  # one block: a smaller write may fit into a block that a file already has


@dataclass(kw_only=True)
class Attempt:
    """The inputs of one attempt; afterwards `stopped_by` is the signal that ended it, if any."""

    config: RunConfig
    folder: Path
    lock: int  # descriptor that locks the folder; the ranks keep it open
    console: Console
    stopped_by: str | None = None
    stop_requests: Sequence[signal.Signals] = ()  # stop requests that arrived while no process ran to receive them
    clock: StartClock = field(default_factory=StartClock)  # of this process, until the ranks start

    def carry_out(self) -> int:
        """Run the whole attempt; return the exit code of the run's outcome. Errors are recorded, then raised."""
        try:
            outcome = self._train_and_evaluate()
        except BaseException as error:
            self._record_end(self._outcome_of(error))
            raise
        is_reported = self._record_end(outcome)
        show_scores(self.folder, self.console)
        end, color = (outcome.reason, "red") if outcome.exit_code else ("finished", "green")
        print_text(end, self.console, style=color)
        print_text(f"run folder: {self.folder}", self.console)
        if is_reported:
            print_text(f"report: {self.folder / REPORT_FILE}", self.console)
        return outcome.exit_code

    def _train_and_evaluate(self) -> Outcome:
        evaluation = self.config.evaluation
        if (evaluation.before or evaluation.after) and not is_contained(self.config):
            check_code(evaluation, evaluation.tasks)  # now, and not after hours of training
        self._check_contamination()
        if evaluation.tasks and evaluation.before and not is_evaluated(self.folder, BEFORE):
            self._evaluate(BEFORE)
            self.clock.passed("evaluation_before")
        outcome = self._train()
        if outcome.exit_code == 0 and evaluation.tasks and evaluation.after:
            self._evaluate("after")
        return outcome

    def _refuse_if_stopped(self) -> None:
        """Start nothing new after a stop request. Raises: StoppedError."""
        if self.stop_requests:
            self.stopped_by = self.stop_requests[0].name
            raise StoppedError(f"stopped by {self.stopped_by} between two steps", problem_id="stopped")

    def _check_contamination(self) -> None:
        """Look for evaluation items in the training documents. Raises: DataError."""
        if is_trained(self.folder, self.config) or not needs_check(self.config):
            return
        if not is_checked(self.folder, self.config):
            (self.folder / CONTAMINATION_FILE).unlink(missing_ok=True)  # of other data or tasks
            end = self._run_worker(CHECK)
            if end.stopped_by is not None or end.exit_code == StoppedError.exit_code:
                raise worker_error(end, CHECK, resume_command(self.folder, BEFORE))
            if end.exit_code != 0:
                print_text(
                    "warning: the training documents were not compared with the evaluation",
                    self.console,
                    style="yellow",
                )
            self.clock.passed("contamination")
        refuse_contaminated(self.folder, self.config)

    def _evaluate(self, when: str) -> None:
        end = self._run_worker(when)
        if end.exit_code != 0:
            raise worker_error(end, when, resume_command(self.folder, when))

    def _run_worker(self, when: str) -> ProcessEnd:
        self._refuse_if_stopped()
        end = self._evaluate_in_container(when) if is_contained(self.config) else run_worker(self.folder, when)
        self.stopped_by = self.stopped_by or end.stopped_by
        return end

    def _evaluate_in_container(self, when: str) -> ProcessEnd:
        command = evaluation_command(self.config, self.folder, when)
        show_command(command, self.console)
        return run_and_wait(command, os.environ, [self.lock])

    def _train(self) -> Outcome:
        """Launch the ranks and wait for them, unless an earlier attempt has finished training."""
        if is_trained(self.folder, self.config):
            return self._read_outcomes()
        self._refuse_if_stopped()
        end = self._start_ranks()
        self.stopped_by = end.stopped_by
        if summary := stuck_collective(self.folder):
            print_text(summary, self.console)
        if not (self.folder / RUN_FILE).is_file():
            message = f"the run folder {self.folder} was removed while its run was active"
            raise TunebookError(message, problem_id="run-lost")
        if not has_outcome(self.folder):
            raise self._error_without_outcome(end)
        if end.stopped_by is not None and is_trained(self.folder, self.config) and self.config.evaluation.tasks:
            message = f"stopped by {end.stopped_by} after the last step, before the evaluation"
            raise StoppedError(f"{message}; {same_command(self.config)} resumes it", problem_id="stopped")
        return self._with_cause(self._read_outcomes())

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
            )
        finally:
            (folder / START_FILE).unlink(missing_ok=True)

    def _read_outcomes(self) -> Outcome:
        return read_outcomes(self.folder, world_size(self.config))

    def _with_cause(self, outcome: Outcome) -> Outcome:
        """Add to an outcome what only the launcher knows: which rank failed, its host and its last output."""
        if outcome.exit_code != 1:
            return outcome
        rank, reason, failed = outcome.rank, outcome.reason, first_failure(self.folder)
        if failed is not None and (failed.is_by_signal or outcome.time is None):
            rank = failed.rank
            reason = f"rank {rank} ended without recording a reason: {failed.how}"
        elif outcome.time is not None:  # silent ranks were ended because of this one
            reason = str(read_json(outcome_file(self.folder, rank))["reason"])
        self._quote(rank_log(self.folder, rank))
        if failed is not None and self.config.hardware.num_nodes > 1:
            reason = f"{reason} [{failed.where}]"
        return replace(outcome, reason=reason)

    def _quote(self, log: Path) -> None:
        """Print the end of a log, which says more than the one sentence of a record."""
        if quoted := quote_log(log, self.folder):
            print_text(quoted, self.console)

    def _error_without_outcome(self, end: ProcessEnd) -> TunebookError:
        """Return the error for a training in which no rank could record how it ended."""
        if end.stopped_by is not None:
            return StoppedError(f"stopped by {end.stopped_by} {self._progress()}", problem_id="stopped")
        # torchrun returns 1 for any exit code of its ranks, and a full disk may also prevent their records
        if end.exit_code == DoesNotFitError.exit_code or self._is_disk_full():
            return disk_full(self.folder)
        failed = first_failure(self.folder)
        code = failed.exit_code if failed is not None else end.exit_code
        logs = [rank_log(self.folder, failed.rank)] if failed is not None else launch_logs(self.folder)
        for log in logs:
            self._quote(log)
        if any("RendezvousTimeoutError" in last_text(log) for log in logs):
            limit = f"launcher.timeout_s={self.config.launcher.timeout_s}"
            raise TunebookError(f"not every node joined within {limit}", problem_id="node-missing")
        who = failed.where if failed is not None else "the launch of the ranks"
        message = f"{who} {ending(code)} and recorded no reason; its output is above, and in {self.folder / 'log.txt'}"
        if -code == signal.SIGKILL:
            message += ". A kill by signal 9 is most often the system's, which ran out of memory"
        return TunebookError(message, problem_id="run-lost")

    def _is_disk_full(self) -> bool:
        """Whether the run's disk has no free space even for a small file."""
        try:
            with TemporaryFile(dir=self.folder) as probe:
                probe.write(bytes(_PROBE_BYTES))
        except OSError as error:
            return is_disk_full(error)
        return False

    def _resume_command(self, newest: Path | None) -> str:
        if newest is None:
            return "the same command starts over, since there is no checkpoint"
        return f"{same_command(self.config)} resumes from {newest}"

    def _progress(self) -> str:
        """Say how far ranks came that were killed before they could record it, and what happens to unsaved steps."""
        step, newest = self._last_step() or 0, newest_checkpoint(self.folder)
        saved = (step_of(newest) or 0) if newest is not None else 0
        if not step and not saved:
            return "before the first step"
        how = f"after step {step} and before a save" if step > saved else f"after step {saved}, which is saved"
        return f"{how}; {self._resume_command(newest)}"

    def _last_step(self) -> int | None:
        """Return the last logged step, for ranks that did not record their progress."""
        with contextlib.suppress(DataError):  # from metrics that a stop truncated
            return max((line["step"] for line in read_metrics(self.folder) if is_training_line(line)), default=None)
        return None

    def _outcome_of(self, error: BaseException) -> Outcome:
        """Return the outcome of a run whose launcher failed or was interrupted; keep the ranks' progress.

        For ranks without an outcome, use what they logged and saved. Otherwise the report would say that the run starts
        over.
        """
        if isinstance(error, KeyboardInterrupt):
            code, reason = StoppedError.exit_code, "interrupted"
        elif isinstance(error, TunebookError):
            code, reason = error.exit_code, error.message
        else:
            code, reason = 1, f"{type(error).__name__}: {error}"
        if has_outcome(self.folder):
            return replace(self._read_outcomes(), exit_code=code, reason=reason)
        checkpoint = noted_checkpoint(self.folder, newest_checkpoint(self.folder))
        return Outcome(rank=0, exit_code=code, reason=reason, step=self._last_step(), last_checkpoint=checkpoint)

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
            write_report([self.folder], self.folder / REPORT_FILE)
        except (OSError, TunebookError) as error:
            warning = f"warning: the end of this run is not in its records: {error}"
            self.console.print(Text(warning, style="yellow"))
            return False
        return True


def show_scores(folder: Path, console: Console) -> None:
    """Print the scores of the evaluations before and after training side by side, once both are done."""
    files = [folder / "evaluation" / f"{when}.json" for when in ("before", "after")]
    records = [read_json(file) for file in files if file.is_file()]
    if files[-1].is_file():
        console.print(score_table(records, folder))
        before, after = [None, *records][-2:]
        for line in score_lines(after):
            print_text(line, console)
        for line in fault_warnings(before, after):
            print_text(f"warning: {line}", console, style="yellow")
