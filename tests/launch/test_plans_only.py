"""What is planned but not started is refused by name, never run as something else."""

import pytest

from tunebook.config.auto import resolve_auto
from tunebook.config.compose import compose
from tunebook.errors import RulesError
from tunebook.hardware.detect import Machine
from tunebook.launch.plans_only import refuse_plans_only

NO_GPU = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0)


def test_it_is_refused_with_what_runs_instead():
    config = resolve_auto(compose("llama3_8b_fp8", []).config, NO_GPU).config
    with pytest.raises(RulesError) as caught:
        refuse_plans_only(config)
    assert [problem.fix for problem in caught.value.problems] == ["precision=bf16"]


@pytest.mark.parametrize("words", [["qwen3b_zero2"], ["llama2_70b_fsdp"], ["llama2_70b_fsdp", "parallelism=hsdp"]])
def test_what_runs_is_not_refused(words):
    refuse_plans_only(resolve_auto(compose(words[0], words[1:]).config, NO_GPU).config)
