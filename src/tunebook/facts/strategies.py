"""Strategies: which library runs them, what they shard over the ranks, and what they gather."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum

from tunebook.config.choices import Strategy
from tunebook.config.schema import RunConfig


class Engine(Enum):
    """The library that shards the model."""

    torch = "torch"  # no sharding: one process, or DistributedDataParallel
    deepspeed = "deepspeed"
    fsdp = "fsdp"  # FSDP2, `fully_shard`


class Divided(IntEnum):
    """Which states are sharded over the ranks; each value includes those before it, as ZeRO's stages do."""

    nothing = 0
    optimizer = 1
    gradients = 2
    weights = 3


@dataclass(frozen=True, kw_only=True)
class StrategyFacts:
    """One strategy. Every rank holds all of what is not sharded."""

    engine: Engine = Engine.torch
    title: str = ""  # for display; empty: the name
    runs_on_one: bool = False  # exactly one rank
    averages_gradients: bool = False  # by DDP's buckets
    divides: Divided = Divided.nothing
    keeps_gathered: bool = False  # gathered parameters stay until the backward pass
    within_groups: bool = False  # sharded within a group of GPUs, and replicated over groups
    # Compiled blocks were tested with it, or with a strategy that treats a block in the same way. ZeRO-3 gathers
    # weights by hooks inside a block: 8,500 tokens/s, where fsdp reached 21,500 (h200x4_speed.jsonl).
    may_compile: bool = True
    auto_reason: str = ""  # why `parallelism=auto` chooses it

    @property
    def is_zero(self) -> bool:
        """Whether DeepSpeed runs it."""
        return self.engine is Engine.deepspeed

    @property
    def is_fsdp(self) -> bool:
        """Whether FSDP runs it."""
        return self.engine is Engine.fsdp

    @property
    def is_copied(self) -> bool:
        """Whether every rank holds all states."""
        return self.divides is Divided.nothing

    @property
    def divides_optimizer(self) -> bool:
        """Whether each rank holds a shard of the optimizer states."""
        return self.divides >= Divided.optimizer

    @property
    def divides_gradients(self) -> bool:
        """Whether each rank holds a shard of the gradients."""
        return self.divides >= Divided.gradients

    @property
    def divides_weights(self) -> bool:
        """Whether each rank holds a shard of the weights."""
        return self.divides >= Divided.weights

    @property
    def zero_stage(self) -> int | None:
        """The ZeRO stage; None with another library."""
        return int(self.divides) if self.is_zero else None

    @property
    def keeps_whole_weights(self) -> bool:
        """Whether it is ZeRO-1 or ZeRO-2, which shard only optimizer states and gradients."""
        return self.zero_stage in (1, 2)

    @property
    def is_zero3(self) -> bool:
        """Whether it is ZeRO-3."""
        return self.zero_stage == 3


STRATEGIES: dict[Strategy, StrategyFacts] = {
    Strategy.auto: StrategyFacts(),  # not decided yet
    Strategy.single: StrategyFacts(runs_on_one=True),
    Strategy.ddp: StrategyFacts(averages_gradients=True, auto_reason="a whole copy on each rank"),
    Strategy.zero1: StrategyFacts(engine=Engine.deepspeed, divides=Divided.optimizer),
    Strategy.zero2: StrategyFacts(engine=Engine.deepspeed, title="ZeRO-2", divides=Divided.gradients),
    Strategy.zero3: StrategyFacts(engine=Engine.deepspeed, title="ZeRO-3", divides=Divided.weights, may_compile=False),
    Strategy.fsdp: StrategyFacts(
        engine=Engine.fsdp, divides=Divided.weights, title="FSDP", auto_reason="all states divided among all GPUs"
    ),
    Strategy.fsdp_grad_op: StrategyFacts(
        engine=Engine.fsdp,
        divides=Divided.weights,
        title="FSDP without resharding",
        keeps_gathered=True,
        auto_reason="gradients and optimizer states divided among the GPUs",
    ),
    Strategy.hsdp: StrategyFacts(
        engine=Engine.fsdp,
        divides=Divided.weights,
        within_groups=True,
        auto_reason="all states divided among the GPUs of a node, which have the fastest links",
    ),
}
UNDECIDED, ALONE, COPIED = Strategy.auto, Strategy.single, Strategy.ddp
# What `auto` tries, fastest first. Links between nodes are slow, so with several nodes a model is sharded within each
# node if it fits. Not ZeRO, which shards the same and was slower, and nothing that offloads: the plan names those if
# nothing fits.
FASTEST_ON_ONE_NODE = (Strategy.ddp, Strategy.fsdp_grad_op, Strategy.fsdp)
FASTEST_ON_SEVERAL_NODES = (Strategy.ddp, Strategy.hsdp, Strategy.fsdp)


def strategy_facts(config: RunConfig) -> StrategyFacts:
    """The facts of the run's strategy."""
    return STRATEGIES[config.parallelism.strategy]
