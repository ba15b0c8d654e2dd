"""The sandbox of this machine: bubblewrap, whatever service runs here. The service is tested in tests/system/docker."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import pytest

from tunebook.evaluate.sandbox.start import HANDOVER_VARIABLE, Outcome, Program, Sandbox, open_sandbox, run_programs


@pytest.fixture(scope="session")
def bubblewrap() -> Sandbox:
    """Skips a test on a machine without bubblewrap; CI has it."""
    if shutil.which("bwrap") is None and not os.environ.get("CI"):
        pytest.skip("no bubblewrap on this machine: apt install bubblewrap")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HANDOVER_VARIABLE, "/nonexistent/handover")
        found = open_sandbox()
    assert found.name == "bubblewrap"
    return found


@pytest.fixture(scope="session")
def judge(bubblewrap: Sandbox) -> Callable[..., Outcome]:
    """Judge one program by one test."""

    def judged(source: str, test: str, time_limit_s: float = 10.0) -> Outcome:
        program = Program(id="sample", source=source, test=test, time_limit_s=time_limit_s)
        [outcome] = run_programs([program], bubblewrap)
        return outcome

    return judged
