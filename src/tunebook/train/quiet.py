"""Keep the libraries' chatter out of the terminal and in the run folder."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LIBRARIES = ("transformers", "trl", "accelerate", "datasets", "peft", "deepspeed", "DeepSpeed")


@contextmanager
def quiet_libraries(log_file: Path) -> Iterator[None]:
    """Send the libraries' log records and Python warnings to `log_file`; only errors still reach the terminal."""
    to_file = logging.FileHandler(log_file)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    to_terminal = logging.StreamHandler()
    to_terminal.setLevel(logging.ERROR)
    logging.captureWarnings(True)
    was_raising, logging.raiseExceptions = logging.raiseExceptions, False  # a full disk would print one per record
    for name in (*_LIBRARIES, "py.warnings"):
        logger = logging.getLogger(name)
        logger.handlers = [to_file, to_terminal]
        logger.propagate = False
        logger.setLevel(logging.INFO)
    hide_progress_bars()
    try:
        yield
    finally:
        logging.raiseExceptions = was_raising
        logging.captureWarnings(False)
        for name in (*_LIBRARIES, "py.warnings"):
            logging.getLogger(name).removeHandler(to_file)
        to_file.close()


def hide_progress_bars() -> None:
    """Turn off the libraries' own bars: one display at a time."""
    import datasets
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    datasets.disable_progress_bars()
