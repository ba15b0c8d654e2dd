"""`python -m tunebook.train RUN_FOLDER`: the program that the launcher starts once per rank."""

import gc
import os
import signal
import sys
from pathlib import Path

from tunebook.processes import stop_when_input_ends
from tunebook.record.start_up import StartClock, process_begun
from tunebook.terminal import outlive_readers
from tunebook.train.rank_process import AGREED_ENDINGS, RankEnd, StopRequest, hide_import_warnings


def main() -> int:
    """Run this rank; the exit code is for torchrun, the launcher reads the ranks' outcome files."""
    outlive_readers()
    stop_when_input_ends()
    clock = StartClock(process_begun())
    clock.passed("start_python")
    folder = Path(sys.argv[1])
    request = StopRequest(folder)
    with request.listening():
        gc.disable()  # imports make many objects and no garbage: they take a sixth less time so
        hide_import_warnings()
        from tunebook.train.run import run_rank

        gc.freeze()
        gc.enable()
        clock.passed("import_libraries")
        code = run_rank(folder, request, clock)
    for number in StopRequest.signals:
        signal.signal(number, signal.SIG_IGN)  # nothing is left to stop, and the outcome is written
    # torchrun must not get an exit code that all ranks agreed on: it would call it a failure and kill slower ranks.
    return 0 if code in AGREED_ENDINGS and "TORCHELASTIC_RUN_ID" in os.environ else code


if __name__ == "__main__":
    RankEnd().leave(main())
