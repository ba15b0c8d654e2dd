"""`python -m tunebook.launch.rank RUN_FOLDER`: `tunebook.train` with what only one rank of several needs."""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path

from tunebook.launch.commands import DIES_WITH_PARENT
from tunebook.launch.logs import flight_recorder_file, rank_log
from tunebook.processes import die_with_parent
from tunebook.train.__main__ import main as train
from tunebook.train.rank_process import RankEnd


def main() -> int:
    """Run this rank; return its exit code.

    Standard error goes to this rank's own file, including what libraries and crashes write to it directly: on the
    terminal the ranks' lines would be mixed. The launcher shows the last lines of the rank that failed.
    """
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    if DIES_WITH_PARENT in sys.argv:  # Ray starts replacements at once, and two may not work in one folder
        die_with_parent()
    log = rank_log(folder, rank)
    log.parent.mkdir(exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.enable()
    # torch's flight recorder keeps NCCL's last collectives, and writes them into the run folder at a time-out.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(flight_recorder_file(folder)))
    return train()


if __name__ == "__main__":
    RankEnd().leave(main())
