"""How a training ended: what its ranks recorded, with what only the launcher knows, or the error if they could not."""

from __future__ import annotations

import shutil
import signal
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tunebook.checkpoint.choose import same_command
from tunebook.checkpoint.verify import newest_checkpoint
from tunebook.config.schema import RunConfig, world_size
from tunebook.errors import DoesNotFitError, StoppedError, TunebookError
from tunebook.files import read_json
from tunebook.hardware.disk import disk_full
from tunebook.launch.logs import first_failure, last_text, launch_logs, quote_log, rank_log, stuck_collective
from tunebook.launch.supervise import ProcessEnd
from tunebook.processes import ending
from tunebook.record.run_folder import RUN_FILE, Outcome, has_outcome, outcome_file, read_outcomes
from tunebook.terminal import print_text

_FULL_BYTES = 4096  # one block


def training_outcome(config: RunConfig, folder: Path, end: ProcessEnd, console: Console) -> Outcome:
    """Return the outcome that the ranks recorded, and print the last output of the rank that failed.

    Raises: StoppedError, DoesNotFitError or TunebookError if no rank could record how it ended.
    """
    if summary := stuck_collective(folder):
        print_text(summary, console)
    if not (folder / RUN_FILE).is_file():
        message = f"the run folder {folder} was removed while its run was active"
        raise TunebookError(message, problem_id="run-lost")
    if has_outcome(folder):
        return _with_cause(read_outcomes(folder, world_size(config)), config, folder, console)
    if end.stopped_by is not None:
        newest = newest_checkpoint(folder)
        resumes = f"resumes from {newest}" if newest else "starts over, since there is no checkpoint"
        message = f"stopped by {end.stopped_by} before it could save; {same_command(config)} {resumes}"
        raise StoppedError(message, problem_id="stopped")
    # torchrun returns 1 for any exit code of its ranks, and a full disk also prevents their records
    if end.exit_code == DoesNotFitError.exit_code or shutil.disk_usage(folder).free < _FULL_BYTES:
        raise disk_full(folder)
    raise _lost(config, folder, end, console)


def _with_cause(outcome: Outcome, config: RunConfig, folder: Path, console: Console) -> Outcome:
    """Add to an outcome what only the launcher knows: which rank failed, its host and its last output."""
    if outcome.exit_code != 1:
        return outcome
    rank, reason, failed = outcome.rank, outcome.reason, first_failure(folder)
    if failed is not None and (failed.is_by_signal or outcome.time is None):
        rank = failed.rank
        reason = f"rank {rank} ended without recording a reason: {failed.how}"
    elif outcome.time is not None:  # silent ranks were ended because of this one
        reason = str(read_json(outcome_file(folder, rank))["reason"])
    _quote(rank_log(folder, rank), folder, console)
    if failed is not None and config.hardware.num_nodes > 1:
        reason = f"{reason} [{failed.where}]"
    return replace(outcome, reason=reason)


def _lost(config: RunConfig, folder: Path, end: ProcessEnd, console: Console) -> TunebookError:
    """Return the error for ranks that ended without a record."""
    failed = first_failure(folder)
    code = failed.exit_code if failed is not None else end.exit_code
    logs = [rank_log(folder, failed.rank)] if failed is not None else launch_logs(folder)
    for log in logs:
        _quote(log, folder, console)
    if any("RendezvousTimeoutError" in last_text(log) for log in logs):
        limit = f"launcher.timeout_s={config.launcher.timeout_s}"
        return TunebookError(f"not every node joined within {limit}", problem_id="node-missing")
    who = failed.where if failed is not None else "the launch of the ranks"
    message = f"{who} {ending(code)} and recorded no reason; its output is above, and in {folder / 'log.txt'}"
    if -code == signal.SIGKILL:
        message += ". A kill by signal 9 is most often the system's, which ran out of memory"
    return TunebookError(message, problem_id="run-lost")


def _quote(log: Path, folder: Path, console: Console) -> None:
    """Print the end of a log, which says more than the one sentence of a record."""
    if quoted := quote_log(log, folder):
        print_text(quoted, console)
