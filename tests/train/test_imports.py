"""What the start of a run does not import. Seconds before the first step go to imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

TORCH = {"torch", "transformers", "datasets", "pandas", "peft", "trl", "accelerate", "lm_eval"}
# Of what may be installed for a run, torchao and bitsandbytes are missing here: transformers and PEFT import them.
RARE = {"deepspeed", "lm_eval", "liger_kernel", "fla", "ray", "optuna", "tensorboard", "trackio", "wandb", "sklearn",
        "matplotlib", "torchvision", "IPython"}  # fmt: skip


@pytest.mark.parametrize(
    ("modules", "avoided"),
    [
        pytest.param("tunebook.commands.job, tunebook.commands.train", TORCH, id="launcher"),
        pytest.param("tunebook.train.run", RARE, id="rank"),
    ],
)
def test_a_start_imports_only_what_every_run_needs(modules, avoided):
    program = f"import sys, tunebook.cli.app, {modules}; print(*sys.modules)"
    imported = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert avoided.isdisjoint(imported.stdout.split())
