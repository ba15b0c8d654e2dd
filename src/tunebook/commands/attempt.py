"""One attempt at a run whose folder is set up: evaluate, start the ranks, evaluate, record how it ended.

It runs where `tunebook train` was typed. In a Slurm job it runs on the first node, once per turn of the job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryFile

from rich.console import Console
from rich.text import Text

from tunebook.checkpoint.choose import same_command
from tunebook.checkpoint.record import step_of
from tunebook.checkpoint.verify import newest_checkpoint
from tunebook.config.choices import LauncherName
from tunebook.config.schema import RunConfig, world_size
from tunebook.errors import DataError, DoesNotFitError, StoppedError, TunebookError
from tunebook.evaluate.code.judging import check_code
from tunebook.evaluate.command import run_worker, score_table, worker_error
from tunebook.evaluate.results import is_evaluated
from tunebook.evaluate.resume import BEFORE, resume_command
from tunebook.files import read_json
from tunebook.hardware.disk import disk_full, is_disk_full
from tunebook.launch.commands import evaluation_command, has_rendezvous, ranks_command, show_command
from tunebook.launch.logs import first_failure, launcher_log, make_logs, quote_log, rank_log, torchrun_log, where
from tunebook.launch.nodes import NodeGroup
from tunebook.launch.resume import is_trained
from tunebook.launch.slurm.container import is_contained, record_container, remove_containers
from tunebook.launch.supervise import ProcessEnd, run_and_wait
from tunebook.processes import ending
from tunebook.record.answer_faults import fault_warnings
from tunebook.record.contamination import (
    CHECK,
    CONTAMINATION_FILE,
    NOT_COMPARED,
    is_checked,
    is_checked_by_evaluation,
    needs_check,
    refuse_contaminated,
    score_lines,
)
from tunebook.record.manifest import finish_manifest, state_of_exit_code
from tunebook.record.metrics import is_training_line, read_metrics
from tunebook.record.run_folder import (
    RUN_FILE,
    Outcome,
    clear_outcomes,
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
    nodes: NodeGroup | None = None  # if the nodes know the port beforehand
    stopped_by: str | None = None
    stop_requests: Sequence[signal.Signals] = ()  # stop requests that arrived while no process ran to receive them
    hosts: Mapping[int, str] = field(default_factory=dict)  # by rank
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
        """Look for evaluation items in the training documents. Raises: DataError.

        An evaluation before the training does it too: its process has the harness imported.
        """
        if is_trained(self.folder, self.config) or not needs_check(self.config):
            return
        if not is_checked(self.folder, self.config):
            (self.folder / CONTAMINATION_FILE).unlink(missing_ok=True)  # of other data or tasks
            if is_checked_by_evaluation(self.config) and not is_evaluated(self.folder, BEFORE):
                return
            end = self._run_worker(CHECK)
            if end.stopped_by is not None or end.exit_code == StoppedError.exit_code:
                raise worker_error(end, CHECK, resume_command(self.folder, BEFORE))
            if end.exit_code != 0:
                print_text(f"warning: {NOT_COMPARED}", self.console, style="yellow")
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
        """Evaluate in a container, followed through a rendezvous like the ranks: it may outlive what started it."""
        nodes = NodeGroup(self.config, is_evaluation=True)
        launcher_log(self.folder).parent.mkdir(exist_ok=True)
        command = evaluation_command(self.config, self.folder, nodes.endpoint, when)
        show_command(command, self.console)

        def exit_code() -> int:
            return nodes.failed.exit_code if nodes.failed is not None else 0

        end = self._run_on_nodes(command, nodes, exit_code)
        if end.failure is not None or end.failed is not None:
            self._quote(launcher_log(self.folder))
        if end.failure is not None:
            raise end.failure
        return replace(end, exit_code=exit_code())

    def _train(self) -> Outcome:
        """Launch the ranks and wait for them, unless an earlier attempt has finished training."""
        if is_trained(self.folder, self.config):
            return self._read_outcomes()
        self._refuse_if_stopped()
        end = self._start_ranks()
        self.stopped_by = end.stopped_by
        for rank in end.lost_ranks[:1]:
            self._quote(rank_log(self.folder, rank))
        if not (self.folder / RUN_FILE).is_file():
            message = f"the run folder {self.folder} was removed while its run was active"
            raise TunebookError(message, problem_id="run-lost")
        if not has_outcome(self.folder):
            raise self._error_without_outcome(end)
        if end.stopped_by is not None and is_trained(self.folder, self.config) and self.config.evaluation.tasks:
            message = f"stopped by {end.stopped_by} after the last step, before the evaluation"
            raise StoppedError(f"{message}; {same_command(self.config)} resumes it", problem_id="stopped")
        outcome = self._with_cause(self._read_outcomes(), end)
        if end.notice is None or outcome.exit_code == 0:
            return outcome
        return replace(outcome, reason=f"{end.notice}. {outcome.reason}")

    def _start_ranks(self) -> ProcessEnd:
        config, folder = self.config, self.folder
        note_launch(folder, self.clock)
        ranks = world_size(config)
        if has_rendezvous(config):
            make_logs(folder)
            return self._start_nodes()
        command = ranks_command(config, folder)
        show_command(command, self.console)
        self.hosts = dict.fromkeys(range(ranks), socket.gethostname())
        log = None
        if ranks > 1:
            make_logs(folder)
            log = torchrun_log(folder, 0)
        environment, timeout_s = rank_environment(config, os.environ), config.launcher.stop_timeout_s
        return run_and_wait(command, environment, [self.lock], log=log, stop_timeout_s=timeout_s)

    def _start_nodes(self) -> ProcessEnd:
        """Start ranks on several nodes, in containers or through Ray."""
        config, folder = self.config, self.folder
        nodes = self.nodes or NodeGroup(config)
        if config.launcher.name is LauncherName.ray:
            nodes.on_start = lambda: clear_outcomes(folder)
        command = ranks_command(config, folder, nodes.endpoint)
        show_command(command, self.console)
        end = self._run_on_nodes(command, nodes, lambda: self._read_outcomes().exit_code)
        self.hosts = nodes.hosts
        return end

    def _run_on_nodes(self, command: list[str], nodes: NodeGroup, exit_code_of: Callable[[], int]) -> ProcessEnd:
        config, folder = self.config, self.folder
        if is_contained(config):
            nodes.on_start = lambda: record_container(config, folder, nodes.members[0])
        try:
            return nodes.run(command, folder, exit_code_of=exit_code_of, keep_open=[self.lock])
        finally:
            remove_containers(config, folder)

    def _read_outcomes(self) -> Outcome:
        return read_outcomes(self.folder, world_size(self.config))

    def _with_cause(self, outcome: Outcome, end: ProcessEnd) -> Outcome:
        """Add to an outcome what only the launcher knows: which rank failed, its host and its last output."""
        reason = outcome.reason
        if end.failure is not None:
            message = reason if outcome.time is not None else "no rank could save"
            return replace(outcome, reason=f"{end.failure.message}. {message}")
        if outcome.exit_code != 1:
            return outcome
        rank, failed = outcome.rank, first_failure(self.folder) or end.failed
        if failed is not None and (failed.is_by_signal or outcome.time is None):
            rank = failed.rank
            reason = f"rank {rank} ended without recording a reason: {failed.how}"
        elif outcome.time is not None:  # silent ranks were ended because of this one
            reason = str(read_json(outcome_file(self.folder, rank))["reason"])
        self._quote(rank_log(self.folder, rank))
        is_named = len(set(self.hosts.values())) < 2 or where(rank, self.hosts) in reason
        return replace(outcome, reason=reason if is_named else f"{reason} [{where(rank, self.hosts)}]")

    def _quote(self, log: Path) -> None:
        """Print the end of a log, which says more than the one sentence of a record."""
        if quoted := quote_log(log, self.folder):
            print_text(quoted, self.console)

    def _error_without_outcome(self, end: ProcessEnd) -> TunebookError:
        """Return the error for a training in which no rank could record how it ended."""
        if end.failure is not None:
            self._quote(launcher_log(self.folder))
            return end.failure
        if end.notice is not None:
            return StoppedError(f"{end.notice}. {self._nothing_saved()}", problem_id="stopped")
        if end.stopped_by is not None:
            return StoppedError(f"stopped by {end.stopped_by} {self._progress()}", problem_id="stopped")
        # torchrun returns 1 for any exit code of its ranks, and a full disk may also prevent their records
        if end.exit_code == DoesNotFitError.exit_code or self._is_disk_full():
            return disk_full(self.folder)
        failed = first_failure(self.folder) or end.failed
        code = failed.exit_code if failed is not None else end.exit_code
        who = where(failed.rank, self.hosts) if failed is not None else "the training"
        log = rank_log(self.folder, failed.rank) if failed is not None else torchrun_log(self.folder, 0)
        self._quote(log)
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

    def _nothing_saved(self) -> str:
        """Return the message if no rank finished a step in the available time."""
        return (
            f"No rank ended within that, or within launcher.stop_timeout_s={self.config.launcher.stop_timeout_s}, and "
            f"nothing more was saved; {self._resume_command(newest_checkpoint(self.folder))}"
        )

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
