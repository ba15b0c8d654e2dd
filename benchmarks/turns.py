"""What a run says to `gpu_queue.py`, which lets several runs get ready on a GPU and times one at a time.

Files in the folder $TUNEBOOK_BENCH_TURN carry the messages, and $TUNEBOOK_BENCH_WARM_UP says how many steps are not
timed. Without these variables nothing waits.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

FOLDER = "TUNEBOOK_BENCH_TURN"
WARM_UP = "TUNEBOOK_BENCH_WARM_UP"
_POLL_S = 0.02


def wait_for_gpus() -> None:
    """To be called before a GPU is used."""
    _say_and_wait("ready", "go")


def end_training() -> None:
    """To be called by a rank that has finished: an evaluation follows, which is not timed."""
    _say("ended")


def end_of_step(steps: int) -> None:
    """To be called by every rank after each step. Waits before the last step of the warm-up, whose time grows by that.

    From then on nothing else uses the run's GPUs.
    """
    if FOLDER in os.environ and steps == int(os.environ[WARM_UP]) - 1:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what is under way would disturb a run that is timed
        _say_and_wait("warm", "alone")


def end_steps_with(owner: Any, method: str) -> None:
    """Let `owner.method`, which is called once a step, call `end_of_step`."""
    original, steps = getattr(owner, method), 0

    def counted(*arguments: Any, **more: Any) -> Any:
        nonlocal steps
        result = original(*arguments, **more)
        steps += 1
        end_of_step(steps)
        return result

    setattr(owner, method, counted)


def _say_and_wait(word: str, answer: str) -> None:
    _say(word)
    while FOLDER in os.environ and not (Path(os.environ[FOLDER]) / answer).exists():
        time.sleep(_POLL_S)


def _say(word: str) -> None:
    if FOLDER in os.environ:
        (Path(os.environ[FOLDER]) / f"{word}-{os.environ.get('RANK', '0')}").touch()
