"""`python -m tunebook.evaluate --run DIR --when WHEN`: the program that one evaluation runs in; see `worker`."""

import signal
import sys

from tunebook.errors import StoppedError


def main() -> int:
    """Evaluate, and end quietly when asked to stop, also while the libraries are still being imported."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from tunebook.evaluate.worker import main as work

        return work()
    except KeyboardInterrupt:
        print("evaluation: stopped; the finished tasks are kept", file=sys.stderr)
        return StoppedError.exit_code


if __name__ == "__main__":
    sys.exit(main())
