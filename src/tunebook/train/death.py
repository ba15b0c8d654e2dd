"""How a rank ends: after an error of its own without the others, and without what Python does at a process's end."""

from __future__ import annotations

import atexit
import os
import sys
import time
from contextlib import suppress
from typing import NoReturn

from tunebook.errors import InvalidTrainingError, StoppedError

# Exit codes of endings that the ranks take together, each by itself.
AGREED_ENDINGS = (0, StoppedError.exit_code, InvalidTrainingError.exit_code)

_SEEN_WITHIN_S = 2.0  # torchrun looks at its processes ten times a second


class RankEnd:
    """How a rank's process ends. To be made before the libraries are imported: what they do at an end comes first then.

    Python's taking apart of its objects never comes. What DeepSpeed holds keeps gloo's threads past
    `destroy_process_group`, and one that lets go of a tensor while Python is taken apart aborts the process
    (pytorch#190489): a run that was over and saved would have failed.
    """

    def __init__(self) -> None:
        self._exit_code: int | None = None
        atexit.register(self._end)

    def _end(self) -> None:
        if self._exit_code is not None:
            _end_at_once(self._exit_code)

    def leave(self, exit_code: int) -> NoReturn:
        """End this process; where it failed alone at once, and without what libraries do at an end.

        NCCL's part of that waits until all ranks have come to it: a rank out of GPU memory stayed for minutes, with its
        GPU and the other ranks waiting in a collective, until somebody stopped the run (2 H200, FSDP). It stays a
        moment all the same: where it failed because another was killed, torchrun has to see that one's end first.
        """
        if exit_code in AGREED_ENDINGS:
            self._exit_code = exit_code
            sys.exit(exit_code)
        _flush()  # torchrun may kill it while it stays
        if os.environ.get("WORLD_SIZE", "1") != "1":
            time.sleep(_SEEN_WITHIN_S)
        _end_at_once(exit_code)


def _end_at_once(exit_code: int) -> NoReturn:
    _flush()
    os._exit(exit_code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # whoever read it may be gone, which is no failure of the run
            stream.flush()
