"""`python -m tunebook.commands.slurm_job RUN_FOLDER`: the program of a job script; see `slurm_turn`."""

import signal
import sys
from pathlib import Path


def main() -> int:
    """Record stop requests from the first moment: Slurm may want the nodes back while Python still imports."""
    stop_requests: list[signal.Signals] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda number, _frame: stop_requests.append(signal.Signals(number)))
    from tunebook.commands.slurm_turn import carry_out_turn

    return carry_out_turn(Path(sys.argv[1]), stop_requests)


if __name__ == "__main__":
    sys.exit(main())
