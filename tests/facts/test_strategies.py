"""Facts of strategies are those of their settings."""

from __future__ import annotations

import pytest

from tunebook.config.choices import Strategy
from tunebook.config.schema import CHOICE_SCHEMAS, FsdpConfig, ZeroConfig
from tunebook.facts.strategies import FASTEST_ON_ONE_NODE, FASTEST_ON_SEVERAL_NODES, STRATEGIES, Engine


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


def test_the_stage_of_zero_is_what_it_divides() -> None:
    stages = {strategy: facts.zero_stage for strategy, facts in STRATEGIES.items() if facts.zero_stage is not None}
    assert stages == {Strategy.zero1: 1, Strategy.zero2: 2, Strategy.zero3: 3}


def test_what_auto_tries_compiles_and_says_why() -> None:
    for strategy in (*FASTEST_ON_ONE_NODE, *FASTEST_ON_SEVERAL_NODES):
        assert STRATEGIES[strategy].may_compile and STRATEGIES[strategy].auto_reason
    assert not STRATEGIES[Strategy.zero3].may_compile
