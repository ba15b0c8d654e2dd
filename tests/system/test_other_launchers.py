"""Variables of other launchers train nothing else, and a command inside another launcher says what to type."""

from __future__ import annotations

import json

import pytest

from tests.system.conftest import FIRST_STEPS

COMMAND = ["tunebook", "train", "quickstart", "evaluation=none", FIRST_STEPS, "hardware=cpu", "parallelism=single"]
LEFT_OVER = {
    "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533",
    "ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", "FSDP_OFFLOAD_PARAMS": "true", "PARALLELISM_CONFIG_TP_SIZE": "2",
    "PET_NNODES": "2", "TORCHELASTIC_MAX_RESTARTS": "3", "DEEPSPEED_TIMEOUT": "1",
}  # fmt: skip


def test_what_is_left_over_changes_nothing_and_is_named_once(run, read_run, tmp_path, one_rank):
    assert "removed from the environment" not in one_rank.printed
    ended = run([*COMMAND, f"outputs={tmp_path}"], **LEFT_OVER)
    assert ended.exit_code == 0, ended.output
    assert ended.output.count(f"removed from the environment: {', '.join(sorted(LEFT_OVER))}.") == 1
    assert ended.output.count("removed from the environment") == 1
    trained = read_run(tmp_path / "quickstart" / "latest")
    assert trained.losses == pytest.approx(one_rank.losses, rel=1e-5)
    manifest = json.loads((trained.folder / "manifest.json").read_text())
    assert not set(manifest["environment"]["variables"]) & set(LEFT_OVER)


@pytest.mark.parametrize(
    ("launcher", "name"),
    [
        (["torchrun", "--standalone", "--nproc_per_node", "2", "--no-python"], "torchrun"),
        (["torchrun", "--standalone", "--nproc_per_node", "1", "--no-python"], "torchrun"),
        (
            ["accelerate", "launch", "--cpu", "--num_processes", "1", "--mixed_precision", "bf16", "--no_python"],
            "accelerate launch",
        ),
    ],
    ids=["torchrun of two", "torchrun of one", "accelerate of one"],
)
def test_inside_another_launcher_nothing_begins(run, tmp_path, launcher, name):
    outputs = tmp_path / "outputs"
    ended = run([*launcher, *COMMAND, f"outputs={outputs}"])
    assert ended.exit_code != 0
    assert f"error: this command runs inside {name} (" in ended.output
    assert f"`{' '.join(COMMAND)} outputs={outputs}`" in ended.output
    assert not outputs.exists()
