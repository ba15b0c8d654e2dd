"""The tables of strategies, optimizers and attention kernels are complete and agree with their libraries."""

from __future__ import annotations

from transformers.training_args import OptimizerNames

from tunebook.config.choices import OptimizerName, Strategy
from tunebook.config.schema import CHOICE_SCHEMAS, FsdpConfig, ZeroConfig
from tunebook.facts.optimizers import OPTIMIZERS
from tunebook.facts.strategies import STRATEGIES, Engine


def test_every_strategy_has_facts_and_the_schema_of_its_library() -> None:
    assert set(STRATEGIES) == set(Strategy)
    for strategy, schema in CHOICE_SCHEMAS["parallelism"].items():
        engine = {ZeroConfig: Engine.deepspeed, FsdpConfig: Engine.fsdp}.get(schema, Engine.torch)
        assert STRATEGIES[Strategy[strategy]].engine is engine


def test_transformers_knows_every_optimizer() -> None:
    assert set(OPTIMIZERS) == set(OptimizerName)
    assert {facts.optim for facts in OPTIMIZERS.values()} <= {name.value for name in OptimizerNames}
