"""What libraries log: into the run's file, and nothing of it on the terminal where the file cannot take it."""

from __future__ import annotations

import logging
import sys

import pytest

from tunebook.train.quiet import _LIBRARIES, quiet_libraries


@pytest.fixture(autouse=True)
def handlers_as_before():
    loggers = [logging.getLogger(name) for name in (*_LIBRARIES, "py.warnings")]
    before = [(logger, logger.handlers, logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, handlers, propagate, level in before:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_full_disk_is_not_told_once_for_every_record(capfd):
    was_raising = logging.raiseExceptions
    with pytest.raises(OSError, match="No space left"), quiet_libraries("/dev/full"):
        logging.getLogger("transformers").info("said")
    assert capfd.readouterr().err == ""
    assert logging.raiseExceptions is was_raising
