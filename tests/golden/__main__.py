"""`python -m tests.golden`: write the files of this folder again, all or those of the tests that are named."""

from __future__ import annotations

import os
import sys

import pytest

from tests.golden.record import WRITE

os.environ[WRITE] = "1"
tests = sys.argv[1:] or ["tests/golden", "tests/system/test_golden.py"]
sys.exit(pytest.main(["-q", "-m", "system or not system", *tests]))
