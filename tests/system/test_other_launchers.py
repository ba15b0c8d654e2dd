"""A command inside another launcher, or with its variables, says what to type."""

from __future__ import annotations

import pytest

from tests.system.conftest import FIRST_STEPS

COMMAND = ["tunebook", "train", "quickstart", "evaluation=none", FIRST_STEPS, "hardware=cpu", "parallelism=single"]


@pytest.mark.parametrize(
    "launcher",
    [
        ["torchrun", "--standalone", "--nproc_per_node", "2", "--no-python"],
        ["accelerate", "launch", "--cpu", "--num_processes", "1", "--mixed_precision", "bf16", "--no_python"],
        ["env", "ACCELERATE_USE_FSDP=true"],
    ],
    ids=["torchrun of two", "accelerate of one", "left over"],
)
def test_inside_another_launcher_nothing_begins(run, tmp_path, launcher):
    outputs = tmp_path / "outputs"
    ended = run([*launcher, *COMMAND, f"outputs={outputs}"])
    assert ended.exit_code != 0
    assert "error: " in ended.output
    assert not outputs.exists()
