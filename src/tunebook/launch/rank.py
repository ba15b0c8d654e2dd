"""`python -m tunebook.launch.rank RUN_FOLDER`: run one rank of several: open its log and train.

It wraps `tunebook.train`, and adds what only several ranks need.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path

from tunebook.launch.commands import DIES_WITH_PARENT
from tunebook.launch.logs import flight_recorder_file, rank_log
from tunebook.processes import ask_to_stop_when_parent_dies, die_with_parent, stop_when_input_ends
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
    stop_when_input_ends()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, StopRequest.signals)  # Ray's workers block some; children inherit it
    _log_errors(rank_log(folder, rank))
    _record_collectives(folder)
    clock = StartClock(process_begun())
    clock.passed("start_python")
    request = StopRequest(folder)
    with request.listening():
        with importing_libraries():  # takes seconds, during which a request to stop must not be lost
            from tunebook.train.run import run_rank

        clock.passed("import_libraries")
        code = run_rank(folder, request, clock)
    for number in StopRequest.signals:
        signal.signal(number, signal.SIG_IGN)  # nothing is left to stop, and the end is recorded
    # torchrun must not see endings that all ranks agreed on: it would report a failure, and kill ranks that end a
    # moment later.
    return 0 if code in AGREED_ENDINGS else code


def _log_errors(file: Path) -> None:
    """Redirect standard error to this rank's own file, including what libraries and crashes write to it directly.

    On the terminal the ranks' lines would be mixed. The launcher shows the last lines of the rank that failed.
    """
    file.parent.mkdir(exist_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.enable()


def _record_collectives(folder: Path) -> None:
    """Have torch's flight recorder keep NCCL's last collectives, and write them into the run folder at a time-out."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(flight_recorder_file(folder)))


if __name__ == "__main__":
    RankEnd().leave(main())
