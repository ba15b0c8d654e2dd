"""`python -m tunebook.train RUN_FOLDER`: the program that the launcher starts once per rank.

A run's only rank may start before its folder is known. It imports the libraries and then waits for the folder.
"""

import gc
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from tunebook.processes import last_argument, stop_when_input_ends
from tunebook.record.start_up import StartClock, launch_time, process_begun
from tunebook.terminal import outlive_readers, quiet_libraries
from tunebook.train.rank_process import AGREED_ENDINGS, RankEnd, StopRequest, hide_import_warnings


def import_libraries() -> None:
    """Import everything that a rank runs."""
    gc.disable()  # imports make many objects and no garbage: they take a sixth less time so
    hide_import_warnings()
    import tunebook.train.run  # noqa: F401

    gc.freeze()
    gc.enable()


def wait_for_folder() -> str | None:
    """Import the libraries and wait for the run folder; None if the launcher has ended."""
    with quiet_libraries():
        import_libraries()
        with suppress(ImportError):
            import deepspeed  # noqa: F401  accelerate imports it in every run, if it is installed
    return last_argument()


def main() -> int:
    """Run this rank; the exit code is for torchrun, the launcher reads the ranks' outcome files."""
    outlive_readers()
    clock = StartClock(process_begun())
    clock.passed("start_python")
    if len(sys.argv) > 1:
        folder = Path(sys.argv[1])
    elif (argument := wait_for_folder()) is not None:
        folder = Path(argument)
        clock = StartClock(launch_time(folder))  # the launcher was at work until then
    else:
        return 0
    stop_when_input_ends()
    request = StopRequest(folder)
    with request.listening():
        import_libraries()
        from tunebook.train.run import run_rank

        clock.passed("import_libraries")
        code = run_rank(folder, request, clock)
    for number in StopRequest.signals:
        signal.signal(number, signal.SIG_IGN)  # nothing is left to stop, and the outcome is written
    # torchrun must not get an exit code that all ranks agreed on: it would call it a failure and kill slower ranks.
    return 0 if code in AGREED_ENDINGS and "TORCHELASTIC_RUN_ID" in os.environ else code


if __name__ == "__main__":
    RankEnd().leave(main())
