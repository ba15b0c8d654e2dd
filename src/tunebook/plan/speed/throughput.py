"""Estimate a run's speed without a GPU: work per token, divided by the GPU's peak times a measured share of it.

    seconds of a pass = work / (peak x share of it that one GPU reached) + what the strategy lost in a pass

The first term is at least the time of a GPU that only waits for kernel launches. The attention of long documents has a
share of its own. The end of a step is added where few passes hide it. Work is everything computed, including padding
and recomputed layers. Shares and losses come from the nearest measurement in `measured_speed`; the result states the
assumptions. Without a comparable measurement, the result is the reason instead of an estimate. Several nodes get a
bound: the speed of one node with all their GPUs. Loading, validation, saving and evaluation are not included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import geometric_mean
from typing import Any

from tunebook.config.choices import Checkpointing, Compute, Generation, PackingMode, PeftMethod, Switch
from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import RunConfig, world_size
from tunebook.data.batch import BatchPlan
from tunebook.data.mean_length import longest_document
from tunebook.facts.peaks import Peak, peak_of
from tunebook.model.flops import (
    attention_flops_per_token,
    flops_per_token,
    recomputed_flops_per_token,
    tiled_flops_per_token,
)
from tunebook.model.parameters import attention_width, count_parameters, has_experts, of_layers
from tunebook.plan.memory.kept import inputs_of_layers
from tunebook.plan.memory.states import bytes_per_compute_value, bytes_per_expert_value
from tunebook.plan.memory.work import is_recomputed
from tunebook.plan.speed.comparable import (
    SEVERAL_NODES,
    as_on_one_node,
    nearest_adapter_speed,
    nearest_one_gpu_speed,
    nearest_strategy_speed,
    short_passes,
    why_not_estimated,
)
from tunebook.plan.speed.measured_speed import (
    COMPILED_EXPERTS_16_BIT_SHARE,
    DETERMINISTIC_SHARE,
    EXPERTS_16_BIT_SHARE,
    EXPERTS_SHARE,
    HIDDEN_COPIES_GB_PER_S,
    LONG_ATTENTION_SHARE,
    LONG_ATTENTIONS,
    MEASURED_ON,
    RECOMPUTED_GAIN,
    SELECTIVE,
    SELECTIVE_LORA,
    STEP_END_SECONDS,
    USUAL_PADDING_SHARE,
    OneGpuSpeed,
    StrategySpeed,
)

_DIGITS = {
    "tokens_per_second_per_gpu": 1, "tokens_per_second": 1, "most_tokens_per_second": 1, "tokens": 0, "efficiency": 4,
}  # others: 3  # fmt: skip

_WORTH_PRINTING_S = 0.001
_FORWARD_PASSES = 4  # that a pass of recomputed layers takes: forward, forward again, and twice as much backward


@dataclass(frozen=True, kw_only=True)
class TimePlan:
    """The speed and duration of a run. None if unknown; `assumption` says why, or on what they rest."""

    tokens_per_second_per_gpu: float | None = None  # real tokens, without padding
    tokens_per_second: float | None = None  # of all GPUs
    tokens: float | None = None  # of the whole run, without padding
    hours: float | None = None
    gpu_hours: float | None = None
    efficiency: float | None = None  # share of the peak, 0 to 1, counting all computation
    peak_tflops: float | None = None  # of one GPU, dense
    # Bounds if there is no estimate: the cost of the links between nodes is unknown and not included. They have their
    # own keys, so that nothing mistakes them for a prediction.
    least_hours: float | None = None
    most_tokens_per_second: float | None = None  # of all GPUs
    assumption: str

    def to_json(self) -> dict[str, Any]:
        """The `time` part of a plan."""
        return {
            key: round(value, _DIGITS.get(key, 3)) if isinstance(value, float) else value
            for key, value in asdict(self).items()
        }


def plan_time(config: RunConfig, batch: BatchPlan, *, gpu_name: str | None = None) -> TimePlan:
    """Estimate the speed of a resolved configuration. `gpu_name`: NVML's; None for the generation's usual GPU."""
    if config.hardware.num_nodes > 1:
        one_node = plan_time(as_on_one_node(config), batch, gpu_name=gpu_name)
        return _bounded(config, one_node)
    tokens, facts, generation = tokens_of_the_run(config, batch), config.model.facts, config.hardware.generation
    uses_tf32 = config.precision.tf32 is Switch.enabled
    peak = peak_of(generation, config.precision.compute, gpu_name=gpu_name, uses_tf32=uses_tf32)
    reason = why_not_estimated(config)
    if reason is None and peak is None:
        reason = f"the peak of {gpu_name or generation.name} in {config.precision.compute.name} is not known"
    if reason is None and facts is None:
        reason = "the model's size is not known before it is loaded"
    if reason is not None or facts is None or peak is None:
        return _not_estimated(reason, tokens, peak)
    return _estimate(config, batch, facts, peak, tokens)


def _not_estimated(reason: str | None, tokens: float | None, peak: Peak | None) -> TimePlan:
    known = peak.tflops if peak is not None else None
    return TimePlan(tokens=tokens, peak_tflops=known, assumption=f"not estimated: {reason}")


def _bounded(config: RunConfig, one_node: TimePlan) -> TimePlan:
    """The best case of a run on several nodes; without a one-node estimate, the reason for that."""
    speed, hours, ranks = one_node.tokens_per_second, one_node.hours, world_size(config)
    if speed is None:
        return one_node
    at_least = "" if hours is None else f"at least {hours:.3g} hours, "
    return TimePlan(
        tokens=one_node.tokens,
        peak_tflops=one_node.peak_tflops,
        least_hours=hours,
        most_tokens_per_second=speed,
        assumption=f"not estimated: {SEVERAL_NODES}; {at_least}at most {speed:,.0f} tokens/s in all, as if the "
        f"{ranks} GPUs were in one node: what the links between nodes cost is not counted; {one_node.assumption}",
    )


def tokens_of_the_run(config: RunConfig, batch: BatchPlan) -> float | None:
    """Real tokens of all steps; None if unknown.

    They come from the prepared data, else from the data set's facts, else from full rows.
    """
    if batch.total_steps is None:
        return None
    if batch.tokens_per_step is None:
        is_full = batch.is_packed and batch.global_tokens is not None
        return float(batch.total_steps * (batch.global_tokens or 0)) if is_full else None
    tokens = batch.total_steps * batch.tokens_per_step
    if config.training.max_steps is None and batch.num_documents and batch.documents_per_step:
        # An epoch's last step may be smaller.
        epoch = batch.num_documents * batch.tokens_per_step / batch.documents_per_step
        tokens = min(tokens, epoch * config.training.num_epochs)
    return tokens


@dataclass(frozen=True)
class _Factor:
    """A difference to the measured row: its gain in the share of the peak, and a text if it is an assumption."""

    gain: float
    text: str = ""


@dataclass(frozen=True)
class _Computing:
    """What one GPU computes in a pass."""

    row: OneGpuSpeed  # the measurement that the share of the peak comes from
    factors: list[_Factor]
    long: float  # share of the work that is attention of long documents, 0 to 1
    tokens: float  # without padding
    at_peak: float  # seconds
    seconds: float


def _computing(config: RunConfig, batch: BatchPlan, facts: ModelFacts, peak: Peak, trained: int | None) -> _Computing:
    """Estimate the time that a pass computes. `trained`: parameters of the adapters; None if all are trained."""
    attended = batch.attended_length or longest_document(config)
    useful = flops_per_token(facts, attended, trained)
    padding = _padding_share(config, batch)
    tokens = _real_tokens_per_pass(batch, padding)
    row = nearest_one_gpu_speed(config, facts, useful * tokens / (1 - padding))
    if row.padding_share is None:
        padding = 0.0  # the share of peak includes the padding of that measurement
    again = recomputed_flops_per_token(facts, attended) if is_recomputed(config) else 0.0
    tiled = tiled_flops_per_token(facts, _num_tiles(config, batch)) if is_recomputed(config) else 0.0
    flops = useful + again + tiled
    factors = _factors(config, facts, row, useful / (useful + again), (useful + again) / flops)
    at_peak = tokens / (1 - padding) * flops / (peak.tflops * 1e12)
    long = _long_attention_flops(config, facts, attended, row) / flops  # at a rate of its own
    others = 1 - long + _expert_overhead_flops(config, facts, trained) / flops
    share = row.efficiency * math.prod(factor.gain for factor in factors)
    seconds = at_peak * (others / share + long / LONG_ATTENTION_SHARE)
    return _Computing(row, factors, long, tokens, at_peak, seconds)


def _estimate(
    config: RunConfig,
    batch: BatchPlan,
    facts: ModelFacts,
    peak: Peak,
    tokens: float | None,
) -> TimePlan:
    trained = None if config.peft.method is PeftMethod.full else count_parameters(config, facts).trained
    one = _computing(config, batch, facts, peak, trained)
    waiting = _launch_bound_seconds(config, facts)
    copied = inputs_of_layers(config, facts) / 1e9 if config.activation.offload else 0.0
    if copied > HIDDEN_COPIES_GB_PER_S * one.seconds / _FORWARD_PASSES:
        return _not_estimated(_copies_text(copied, is_hidden=False), tokens, peak)
    strategy_speed = nearest_strategy_speed(config, facts)
    ending = _step_end_seconds(strategy_speed, batch, facts.num_parameters if trained is None else trained)
    lost = _lost_seconds(strategy_speed, facts) + ending
    exchanged = exchanged_bytes(config, facts, one.tokens)
    speed = one.tokens / (max(one.seconds, waiting) + lost)
    ranks = world_size(config)
    hours = None if tokens is None else tokens / (speed * ranks) / 3600
    is_waiting = waiting > one.seconds
    texts = [
        _waiting_text(config) if is_waiting else f"the share of its peak that {one.row.text} reached",
        *_texts_of_peak(config, peak, one.row),
        *_texts_of_rows(config, batch, one.row),
        *(factor.text for factor in one.factors if not is_waiting),
        "" if is_waiting else _long_attention_text(one.long),
        _strategy_text(config, strategy_speed, ending),
        _exchange_text(config, exchanged),
        _copies_text(copied, is_hidden=True) if copied else "",
    ]
    return TimePlan(
        tokens_per_second_per_gpu=speed,
        tokens_per_second=speed * ranks,
        tokens=tokens,
        hours=hours,
        gpu_hours=None if hours is None else hours * ranks,
        efficiency=one.at_peak * speed / one.tokens,
        peak_tflops=peak.tflops,
        assumption=f"assumed: {'; '.join(text for text in texts if text)}",
    )


def _factors(
    config: RunConfig, facts: ModelFacts, row: OneGpuSpeed, left_by_recomputing: float, left_by_tiles: float
) -> list[_Factor]:
    """Everything that changes the share of the peak. `left_by_...`: of the operations, 0 to 1."""
    found = []
    # In fp32 all measured variants reached two thirds of the peak: products take so long that nothing else shows.
    is_fp32 = row.compute is Compute.fp32
    if not is_fp32 and (adapter := nearest_adapter_speed(config, facts)) is not None:
        text = f"LoRA computes at {adapter.gain:.0%} of a full fine-tune's share ({adapter.text})"
        found.append(_Factor(adapter.gain, text))
    if has_experts(facts):
        share, measured = _experts_share(config, facts)
        found.append(_Factor(1.0, f"layers with experts reach {share:.0%} of that share ({measured})"))
    if not is_fp32 and is_recomputed(config) is not row.is_recomputed:
        left = f"activation checkpointing leaves {RECOMPUTED_GAIN * left_by_recomputing:.0%} of the speed"
        found.append(_Factor(RECOMPUTED_GAIN, left) if is_recomputed(config) else _Factor(1 / RECOMPUTED_GAIN))
    if config.activation.mlp_tile_tokens is not None:
        found.append(_Factor(1.0, f"MLPs in tiles, which are computed once more, leave {left_by_tiles:.0%} of that"))
    if row.is_selective:
        found.append(_Factor(1 / SELECTIVE.gain))
    if config.activation.checkpointing is Checkpointing.selective:
        gain = (SELECTIVE if config.peft.method is PeftMethod.full else SELECTIVE_LORA).gain
        leaves = f"activation=selective leaves {gain:.1%} of the speed"
        found.append(_Factor(gain, "" if row.is_selective else leaves))
    if config.training.deterministic:
        left = f"training.deterministic leaves {DETERMINISTIC_SHARE:.0%} of the speed"
        found.append(_Factor(DETERMINISTIC_SHARE, left))
    return found


def exchanged_bytes(config: RunConfig, facts: ModelFacts, tokens: float) -> float:
    """Bytes that one GPU of a sequence group sends to the others in a pass over its `tokens`; 0 without a group.

    Queries, keys, values and the result of the attention, in the forward and the backward pass, and in the forward pass
    once more if it is recomputed.
    """
    group = config.parallelism.sequence_group_size
    width = 2 * attention_width(facts) * (1 + facts.num_key_value_heads / facts.num_attention_heads)
    return (
        tokens
        * facts.num_layers
        * width
        * bytes_per_compute_value(config)
        * (3 if is_recomputed(config) else 2)
        * (group - 1)
        / group
    )


def _exchange_text(config: RunConfig, num_bytes: float) -> str:
    """The assumption for a sequence group."""
    if config.parallelism.sequence_group_size == 1:
        return ""
    return f"the {num_bytes / 1e9:.3g} GB that each GPU sends in the attention of a pass are not counted"


def _copies_text(gigabytes: float, *, is_hidden: bool) -> str:
    """The assumption for recomputed layers whose inputs go to the host, or why it does not hold."""
    what = f"the {gigabytes:.3g} GB that each GPU copies to the host in a forward pass"
    if is_hidden:
        return f"{what} hide behind its computing"
    most = f"more than {HIDDEN_COPIES_GB_PER_S:g} GB/s, the most that was measured"
    return f"to hide behind its computing, {what} would need {most}"


def _launch_bound_seconds(config: RunConfig, facts: ModelFacts) -> float:
    """Time of a pass that only waits for kernel launches: the geometric mean of those measured, by layers.

    A recomputed forward pass adds a third.
    """
    passes = 1 + 1 / 3 if is_recomputed(config) else 1.0
    return geometric_mean(row.seconds_of_a_layer for row in short_passes(config)) * facts.num_layers * passes


def _waiting_text(config: RunConfig) -> str:
    """The first assumption of a pass with little work."""
    rows = short_passes(config)
    each = [1000 * row.seconds_of_a_layer for row in rows]
    kind = ("with LoRA and " if rows[0].has_adapter else "") + ("compiled" if rows[0].is_compiled else "not compiled")
    between = f" ({min(each):.1f} to {max(each):.1f} measured)" if len(each) > 1 else ""
    return (
        "a pass with little work takes as long as the host needs to launch its kernels: "
        f"{geometric_mean(each):.1f} ms per layer, {kind}{between}; hosts differ"
    )


def _experts_share(config: RunConfig, facts: ModelFacts) -> tuple[float, str]:
    """Share of peak of layers with experts, relative to other layers, and what it was measured with."""
    if bytes_per_expert_value(config, facts) > 2:
        return EXPERTS_SHARE, f"2 of Qwen3-30B-A3B with experts in fp32 on one {MEASURED_ON}"
    is_compiled = bool(config.model.compile_layers)
    kind = "compiled" if is_compiled else "not compiled"
    share = COMPILED_EXPERTS_16_BIT_SHARE if is_compiled else EXPERTS_16_BIT_SHARE
    return share, f"8 of Qwen3-30B-A3B with experts in 16 bits, {kind}, on one H100"


def _expert_overhead_flops(config: RunConfig, facts: ModelFacts, trained: int | None) -> float:
    """Additional operations per token that represent the lower speed of layers with experts."""
    if not has_experts(facts):
        return 0.0
    assert facts.measured is not None
    per_parameter = 6 if trained is None else 4
    in_layers = of_layers(facts, facts.measured.active_parameters or 0)
    share, _ = _experts_share(config, facts)
    return per_parameter * in_layers * (1 / share - 1)


def _long_attention_flops(config: RunConfig, facts: ModelFacts, attended: float, row: OneGpuSpeed) -> float:
    """Operations per token of the attention beyond that in the measured row, whose documents were short."""
    if config.attention.implementation not in LONG_ATTENTIONS:
        return 0.0
    beyond = attention_flops_per_token(facts, attended) - attention_flops_per_token(facts, row.attended_length)
    return max(0.0, beyond) * (1 + 1 / 3 if is_recomputed(config) else 1)


def _long_attention_text(share_of_work: float) -> str:
    """The assumption for long documents, if they are a part of the work."""
    if share_of_work < 0.05:
        return ""
    what = f"the attention of long documents, {share_of_work:.0%} of the work"
    return f"{what}, reaches {LONG_ATTENTION_SHARE:.0%} of the peak"


def _padding_share(config: RunConfig, batch: BatchPlan) -> float:
    """Share of padding in the work, 0 to 1. Rows are padded to the longest of their pass; a single row is not."""
    if batch.padding_share is not None:
        return batch.padding_share
    is_padded = config.packing.mode is PackingMode.padded and batch.micro_batch_size > 1
    return USUAL_PADDING_SHARE if is_padded else 0.0


def _real_tokens_per_pass(batch: BatchPlan, padding: float) -> float:
    """Real tokens of a pass on one GPU. Rows count as full if document lengths are unknown."""
    rows = batch.micro_batch_size / batch.sequence_group_size
    if not batch.tokens_per_step or not batch.rows_per_step:
        return rows * batch.row_length * (1 - padding)
    return batch.tokens_per_step / batch.rows_per_step * rows


def _num_tiles(config: RunConfig, batch: BatchPlan) -> int:
    """Tiles in which an MLP computes a pass of one GPU."""
    tile = config.activation.mlp_tile_tokens
    tokens = batch.micro_batch_size * batch.row_length / batch.sequence_group_size
    return 1 if tile is None else math.ceil(tokens / tile)


def _lost_seconds(strategy_speed: StrategySpeed | None, facts: ModelFacts) -> float:
    """Additional seconds per pass compared with one GPU: the measured time, scaled to the model's size.

    Bytes grow with the parameters and calls with the layers. Between the two measured models the loss grew by less than
    the parameters and by about the layers. The geometric mean of both is neutral.
    """
    if strategy_speed is None:
        return 0.0
    measured = strategy_speed.model
    growth = facts.num_parameters / measured.num_parameters * facts.num_layers / measured.num_layers
    return strategy_speed.lost_seconds * math.sqrt(growth)


def _step_end_seconds(strategy_speed: StrategySpeed | None, batch: BatchPlan, trained: int) -> float:
    """Additional seconds per pass if a step has fewer passes than the measured one, which hide less of its end."""
    if strategy_speed is None or not batch.accumulation:
        return 0.0
    return STEP_END_SECONDS * trained * max(0.0, 1 / batch.accumulation - 1 / strategy_speed.passes_per_step)


def _strategy_text(config: RunConfig, strategy_speed: StrategySpeed | None, ending: float) -> str:
    if strategy_speed is None:
        return ""
    name, measured = config.parallelism.strategy.name, strategy_speed.strategy
    taken = f", taken as {measured.name}," if measured is not config.parallelism.strategy else ""
    few = f", and {1000 * ending:,.0f} ms to end a step of few passes" if ending >= _WORTH_PRINTING_S else ""
    return f"{name}{taken} loses the same time per pass as on {MEASURED_ON}s ({strategy_speed.text}){few}"


def _texts_of_peak(config: RunConfig, peak: Peak, row: OneGpuSpeed) -> Iterator[str]:
    """How the GPU and its products differ from those measured."""
    generation, compute = config.hardware.generation, config.precision.compute
    if generation is not Generation.hopper:
        yield f"never measured on {generation.name}, whose peak is taken from the {peak.gpu}"
    elif not peak.is_of_this_model:
        yield f"its peak is that of the {peak.gpu}"
    if compute not in (row.compute, Compute.fp32):
        yield f"{compute.name} is as {row.compute.name}"
    if config.model.compile_layers and not row.is_compiled:
        yield "compiled blocks are no faster than in that measurement"


def _texts_of_rows(config: RunConfig, batch: BatchPlan, row: OneGpuSpeed) -> Iterator[str]:
    """How the rows differ from those measured, and what is not known about them."""
    if row.is_packed != batch.is_packed:
        yield "padded rows reach the same share as packed ones"
    if batch.padding_share is None and not batch.is_packed and batch.micro_batch_size > 1:
        is_known = row.padding_share is not None
        usual = f"{USUAL_PADDING_SHARE:.0%} of a pass is padding"
        yield usual if is_known else "the share of padding is that of the measurement"
    if batch.tokens_per_step is None and batch.is_packed:
        yield "rows are full"
