"""Estimate a run's speed before it starts, from what recorded runs reached. It is right to about a third.

    seconds per token = FLOPs per token / (share of the peak x factors x peak FLOP/s)

A pass takes at least what the host needs to launch its kernels, and each step updates the weights. Shares, factors and
these times come from the runs recorded on H100s and H200s (the benchmarks' results and the recipes' evidence). Other
generations are assumed to reach the same share of their own peak. Loading, validation, saving and evaluation are not
included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from tunebook.config.choices import Compute, Generation, ModelPart, PackingMode, PeftMethod, Switch
from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import RunConfig, world_size
from tunebook.data.batch import BatchPlan, longest_side
from tunebook.facts.attention import Isolation, attention_facts
from tunebook.facts.compiling import CHEAP_BUDGET
from tunebook.facts.methods import method_facts
from tunebook.facts.peaks import Peak, peak_of
from tunebook.facts.sharing import offloaded_states, uses_nvme
from tunebook.facts.strategies import strategy_facts
from tunebook.model.flops import attention_flops_per_token, flops_per_token
from tunebook.model.parameters import count_parameters, has_experts
from tunebook.plan.images import planned_images
from tunebook.plan.memory.activations import image_cost, is_recomputed

MEASURED_ON = Generation.hopper


@dataclass(frozen=True)
class Share:
    """The share of its peak that one GPU reached with compiled blocks and packed rows, nothing recomputed."""

    of_peak: float  # 0 to 1
    source: str


# By kind of model, method and number format.
SHARES = {
    ("dense", PeftMethod.full, "bf16"): Share(0.55, "Qwen2.5-3B, h200_selective.jsonl"),
    ("dense", PeftMethod.lora, "bf16"): Share(0.55, "Llama 3 8B, h200_one_pass_head.jsonl"),
    ("dense", PeftMethod.qlora, "bf16"): Share(0.54, "Llama 3.1 8B, h200_adapter_variants.jsonl"),
    ("dense", PeftMethod.full, "fp8"): Share(0.36, "Llama 3 8B, h200x4_beside_peers.jsonl"),
    ("dense", PeftMethod.lora, "fp8"): Share(0.39, "Llama 3.1 8B, h200_adapter_variants.jsonl"),
    ("dense", PeftMethod.full, "fp32"): Share(0.60, "Qwen2.5-3B, h200x4_speed.jsonl"),
    ("dense", PeftMethod.lora, "fp32"): Share(0.54, "Gemma 3 4B, h200x2_models.jsonl"),
    ("experts", PeftMethod.full, "bf16"): Share(0.40, "Qwen3-30B-A3B, h100_models.jsonl"),
    ("experts", PeftMethod.lora, "bf16"): Share(0.50, "gpt-oss-20b, h100_models.jsonl"),
}
# Attention reaches less than products do. Of rows with one document of 27,904 tokens and more, most of the time is
# attention (h100x2_sequence.jsonl and h200x2_sequence.jsonl).
ATTENTION_SHARE = 0.3
MASKED_ATTENTION_SHARE = 0.2  # of sdpa and eager, which compute every pair of tokens in a row
TOWER_SHARE = 0.2  # of towers for images: Gemma 3 4B's, h200_images.jsonl
# What a pass takes at least, forward and backward, since the host launches kernels one after the other: with compiled
# blocks, of a whole model and of each layer. Fitted to the recorded runs, as the factors of `_host_seconds` are.
PASS_SECONDS, LAYER_SECONDS = 0.015, 0.0025
UPDATE_SECONDS = 20e-12  # of each trained parameter in a step: gradients are summed, the optimizer reads and writes
# Of each parameter that a rank updates, if its states are in host memory or on NVMe. With 16 CPU cores for each GPU,
# full fine-tunes took 0.7 to 3 ns, and 14 ns with one disk (h200_offload, h200x2_host_memory, h200x2_recipes).
HOST_UPDATE_SECONDS, NVME_UPDATE_SECONDS = 1e-9, 15e-9
_WORTH_SAYING = 0.05
UNKNOWN_PADDING = 0.5  # of padded rows before the documents' lengths are known (h200_qwen05b_single.jsonl)


@dataclass(frozen=True, kw_only=True)
class TimePlan:
    """The speed and duration of a run. None if unknown; `assumption` says why, or what they rest on."""

    tokens_per_second_per_gpu: float | None = None  # real tokens, without padding
    tokens_per_second: float | None = None  # of all GPUs
    tokens: float | None = None  # of the whole run, without padding
    hours: float | None = None
    gpu_hours: float | None = None
    assumption: str

    def to_json(self) -> dict[str, Any]:
        """The `time` part of a plan, with two digits of what is estimated."""
        values = asdict(self)
        tokens = values.pop("tokens")
        estimates = {key: float(f"{value:.2g}") for key, value in values.items() if isinstance(value, float)}
        return {"tokens": None if tokens is None else round(tokens)} | values | estimates


def plan_time(config: RunConfig, batch: BatchPlan, *, gpu_name: str | None = None) -> TimePlan:
    """Estimate the speed of a resolved configuration. `gpu_name`: NVML's; None for the generation's usual GPU."""
    tokens, facts, precision = tokens_of_the_run(config, batch), config.model.facts, config.precision
    if facts is None:
        return TimePlan(tokens=tokens, assumption="not estimated: the model's size is not known before it is loaded")
    uses_tf32 = precision.compute is Compute.fp32 and precision.tf32 is Switch.enabled
    generation = config.hardware.generation
    peak = peak_of(generation, precision.compute, gpu_name=gpu_name, uses_tf32=uses_tf32)
    if peak is None:
        unknown = f"no peak is known for {gpu_name or generation.name} in {precision.compute.name}"
        return TimePlan(tokens=tokens, assumption=f"not estimated: {unknown}")
    kind = "experts" if has_experts(facts) else "dense"
    number_format = "tf32" if uses_tf32 else {Compute.fp16: "bf16"}.get(precision.compute, precision.compute.name)
    share = SHARES.get((kind, config.peft.method, number_format))
    if share is None:
        unknown = f"no {kind} model was measured with peft={config.peft.method.name} in {number_format}"
        return TimePlan(tokens=tokens, assumption=f"not estimated: {unknown}")
    if uses_nvme(config) and config.peft.method is not PeftMethod.full:
        return TimePlan(tokens=tokens, assumption="not estimated: adapters over a base on NVMe were never measured")
    factors = [*_factors(config, batch)]
    of_text = _seconds_per_token(config, batch, facts, share, peak) / math.prod(factor for factor, _ in factors)
    busy = _busy(config, batch, facts, of_text)
    if busy < 1 - _WORTH_SAYING:
        factors.append((busy, "too few tokens in a pass to keep a GPU busy"))
        of_text /= busy
    of_updates = _update_seconds_per_token(config, batch, facts)
    of_images = _image_seconds_per_token(config, batch, peak)
    speed = 1 / (of_text + of_updates + of_images)
    ranks = world_size(config)
    hours = None if tokens is None else tokens / (speed * ranks) / 3600
    reached = f"{share.of_peak:.0%} of {peak.tflops:g} TFLOP/s ({share.source})"
    texts = [reached, *(f"x {factor:.2g}: {text}" for factor, text in factors), *_unmeasured(config, batch, peak)]
    if of_updates * speed > _WORTH_SAYING:
        where = "" if not offloaded_states(config) else " on the host, known to a factor of two only,"
        texts.append(f"the updates of weights{where} take {of_updates * speed:.0%} of the time")
    if of_images:
        texts.append(f"images take {of_images * speed:.0%} of the time (h200_images.jsonl)")
    return TimePlan(
        tokens_per_second_per_gpu=speed,
        tokens_per_second=speed * ranks,
        tokens=tokens,
        hours=hours,
        gpu_hours=None if hours is None else hours * ranks,
        assumption=f"right to about a third: {'; '.join(texts)}",
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


def _seconds_per_token(config: RunConfig, batch: BatchPlan, facts: ModelFacts, share: Share, peak: Peak) -> float:
    """Seconds that one GPU computes a token, before the factors."""
    attended = batch.attended_length or longest_side(config)
    trained = None if config.peft.method is PeftMethod.full else count_parameters(config, facts).trained
    attention = attention_flops_per_token(facts, attended)
    products = flops_per_token(facts, attended, trained) - attention
    of_peak = min(share.of_peak, ATTENTION_SHARE)
    # In fp32 products take so long that a mask does not show.
    if attention_facts(config).isolation is Isolation.mask and config.precision.compute is not Compute.fp32:
        attention = 2 * attention_flops_per_token(facts, batch.row_length or longest_side(config))
        of_peak = MASKED_ATTENTION_SHARE
    return (products / share.of_peak + attention / of_peak) / (peak.tflops * 1e12)


def _update_seconds_per_token(config: RunConfig, batch: BatchPlan, facts: ModelFacts) -> float:
    """Seconds that a step takes beside its passes, for each token of one GPU.

    If the tokens of a step are not known: one full pass of each GPU where the host updates, else 0.
    """
    tokens = batch.tokens_per_step or batch.global_tokens
    trained, ranks = count_parameters(config, facts).trained, world_size(config)
    if offloaded_states(config):
        each = NVME_UPDATE_SECONDS if uses_nvme(config) else HOST_UPDATE_SECONDS
        return trained / ranks * each / (tokens / ranks if tokens else _tokens_per_pass(batch, 0))
    return trained * UPDATE_SECONDS * ranks / tokens if tokens else 0.0


def _image_seconds_per_token(config: RunConfig, batch: BatchPlan, peak: Peak) -> float:
    """Seconds that one GPU computes the images of a document in the tower, for each token of the document."""
    images = planned_images(config)
    if images is None:
        return 0.0
    documents = batch.documents_per_step
    tokens = batch.tokens_per_step / documents if batch.tokens_per_step and documents else longest_side(config)
    passes = 3 if ModelPart.vision in config.model.train else 1
    flops = passes * images.mean_number * image_cost(config, images).flops
    return flops / tokens / (TOWER_SHARE * peak.tflops * 1e12)


def _factors(config: RunConfig, batch: BatchPlan) -> Iterator[tuple[float, str]]:
    """What lowers the share, 0 to 1, each with its reason."""
    if padding := _padding(config, batch):
        yield 1 - padding, "the rest of each row is padding"
    # In fp32 products take so long that this does not show.
    if config.precision.compute is not Compute.fp32 and not config.model.compile_layers:
        yield 0.75, "blocks are not compiled (h200x2_architectures.jsonl)"
    if is_recomputed(config):
        yield 0.8, "layers are recomputed (h200_selective.jsonl)"
    if _recomputes_products(config):
        source = "h200_memory_budget.jsonl"
        yield 0.85, f"activation.memory_budget={config.activation.memory_budget:g} recomputes products ({source})"
    if method_facts(config).has_reference and config.peft.method is not PeftMethod.full:
        yield 0.67, "the base computes each pair, too: one of three passes"
    yield from _factors_of_strategy(config)


def _padding(config: RunConfig, batch: BatchPlan) -> float:
    """The share of rows that is padding, 0 to 1."""
    if batch.padding_share is not None:
        return batch.padding_share
    # Rows are padded to the longest of their pass; a single row is not.
    return UNKNOWN_PADDING if config.packing.mode is PackingMode.padded and batch.micro_batch_size > 1 else 0.0


def _busy(config: RunConfig, batch: BatchPlan, facts: ModelFacts, seconds_per_token: float) -> float:
    """The share of a pass, 0 to 1, in which a GPU computes; in the rest it waits for the host.

    While long kernels are computed the host gets ahead, so the two times are not added: the cube root of their cubes'
    sum fits recorded runs best.
    """
    computed = seconds_per_token * _tokens_per_pass(batch, _padding(config, batch))
    return computed / math.cbrt(computed**3 + _host_seconds(config, facts) ** 3)


def _host_seconds(config: RunConfig, facts: ModelFacts) -> float:
    """Seconds that the host needs for a pass."""
    strategy = strategy_facts(config)
    seconds = PASS_SECONDS + LAYER_SECONDS * facts.num_layers
    seconds *= 1 if config.model.compile_layers else 2.5
    seconds *= 1 if config.peft.method is PeftMethod.full else 2
    return seconds * (4 if strategy.is_zero3 else 1.3 if strategy.is_zero or strategy.is_fsdp else 1)


def _recomputes_products(config: RunConfig) -> bool:
    """Whether so little is kept that products are computed twice. Copying the rest to the host then takes no time."""
    budget = config.activation.memory_budget
    return budget is not None and budget < CHEAP_BUDGET


def _factors_of_strategy(config: RunConfig) -> Iterator[tuple[float, str]]:
    """What several GPUs lose to each other, and what is lost to the host."""
    strategy, name = strategy_facts(config), config.parallelism.strategy.name
    if world_size(config) > 1:
        lost = 0.5 if strategy.is_zero3 else 0.8 if strategy.is_zero else 0.9 if strategy.is_fsdp else 0.95
        yield lost, f"{name} (h200x4_speed.jsonl)"
    if offloaded_states(config):
        if config.peft.method is not PeftMethod.full:
            yield 0.5, "the base in host memory (h200x2_book_held_out.jsonl)"
    elif config.activation.offload and not is_recomputed(config) and not _recomputes_products(config):
        yield 0.2, "activations in host memory, measured before they were copied block by block"


def _unmeasured(config: RunConfig, batch: BatchPlan, peak: Peak) -> Iterator[str]:
    """What is assumed without a measurement."""
    generation = config.hardware.generation
    if generation is not MEASURED_ON:
        yield f"never measured on {generation.name} GPUs; the peak is that of the {peak.gpu}"
    if config.hardware.num_nodes > 1:
        yield "at most this speed: links between nodes are not counted, and several nodes were never measured"
    if batch.tokens_per_step is None and batch.is_packed:
        yield "assuming full rows"


def _tokens_per_pass(batch: BatchPlan, padding: float) -> float:
    """Tokens that one GPU computes in a pass, with padding. Rows count as full if document lengths are unknown."""
    rows = batch.micro_batch_size / batch.sequence_group_size
    if not batch.tokens_per_step or not batch.rows_per_step:
        return rows * batch.row_length
    return batch.tokens_per_step / batch.rows_per_step * rows / (1 - padding)
