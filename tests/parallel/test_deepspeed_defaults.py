"""What hydra_configs/parallelism leaves out because it is DeepSpeed's own default still is that default."""

import json
import subprocess
import sys
from importlib import metadata

import pytest

# Asked in a process of its own: importing DeepSpeed prints, warns and takes seconds.
ASK = """
import json
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig as Optimizer
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadParamConfig as Parameters

stages = {stage: DeepSpeedZeroConfig(stage=stage) for stage in (2, 3)}
names = ("allgather_bucket_size", "sub_group_size", "max_live_parameters", "max_reuse_distance")
print(json.dumps({name: getattr(stages[3], name) for name in names} | {
    "overlap_comm": [stages[stage].overlap_comm for stage in (2, 3)],
    "buffer_size": Parameters(device="nvme").buffer_size,
    "pin_memory": [Optimizer(device="cpu").pin_memory, Parameters(device="cpu").pin_memory],
}))
"""


@pytest.mark.slow
def test_the_defaults_that_recipes_rely_on():
    try:
        metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        pytest.skip("DeepSpeed is not installed here")
    answer = subprocess.run([sys.executable, "-W", "ignore", "-c", ASK], check=True, capture_output=True, text=True)
    assert json.loads(answer.stdout.splitlines()[-1]) == {
        "allgather_bucket_size": 500_000_000,
        "sub_group_size": 1_000_000_000,
        "max_live_parameters": 1_000_000_000,
        "max_reuse_distance": 1_000_000_000,
        "overlap_comm": [False, True],
        "buffer_size": 100_000_000,
        "pin_memory": [True, True],
    }
