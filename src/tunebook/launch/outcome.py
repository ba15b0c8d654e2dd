"""How a training ended: what its ranks recorded, with what only the launcher knows, or the error if they could not."""

from __future__ import annotations

import re
import shutil
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from tunebook.checkpoint.choose import same_command
from tunebook.checkpoint.verify import newest_checkpoint
from tunebook.config.schema import RunConfig, world_size
from tunebook.errors import DoesNotFitError, StoppedError, TunebookError
from tunebook.files import read_json
from tunebook.hardware.disk import disk_full
from tunebook.launch.logs import flight_recorder_file, last_text, launch_logs, print_log, rank_log
from tunebook.launch.supervise import ProcessEnd
from tunebook.processes import ask, ending
from tunebook.record.run_folder import Outcome, has_outcome, outcome_file, read_outcomes
from tunebook.terminal import print_text

_FULL_BYTES = 4096  # one block
_SUMMARY_WITHIN_S = 60.0
_NUM_SUMMARY_LINES = 14
# torchrun's report of the first rank to fail, the last part of its table (torch 2.10 to 2.13).
_FIRST_FAILURE = re.compile(
    r"Root Cause \(first observed failure\):.*?host\s*: (\S+).*?rank\s*: (\d+) \(local_rank: \d+\)"
    r".*?exitcode\s*: (-?\d+)",
    re.DOTALL,
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A rank that failed, as reported by torchrun."""

    rank: int
    exit_code: int  # negative: killed by that signal
    host: str

    @property
    def is_by_signal(self) -> bool:
        """Whether an outside signal killed it. SIGTERM does not count: it ends ranks after another rank's failure."""
        return self.exit_code < 0 and self.exit_code != -signal.SIGTERM


def training_outcome(config: RunConfig, folder: Path, end: ProcessEnd, console: Console) -> Outcome:
    """Return the outcome that the ranks recorded, and print the last output of the rank that failed.

    Raises: StoppedError, DoesNotFitError or TunebookError if no rank could record how it ended.
    """
    if summary := stuck_collective(folder):
        print_text(summary, console)
    failed = first_failure(folder)
    if has_outcome(folder):
        outcome = read_outcomes(folder, world_size(config))
        return _with_cause(outcome, failed, config, folder, console) if outcome.exit_code == 1 else outcome
    if end.stopped_by is not None:
        newest = newest_checkpoint(folder)
        resumes = f"resumes from {newest}" if newest else "starts over, since there is no checkpoint"
        message = f"stopped by {end.stopped_by} before it could save; {same_command(config)} {resumes}"
        raise StoppedError(message, problem_id="stopped")
    # torchrun returns 1 for any exit code of its ranks, and a full disk also prevents their records
    if end.exit_code == DoesNotFitError.exit_code or shutil.disk_usage(folder).free < _FULL_BYTES:
        raise disk_full(folder)
    logs = [rank_log(folder, failed.rank)] if failed is not None else launch_logs(folder)
    for log in logs:
        print_log(log, folder, console)
    if any("RendezvousTimeoutError" in last_text(log) for log in logs):
        limit = f"launcher.timeout_s={config.launcher.timeout_s}"
        raise TunebookError(f"not every node joined within {limit}", problem_id="node-missing")
    who = f"rank {failed.rank} on {failed.host}" if failed is not None else "the launch of the ranks"
    how = _ending_of(failed.exit_code if failed is not None else end.exit_code)
    message = f"{who} {how} and recorded no reason; its output is above, and in {folder / 'log.txt'}"
    raise TunebookError(message, problem_id="run-lost")


def first_failure(folder: Path) -> Failure | None:
    """Return the rank that failed first, as torchrun reports; prefer ranks killed by an outside signal over others."""
    reports = [log.read_text(errors="replace") for log in launch_logs(folder)]
    matches = [match for report in reports if (match := _FIRST_FAILURE.search(report))]
    failures = [Failure(host=match[1], rank=int(match[2]), exit_code=int(match[3])) for match in matches]
    return min(failures, key=lambda failure: (not failure.is_by_signal, failure.exit_code < 0), default=None)


def stuck_collective(folder: Path) -> str:
    """Return torch's summary of the collective in which ranks were missing at a time-out; empty without a record."""
    file = flight_recorder_file(folder)
    if not any(file.parent.glob(f"{file.name}*")):
        return ""
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(file.parent)]
    options = ["--prefix", file.name, "--allow-incomplete-ranks"]
    lines = ask([*command, *options], timeout_s=_SUMMARY_WITHIN_S).errors.splitlines()  # it logs
    return "\n".join(["torch's record of the collectives:", *(f"    {line}" for line in lines[:_NUM_SUMMARY_LINES])])


def _with_cause(outcome: Outcome, failed: Failure | None, config: RunConfig, folder: Path, console: Console) -> Outcome:
    """Add to an outcome what only the launcher knows: which rank failed, its host and its last output."""
    rank, reason = outcome.rank, outcome.reason
    if failed is not None and (failed.is_by_signal or outcome.time is None):
        rank = failed.rank
        reason = f"rank {rank} ended without recording a reason: it {_ending_of(failed.exit_code)}"
    elif outcome.time is not None:  # silent ranks were ended because of this one
        reason = str(read_json(outcome_file(folder, rank))["reason"])
    print_log(rank_log(folder, rank), folder, console)
    if failed is not None and config.hardware.num_nodes > 1:
        reason = f"{reason} [rank {failed.rank} on {failed.host}]"
    return replace(outcome, reason=reason)


def _ending_of(exit_code: int) -> str:
    if -exit_code == signal.SIGKILL:
        return "was killed by SIGKILL (the system's usual way when memory runs out)"
    return ending(exit_code)
