"""Which runs compile kernels in their first steps."""

import pytest

from tunebook.config.choices import Attention, Generation
from tunebook.config.frozen import plain_config
from tunebook.config.model_facts import LayerFacts, ModelFacts
from tunebook.config.schema import AttentionConfig, HardwareConfig, ModelConfig
from tunebook.facts.compiling import compiles_kernels

NUMBERS = dict.fromkeys(("num_layers", "parameters", "linear_parameters", "active_parameters", "largest_parameter"), 1)
WITH_STATES = ModelFacts(measured=LayerFacts(**NUMBERS, packing_packages=["fla-core"]))


@pytest.mark.parametrize(
    ("model", "attention", "generation", "compiles"),
    [
        ({}, Attention.sdpa, Generation.hopper, False),
        ({"compile_layers": True}, Attention.sdpa, Generation.hopper, True),
        ({}, Attention.flex_attention, Generation.hopper, True),
        ({"facts": WITH_STATES}, Attention.sdpa, Generation.cpu, False),
        ({"facts": WITH_STATES}, Attention.sdpa, Generation.ada, True),
    ],
)
def test_what_compiles_kernels(model, attention, generation, compiles):
    config = plain_config(
        model=ModelConfig(**model),
        attention=AttentionConfig(implementation=attention),
        hardware=HardwareConfig(generation=generation),
    )
    assert compiles_kernels(config) is compiles
