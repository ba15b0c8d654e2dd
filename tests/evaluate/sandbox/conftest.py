"""The sandbox of this machine: bubblewrap, whatever service runs here. The service is tested in tests/system/docker."""

from __future__ import annotations

import os
import shutil

import pytest

from tunebook.evaluate.sandbox.start import HANDOVER_VARIABLE, Sandbox, open_sandbox


@pytest.fixture(scope="session")
def bubblewrap() -> Sandbox:
    """Skips a test on a machine without bubblewrap; CI has it."""
    if shutil.which("bwrap") is None and not os.environ.get("CI"):
        pytest.skip("no bubblewrap on this machine: apt install bubblewrap")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HANDOVER_VARIABLE, "/nonexistent/handover")
        sandbox = open_sandbox()
    assert sandbox.name == "bubblewrap"
    return sandbox
