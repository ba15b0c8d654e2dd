"""What the terminal says of compilations that take long in silence."""

from dataclasses import replace

import pytest

from tunebook.config.choices import Generation
from tunebook.facts.compiling import compilation_notice

from ..plan.plans import resolved


def test_a_run_that_compiles_nothing_says_nothing():
    assert compilation_notice(resolved("quickstart")) is None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.compile_layers=true", "torch.compile the model's blocks (8 to 98 s on an H200, longer on a CPU)"),
        ("attention=flash_attention_4", "flash-attn 4 a kernel for each new shape"),
        ("attention=flex_attention", "torch.compile the attention"),
    ],
)
def test_what_is_compiled_is_named(override, said):
    notice = compilation_notice(resolved("quickstart", override))
    assert notice.startswith(f"the first steps compile, without output: {said}")


def test_kernels_of_packages_are_compiled_on_gpus():
    config = resolved("quickstart")
    config.model.facts.measured = replace(config.model.facts.measured, packing_packages=["fla-core"])
    assert compilation_notice(config) is None, "a CPU calls none of them"
    config.hardware.generation = Generation.hopper
    assert "Triton the kernels of fla-core" in compilation_notice(config)
