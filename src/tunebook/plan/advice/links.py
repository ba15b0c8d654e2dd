"""Choose ZeRO-2 or ZeRO-3 for a recipe, from the measured bandwidth of its links; the result shows the arithmetic.

Per optimizer step of `a` passes, P parameters of b bytes and n GPUs, each GPU sends and receives (n-1)/n times

    ZeRO-2         (a + 1) P b    gradients are reduced after every pass, updated weights are gathered once
    ZeRO-3, FSDP   3 a P b        weights are gathered before and again after the forward pass, gradients are reduced
    fsdp_grad_op   2 a P b        weights are gathered once in every pass, since each backward pass shards them again

ZeRO-3 moves 1.5 times as much as ZeRO-2 for a = 1. Source: Rajbhandari et al., ZeRO, section 7 (for a = 1). ZeRO-3
costs no time as long as its 3 P b (n-1)/n bytes of a pass take no longer than the pass computes. That is at least F P T
/ peak seconds for T tokens and F operations per parameter and token. P cancels, and the bandwidth must be 3 b (n-1)/n x
peak / (F T). DDP and ZeRO-1 move 2 P b a step for any a. That is the least of all, so a run that fits with them gets no
advice.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tunebook.config.choices import PeftMethod, Strategy, Switch
from tunebook.config.frozen import PARALLELISM_SCHEMAS
from tunebook.config.schema import FsdpConfig, RunConfig, ZeroConfig, starts_elsewhere
from tunebook.data.batch import BatchPlan, solve_batch
from tunebook.data.mean_length import mean_tokens
from tunebook.errors import Problem
from tunebook.facts.peaks import peak_of
from tunebook.facts.strategies import KEEPING_AND_GATHERING, STRATEGIES, Engine, strategy_facts
from tunebook.hardware.bandwidth import ALL_GATHER, ALL_REDUCE, Bandwidth, recall
from tunebook.hardware.detect import Machine
from tunebook.plan.memory.gpu import plan_memory
from tunebook.plan.memory.states import bytes_per_compute_value
from tunebook.plan.memory.work import is_recomputed
from tunebook.plan.rules import check

_GB, _TERA = 1e9, 1e12


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Inputs and results of the arithmetic for one GPU."""

    num_parameters: int
    element_bytes: int
    num_gpus: int
    tokens_per_pass: int
    passes_per_step: int
    operations_per_token: int  # per parameter: 2 forward, 4 backward, 2 more if activations are recomputed
    trains_all: bool  # False: an adapter, whose gradients are too small to count
    is_fsdp: bool  # FSDP shards frozen weights too, and reshards all weights after every pass
    peak_tflops: float
    bus_gb_per_s: float

    @property
    def share(self) -> float:
        """Fraction of the total that each GPU sends: (n-1)/n."""
        return (self.num_gpus - 1) / self.num_gpus

    @property
    def gathered_bytes_per_pass(self) -> float:
        """Bytes that ZeRO-3 moves through one GPU per pass."""
        return (3 if self.trains_all else 2) * self.num_parameters * self.element_bytes * self.share

    @property
    def gathering_s(self) -> float:
        """Seconds for these bytes at the measured bandwidth."""
        return self.gathered_bytes_per_pass / (self.bus_gb_per_s * _GB)

    @property
    def kept_bytes_per_step(self) -> float:
        """Bytes per step through one GPU with the strategy that keeps full weights: ZeRO-2, or FSDP's."""
        times = self.passes_per_step + 1 if self.trains_all else 0
        if self.is_fsdp:
            times = self.passes_per_step * (2 if self.trains_all else 1)
        return times * self.num_parameters * self.element_bytes * self.share

    @property
    def computing_s(self) -> float:
        """Minimum compute time of a pass."""
        operations = self.operations_per_token * self.num_parameters * self.tokens_per_pass
        return operations / (self.peak_tflops * _TERA)

    @property
    def needed_gb_per_s(self) -> float:
        """Minimum bandwidth at which ZeRO-3's communication hides behind the computation."""
        return self.gathered_bytes_per_pass / self.computing_s / _GB

    @property
    def needed_tokens(self) -> int:
        """Minimum tokens per pass at which communication hides, at the measured bandwidth."""
        return math.ceil(self.tokens_per_pass * self.gathering_s / self.computing_s)

    @property
    def hides(self) -> bool:
        """Whether ZeRO-3's communication takes no longer than the computation."""
        return self.gathering_s <= self.computing_s

    def text(self, kept: str, gathered: str) -> str:
        """The arithmetic as text, for strategies of these names."""
        kinds = 3 if self.trains_all else 2
        operations = self.operations_per_token * self.num_parameters * self.tokens_per_pass / _TERA
        times = f"{kept} moves an adapter only"
        if self.kept_bytes_per_step:
            ratio = self.passes_per_step * self.gathered_bytes_per_pass / self.kept_bytes_per_step
            times = f"{ratio:.3g} times what {kept} moves a step"
        return (
            f"{gathered} moves {kinds} x {self.num_parameters / 1e9:.3g}e9 parameters x {self.element_bytes} bytes x "
            f"{self.num_gpus - 1}/{self.num_gpus} = {self.gathered_bytes_per_pass / _GB:.3g} GB through each GPU in a "
            f"pass ({times}), {_milliseconds(self.gathering_s)} at the measured {self.bus_gb_per_s:.3g} GB/s. The pass "
            f"computes {self.operations_per_token} x {self.num_parameters / 1e9:.3g}e9 x {self.tokens_per_pass} tokens "
            f"= {operations:.3g} TFLOP, at least {_milliseconds(self.computing_s)} at {self.peak_tflops:g} TFLOP/s: it "
            f"hides from {self.needed_gb_per_s:.3g} GB/s or {self.needed_tokens} tokens a pass on"
        )


