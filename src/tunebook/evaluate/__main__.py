"""`python -m tunebook.evaluate --run DIR --when WHEN`: the process of one evaluation; see `worker`."""

import signal
import sys

from tunebook.errors import StoppedError
from tunebook.processes import stop_when_input_ends
from tunebook.terminal import outlive_readers


def main() -> int:
    """Evaluate, and end quietly on a stop request, even while the libraries are still being imported."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    outlive_readers()
    stop_when_input_ends()
    try:
        from tunebook.evaluate.worker import main as work

        return work()
    except KeyboardInterrupt:
        return StoppedError.exit_code


if __name__ == "__main__":
    sys.exit(main())
