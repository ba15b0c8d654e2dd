"""`python -m tunebook.launch.rank RUN_FOLDER`: run one rank of several: open its log, connect to the others, train.

It wraps `tunebook.train`, and adds what only several ranks need.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

from tunebook.config.frozen import load_config
from tunebook.errors import StoppedError
from tunebook.launch.commands import DIES_WITH_PARENT
from tunebook.launch.first_collective import StartWatch, meet
from tunebook.launch.logs import rank_log, where
from tunebook.processes import ask_to_stop_when_parent_dies, die_with_parent
from tunebook.record.run_folder import write_outcome
from tunebook.record.start_up import StartClock, process_begun
from tunebook.terminal import outlive_readers
from tunebook.train.rank_process import AGREED_ENDINGS, RankEnd, StopRequest, importing_libraries


def main() -> int:
    """Run this rank. The exit code is for torchrun; the launcher reads the ranks' outcome files."""
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    if DIES_WITH_PARENT in sys.argv:  # Ray starts replacements at once, and two may not work in one folder
        die_with_parent()
    else:
        ask_to_stop_when_parent_dies()
    outlive_readers()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, StopRequest.signals)  # Ray's workers block some; children inherit it
    _log_errors(rank_log(folder, rank))
    launcher = load_config(folder / "run.yaml").launcher
    clock = StartClock(process_begun())
    clock.passed("start_python")
    request = StopRequest()
    with request.listening():
        num_ranks = int(os.environ["WORLD_SIZE"])
        watch = StartWatch(
            folder,
            rank=rank,
            num_ranks=num_ranks,
            start_timeout_s=launcher.start_timeout_s,
            alone_timeout_s=launcher.stop_timeout_s,
        )
        watch.start()
        code = _meet_and_train(folder, rank, request, watch, clock)
    for number in StopRequest.signals:
        signal.signal(number, signal.SIG_IGN)  # nothing is left to stop, and the end is recorded
    # torchrun must not see endings that all ranks agreed on: it would report a failure, and kill ranks that end a
    # moment later.
    return 0 if code in AGREED_ENDINGS else code


def _meet_and_train(folder: Path, rank: int, request: StopRequest, watch: StartWatch, clock: StartClock) -> int:
    """Import everything, connect, train.

    In this order, ranks that import at different speeds wait for each other within `launcher.start_timeout_s`. The
    process group of the training has the time-out of its collectives, which may be shorter than a cold disk's delay.
    """
    with importing_libraries():
        from tunebook.train.run import run_rank

    clock.passed("import_libraries")
    try:
        is_stopping = meet(load_config(folder / "run.yaml"), watch, lambda: request.name is not None)
    except Exception as error:  # from torch, NCCL or gloo
        traceback.print_exc()
        reason = f"{where(rank, {rank: socket.gethostname()})} could not connect to the other ranks: {error}"
        write_outcome(folder, rank=rank, exit_code=1, reason=reason)
        return 1
    if is_stopping:
        reason = f"stopped by {request.name or 'another rank'} before the first step"
        write_outcome(folder, rank=rank, exit_code=StoppedError.exit_code, reason=reason)
        return StoppedError.exit_code
    clock.passed("meet")
    return run_rank(folder, request, clock)


def _log_errors(file: Path) -> None:
    """Redirect standard error to this rank's own file, including what libraries and crashes write to it directly.

    On the terminal the ranks' lines would be mixed. The launcher shows the last lines of the rank that failed.
    """
    file.parent.mkdir(exist_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.enable()


if __name__ == "__main__":
    RankEnd().leave(main())