@dataclass(frozen=True, kw_only=True)
class LinkAdvice:
    """The strategy that suits the measured links."""

    text: str
    fix: str | None = None  # what to type, if the run's own strategy waits for its links
    data: dict[str, Any] = field(default_factory=dict)  # the numbers, with units


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def advise(config: RunConfig, batch: BatchPlan, bandwidth: Bandwidth, gpu_name: str) -> LinkAdvice | None:
    """Advice for a recipe; None if it does not apply, as for one GPU or a model of unknown size."""
    facts = strategy_facts(config)
    if config.model.facts is None or batch.world_size < 2 or facts.runs_on_one or facts.within_groups:
        return None
    if config.hardware.num_nodes > 1:
        what = f"the links between the {config.hardware.num_nodes} nodes were not measured, so no strategy is advised"
        return LinkAdvice(text=what)
    costs = costs_of(config, batch, bandwidth, gpu_name)
    if costs is None:
        return None
    if not facts.divides_gradients and plan_memory(config, batch).fits is not False:
        return None
    return _advice(config, batch, costs)


def costs_of(config: RunConfig, batch: BatchPlan, bandwidth: Bandwidth, gpu_name: str) -> Costs | None:
    """Inputs of the arithmetic; None if the GPU's peak or the bandwidth is unknown."""
    facts, compute = config.model.facts, config.precision.compute
    assert facts is not None
    uses_tf32 = config.precision.tf32 is Switch.enabled
    peak = peak_of(config.hardware.generation, compute, gpu_name=gpu_name, uses_tf32=uses_tf32)
    element_bytes = bytes_per_compute_value(config)
    layer_bytes = facts.num_parameters / facts.num_layers * element_bytes
    speed = _speed_at(bandwidth, layer_bytes)
    if peak is None or speed is None:
        return None
    trains_all = config.peft.method is PeftMethod.full
    return Costs(
        num_parameters=facts.num_parameters,
        element_bytes=element_bytes,
        num_gpus=batch.world_size,
        tokens_per_pass=batch.micro_batch_size * _tokens_per_row(config, batch) // batch.sequence_group_size,
        passes_per_step=batch.accumulation or 1,
        operations_per_token=(6 if trains_all else 4) + (2 if is_recomputed(config) else 0),
        trains_all=trains_all,
        is_fsdp=isinstance(config.parallelism, FsdpConfig),
        peak_tflops=peak.tflops,
        bus_gb_per_s=speed,
    )


def _tokens_per_row(config: RunConfig, batch: BatchPlan) -> int:
    """A packed row is full; a padded one holds one document."""
    mean = mean_tokens(config)
    return batch.row_length if batch.is_packed or mean is None else round(min(mean, batch.row_length))


def _speed_at(bandwidth: Bandwidth, num_bytes: float) -> float | None:
    """The bus bandwidth of the slower operation at the measured size nearest to one layer.

    Collectives move one layer at a time.
    """
    speeds = []
    for operation in (ALL_GATHER, ALL_REDUCE):
        found = [one for one in bandwidth.measurements if one.operation == operation]
        if not found:
            return None
        nearest = min(found, key=lambda one: abs(math.log(one.bytes / num_bytes)))
        speeds.append(nearest.bus_gb_per_s)
    return min(speeds)


def _fits(config: RunConfig, strategy: Strategy) -> bool | None:
    """Whether a strategy without offloading is estimated to fit."""
    if config.parallelism.strategy is strategy:
        return plan_memory(config).fits
    group = config.parallelism.sequence_group_size
    other = PARALLELISM_SCHEMAS[strategy](strategy=strategy, sequence_group_size=group)
    return plan_memory(replace(config, parallelism=other)).fits


