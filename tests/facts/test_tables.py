"""The tables of strategies, optimizers and attention kernels are complete and agree with their libraries."""

from __future__ import annotations

import pytest
from transformers.training_args import OptimizerNames

from tunebook.config.choices import Attention, OptimizerName, Strategy
from tunebook.config.schema import CHOICE_SCHEMAS, FsdpConfig, ZeroConfig
from tunebook.facts.attention import ATTENTIONS, COMPILED, MASKED, WITHOUT_KERNEL
from tunebook.facts.optimizers import OPTIMIZERS
from tunebook.facts.strategies import STRATEGIES, Engine


def test_every_strategy_has_facts_and_the_schema_of_its_library() -> None:
    assert set(STRATEGIES) == set(Strategy)
    for strategy, schema in CHOICE_SCHEMAS["parallelism"].items():
        engine = {ZeroConfig: Engine.deepspeed, FsdpConfig: Engine.fsdp}.get(schema, Engine.torch)
        assert STRATEGIES[Strategy[strategy]].engine is engine


@pytest.mark.parametrize(
    ("strategy", "optimizer", "gradients", "weights"),
    [
        (Strategy.single, False, False, False),
        (Strategy.ddp, False, False, False),
        (Strategy.zero1, True, False, False),
        (Strategy.zero2, True, True, False),
        (Strategy.zero3, True, True, True),
        (Strategy.fsdp, True, True, True),
        (Strategy.fsdp_grad_op, True, True, True),
        (Strategy.hsdp, True, True, True),
    ],
)
def test_what_is_divided(strategy: Strategy, optimizer: bool, gradients: bool, weights: bool) -> None:
    """Source: the ZeRO paper (Rajbhandari et al. 2020), figure 1; torch 2.13, `fully_shard`."""
    facts = STRATEGIES[strategy]
    assert (facts.divides_optimizer, facts.divides_gradients, facts.divides_weights) == (optimizer, gradients, weights)
    assert facts.is_copied == (not optimizer)


def test_transformers_knows_every_optimizer() -> None:
    assert set(OPTIMIZERS) == set(OptimizerName)
    assert {facts.optim for facts in OPTIMIZERS.values()} <= {name.value for name in OptimizerNames}


def test_a_kernel_that_needs_a_package_needs_a_gpu_and_one_with_a_mask_runs_everywhere() -> None:
    assert set(ATTENTIONS) == set(Attention)
    for facts in ATTENTIONS.values():
        assert facts.package is None or facts.oldest is not None
        assert not facts.is_flash or (facts.oldest is not None and not facts.has_mask)
        assert not facts.needs_lengths or not facts.has_mask
    assert ATTENTIONS[MASKED].oldest is None and ATTENTIONS[WITHOUT_KERNEL].oldest is None
    assert ATTENTIONS[COMPILED].compiles_with_blocks
