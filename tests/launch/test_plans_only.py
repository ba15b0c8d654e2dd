"""What is planned but not started is refused by name, never run as something else."""

import pytest

from tunebook.config.auto import resolve_auto
from tunebook.config.compose import compose
from tunebook.errors import RulesError
from tunebook.hardware.detect import Machine
from tunebook.launch.plans_only import refuse_plans_only

NO_GPU = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0)


@pytest.mark.parametrize(
    ("words", "fixes"),
    [
        (["llama2_70b_fsdp"], ["launcher=local"]),
        (["llama3_8b_fp8"], ["precision=bf16"]),
        (["llama2_70b_fsdp", "parallelism=hsdp"], ["launcher=local", "parallelism=fsdp"]),
    ],
)
def test_each_is_refused_with_what_runs_instead(words, fixes):
    config = resolve_auto(compose(words[0], words[1:]).config, NO_GPU).config
    with pytest.raises(RulesError) as caught:
        refuse_plans_only(config)
    assert [problem.fix for problem in caught.value.problems] == fixes


def test_what_runs_is_not_refused():
    refuse_plans_only(resolve_auto(compose("qwen3b_zero2", []).config, NO_GPU).config)