def _advice(config: RunConfig, batch: BatchPlan, costs: Costs) -> LinkAdvice:
    """Choose between the strategy that keeps full weights and the one that gathers them."""
    facts = strategy_facts(config)
    keeping, gathering = KEEPING_AND_GATHERING[Engine.fsdp if costs.is_fsdp else Engine.deepspeed]
    fits, does_gather = _fits(config, keeping), facts.gathers_each_layer
    kept, gathered = STRATEGIES[keeping].title, STRATEGIES[gathering].title
    fix = None
    if fits is False:
        advised, why = gathering, f"{kept} is estimated not to fit"
        if not does_gather:
            fix = f"parallelism={gathering.name}"
        elif not costs.hides:
            fix = _more_tokens(config, batch, costs)
            why += f", and {gathered} waits for its links here"
    else:
        known = "fits" if fits else "may fit"
        advised, why = keeping, f"{kept} {known} and moves less"
        if does_gather and costs.hides:
            why += f"; the bytes of {gathered} hide behind the computation here, if not its wait for each layer"
        elif does_gather:
            why += f", and {gathered} waits for its links here"
            fix = f"parallelism={keeping.name}"
        elif not facts.divides_gradients:  # full weights and gradients: links are used once a step
            why = f"{kept} {known}, and {config.parallelism.strategy.name} is estimated not to"
            fix = f"parallelism={keeping.name}"
    what = (
        f"for {config.recipe or 'this run'} {STRATEGIES[advised].title} is advised: {why}. {costs.text(kept, gathered)}"
    )
    data = asdict(costs) | {
        "advised": advised.name,
        "hides": costs.hides,
        "needed_gb_per_s": round(costs.needed_gb_per_s, 3),
        "needed_tokens_per_pass": costs.needed_tokens,
        "gathering_s": costs.gathering_s,
        "computing_s": costs.computing_s,
    }
    return LinkAdvice(text=what, fix=fix, data=data)


def _more_tokens(config: RunConfig, batch: BatchPlan, costs: Costs) -> str:
    """Overrides that make a pass compute as long as it gathers, within rules, batch and memory.

    They put more of the step's rows into a pass, enlarge the step, or train an adapter, with which the weights fit on
    each GPU.
    """
    rows = math.ceil(batch.micro_batch_size * costs.needed_tokens / costs.tokens_per_pass)
    options = [_rows_of_the_step(config, batch, rows) or _larger_step(config, batch, rows)]
    adapter = replace(
        config,
        peft=replace(config.peft, method=PeftMethod.lora),
        parallelism=ZeroConfig(strategy=KEEPING_AND_GATHERING[Engine.deepspeed][0]),
    )
    if costs.trains_all and _can_run(adapter):
        options.append("peft=lora parallelism=zero2")
    named = [option for option in options if option is not None]
    needed = f"GPUs whose links reach {costs.needed_gb_per_s:.0f} GB/s"
    return "; or ".join(named) or f"{needed}: no change of the run was estimated to fit and to be enough"


def _rows_of_the_step(config: RunConfig, batch: BatchPlan, rows: int) -> str | None:
    """A micro batch of at least `rows` rows that divides a GPU's unchanged rows per step evenly."""
    # If the number of packed rows is unknown, each row holds at least one document.
    in_step = batch.rows_per_step or batch.global_samples or 0
    most = in_step // batch.data_ranks
    size = next((size for size in range(rows, most + 1) if most % size == 0), None)
    if size is None or not _can_run(_with_training(config, micro_batch_size=size)):
        return None
    return f"training.micro_batch_size={size}"


def _larger_step(config: RunConfig, batch: BatchPlan, rows: int) -> str | None:
    """A larger global batch with `rows` rows for each GPU."""
    key, number = "global_tokens", rows * batch.data_ranks * batch.row_length
    if batch.global_samples is not None:
        documents_per_row = batch.global_samples / batch.rows_per_step if batch.rows_per_step else 1.0
        key, number = "global_samples", math.ceil(rows * documents_per_row) * batch.data_ranks
    if not _can_run(_with_training(config, **{key: number, "micro_batch_size": rows})):
        return None
    return f"a larger global batch: training.{key}={number} training.micro_batch_size={rows}"


def _with_training(config: RunConfig, **changes: Any) -> RunConfig:
    return replace(config, training=replace(config.training, **changes))


def _can_run(config: RunConfig) -> bool:
    """Whether no rule refuses it and the GPUs may hold it."""
    if any(problem.is_error for problem in check(config)):
        return False
    return plan_memory(config, solve_batch(config, None)).fits is not False


def slow_links(config: RunConfig, batch: BatchPlan, machine: Machine) -> list[Problem]:
    """Warn if a strategy that gathers weights in every layer waits for links measured on this machine."""
    num_gpus = config.hardware.gpus_per_node or 1
    if not strategy_facts(config).gathers_each_layer:
        return []
    if starts_elsewhere(config) or config.hardware.num_nodes > 1 or not 2 <= num_gpus <= len(machine.gpus):
        return []
    bandwidth = recall(machine, num_gpus)
    advice = advise(config, batch, bandwidth, machine.gpus[0].name) if bandwidth is not None else None
    if advice is None or advice.fix is None:
        return []
    return [Problem(id="slow-links", key="parallelism", message=advice.text, fix=advice.fix, is_error=False)]
