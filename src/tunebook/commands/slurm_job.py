"""`python -m tunebook.commands.slurm_job RUN_FOLDER`: the program of a job script; see `slurm_turn`."""

import sys
from pathlib import Path

from tunebook.launch.supervise import StopRequests


def main() -> int:
    """Record stop requests from the first moment: Slurm may want the nodes back while Python still imports."""
    with StopRequests().listening() as requests:
        from tunebook.commands.slurm_turn import carry_out_turn

        return carry_out_turn(Path(sys.argv[1]), requests)


if __name__ == "__main__":
    sys.exit(main())
