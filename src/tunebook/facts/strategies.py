"""Strategies: which library runs them, what they divide among the ranks, and what they gather."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum

from tunebook.config.choices import Strategy
from tunebook.config.schema import RunConfig


class Engine(Enum):
    """The library that divides the model."""

    torch = "torch"  # nothing is divided: one process, or DistributedDataParallel
    deepspeed = "deepspeed"
    fsdp = "fsdp"  # FSDP2, `fully_shard`


class Divided(IntEnum):
    """Which states are divided among the ranks; each includes those before it, as ZeRO's stages do."""

    nothing = 0
    optimizer = 1
    gradients = 2
    weights = 3


@dataclass(frozen=True, kw_only=True)
class StrategyFacts:
    """One strategy. What is not divided is whole on every rank."""

    engine: Engine = Engine.torch
    title: str = ""  # for people; empty: the name
    runs_on_one: bool = False  # one rank, and no more
    averages_gradients: bool = False  # by DDP's buckets
    divides: Divided = Divided.nothing
    keeps_gathered: bool = False  # what the forward pass gathered stays whole until the backward pass
    within_groups: bool = False  # divided among the GPUs of a group, and copied between groups
    # Compiled blocks were seen training under it, or under one that does the same to a block. ZeRO-3 gathers weights by
    # hooks inside a block: 8,500 tokens/s where fsdp had 21,500 (h200x4_speed.jsonl).
    may_compile: bool = True
    moves_as: Strategy | None = None  # the measured one that sends as much; None: itself
    on_one_node: Strategy | None = None  # what it is on a single node; None: itself
    auto_reason: str = ""  # why `parallelism=auto` takes it

    @property
    def is_zero(self) -> bool:
        """One of DeepSpeed's."""
        return self.engine is Engine.deepspeed

    @property
    def is_fsdp(self) -> bool:
        """One of FSDP's."""
        return self.engine is Engine.fsdp

    @property
    def is_copied(self) -> bool:
        """Every rank holds all states."""
        return self.divides is Divided.nothing

    @property
    def divides_optimizer(self) -> bool:
        """Each rank holds a part of the optimizer states."""
        return self.divides >= Divided.optimizer

    @property
    def divides_gradients(self) -> bool:
        """Each rank holds a part of the gradients."""
        return self.divides >= Divided.gradients

    @property
    def divides_weights(self) -> bool:
        """Each rank holds a part of the weights."""
        return self.divides >= Divided.weights

    @property
    def zero_stage(self) -> int | None:
        """DeepSpeed's name for what is divided; None with another library."""
        return int(self.divides) if self.is_zero else None

    @property
    def keeps_whole_weights(self) -> bool:
        """ZeRO's first two stages, which divide gradients or optimizer states alone."""
        return self.zero_stage in (1, 2)

    @property
    def is_zero3(self) -> bool:
        """ZeRO's third stage."""
        return self.zero_stage == 3

    @property
    def gathers_each_layer(self) -> bool:
        """Weights are gathered layer by layer among all ranks, in the forward and again in the backward pass."""
        return self.divides_weights and not self.keeps_gathered and not self.within_groups


STRATEGIES: dict[Strategy, StrategyFacts] = {
    Strategy.auto: StrategyFacts(),  # not decided yet
    Strategy.single: StrategyFacts(runs_on_one=True),
    Strategy.ddp: StrategyFacts(averages_gradients=True, auto_reason="a whole copy on each GPU is the fastest"),
    Strategy.zero1: StrategyFacts(engine=Engine.deepspeed, divides=Divided.optimizer, moves_as=Strategy.zero2),
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
        on_one_node=Strategy.fsdp,
        auto_reason="all states divided among the GPUs of a node, which have the fastest links",
    ),
}
UNDECIDED, ALONE, COPIED = Strategy.auto, Strategy.single, Strategy.ddp
# What `auto` tries, the fastest first. Between nodes links are slow, so there a model is divided within each node where
# it fits that way. Not ZeRO, which divides the same and was slower, nor what offloads: the plan names those if nothing
# fits.
FASTEST_ON_ONE_NODE = (Strategy.ddp, Strategy.fsdp_grad_op, Strategy.fsdp)
FASTEST_ON_SEVERAL_NODES = (Strategy.ddp, Strategy.hsdp, Strategy.fsdp)
# Of each library the strategy that keeps whole weights for a pass, and the one that gathers them for each layer.
KEEPING_AND_GATHERING = {
    Engine.deepspeed: (Strategy.zero2, Strategy.zero3),
    Engine.fsdp: (Strategy.fsdp_grad_op, Strategy.fsdp),
}
DIVIDED = (Strategy.fsdp, Strategy.zero2, Strategy.zero3)  # suggested for several GPUs, and measured side by side
SPARING_THE_HOST = Strategy.fsdp  # all states on the GPUs
OFFLOADING_OPTIMIZER, OFFLOADING_ALL = Strategy.zero2, Strategy.zero3


def strategy_facts(config: RunConfig) -> StrategyFacts:
    """The facts of a run's strategy."""
    return STRATEGIES[config.parallelism.strategy]
