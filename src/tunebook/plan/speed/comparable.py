"""Find the measured speed nearest to a run, or the reason why none is comparable."""

from __future__ import annotations

import math
from dataclasses import replace

from tunebook.config.choices import (
    Compute,
    Generation,
    PackingMode,
    PeftMethod,
    Strategy,
    Switch,
)
from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import RunConfig, world_size
from tunebook.facts.attention import ATTENTIONS, BY_DOCUMENT, MASKED, attention_facts
from tunebook.facts.optimizers import OPTIMIZERS
from tunebook.facts.sharing import offloaded_states
from tunebook.facts.strategies import STRATEGIES, strategy_facts
from tunebook.model.parameters import adapts_parameters, has_dora
from tunebook.plan.memory.work import is_recomputed
from tunebook.plan.speed.measured_speed import (
    ADAPTER_SPEEDS,
    ONE_GPU_SPEEDS,
    SHORT_PASSES,
    STRATEGY_SPEEDS,
    AdapterSpeed,
    OneGpuSpeed,
    ShortPass,
    StrategySpeed,
)

SEVERAL_NODES = "no speed was measured on several nodes, where the network decides it"


def why_not_estimated(config: RunConfig) -> str | None:
    """Why no measurement is comparable with a resolved configuration; None if one is."""
    hardware, kernel, compute = config.hardware, config.attention.implementation, config.precision.compute
    facts, is_padded = attention_facts(config), config.packing.mode is PackingMode.padded
    reasons = (
        (hardware.generation is Generation.cpu, "CPUs differ too much to have a common peak"),
        (_needs_host(config), "no measured speed applies to another host's memory, cores and disks"),
        (has_dora(config), "no speed was measured with DoRA"),
        (adapts_parameters(config), "no speed was measured with peft.target_parameters"),
        (config.peft.method is PeftMethod.qlora, "no speed was measured with a quantized base (peft=qlora)"),
        (
            compute is Compute.fp8 and (is_padded or not facts.is_flash or not config.model.compile_layers),
            "in fp8 only compiled blocks in packed rows were measured (model.compile_layers=true, "
            "attention=varlen_attention)",
        ),
        (
            compute is Compute.fp32 and config.precision.tf32 is Switch.enabled,
            "fp32 was measured without TF32 only; precision.tf32=disabled has an estimate",
        ),
        (
            kernel is BY_DOCUMENT and compute is not Compute.fp32,
            f"no speed was measured with attention={kernel.name} in {compute.name}",
        ),
        (facts.has_mask and kernel is not MASKED, f"no speed was measured with attention={kernel.name}"),
        (is_padded and facts.is_flash, f"padded rows were measured with sdpa, not with {kernel.name}"),
        (
            world_size(config) > 1 and not _strategy_speeds(config),
            f"no speed was measured with parallelism={config.parallelism.strategy.name}",
        ),
        (hardware.num_nodes > 1, SEVERAL_NODES),
    )
    return next((reason for applies, reason in reasons if applies), None)


def as_on_one_node(config: RunConfig) -> RunConfig:
    """The same run with all GPUs in one node, which is never slower and so bounds a run on several nodes.

    HSDP divides among the GPUs of a node and replicates over the nodes, so on one node it is FSDP.
    """
    parallelism = config.parallelism
    if (on_one_node := strategy_facts(config).on_one_node) is not None:
        parallelism = replace(parallelism, strategy=on_one_node)
    hardware = replace(config.hardware, num_nodes=1, gpus_per_node=world_size(config))
    return replace(config, hardware=hardware, parallelism=parallelism)


def _needs_host(config: RunConfig) -> bool:
    """Whether the host decides the speed. `throughput` judges the copies of recomputed layers' inputs."""
    copies_every_tensor = config.activation.offload and not is_recomputed(config)
    return bool(offloaded_states(config)) or copies_every_tensor or OPTIMIZERS[config.optimizer.name].is_paged


def nearest_one_gpu_speed(config: RunConfig, facts: ModelFacts, flops_per_pass: float) -> OneGpuSpeed:
    """The one-GPU measurement nearest in work and width, with the same attention, rows and number format.

    A pass with little work leaves a GPU waiting for kernel launches, and narrow layers make small products. Width
    counts twice: a long row makes up for little work per layer, but not for narrow products.
    """
    compute = Compute.bf16 if config.precision.compute is Compute.fp16 else config.precision.compute
    kernel, is_packed = config.attention.implementation, config.packing.mode is PackingMode.isolated
    rows = [row for row in ONE_GPU_SPEEDS if row.compute is compute and row.is_packed == is_packed]
    if compute is not Compute.fp32:  # fp32 has no such kernels
        rows = [row for row in rows if ATTENTIONS[row.attention].is_flash == ATTENTIONS[kernel].is_flash]
        is_compiled = bool(config.model.compile_layers)
        rows = [row for row in rows if row.is_compiled is is_compiled] or rows

    def distance(row: OneGpuSpeed) -> tuple[float | bool, ...]:
        work = _distance(row.flops_per_pass, flops_per_pass)
        width = _distance(row.model.hidden_size, facts.hidden_size)
        is_like_it = (
            row.is_compiled is config.model.compile_layers,
            row.attention is kernel,
            row.is_one_pass is bool(config.model.one_pass_head),
        )
        return work + 2 * width, *(not one for one in is_like_it)

    return min(rows, key=distance)


def short_passes(config: RunConfig) -> list[ShortPass]:
    """The measured passes that only waited for kernel launches and whose layers launch about as many.

    In fp32 an adapter adds few: no number is cast for its products.
    """
    has_adapter = config.peft.method is not PeftMethod.full and config.precision.compute is not Compute.fp32
    rows = [row for row in SHORT_PASSES if row.has_mask == attention_facts(config).has_mask]
    for key, wanted in (("has_adapter", has_adapter), ("is_compiled", bool(config.model.compile_layers))):
        rows = [row for row in rows if getattr(row, key) is wanted] or rows
    return rows


def nearest_strategy_speed(config: RunConfig, facts: ModelFacts) -> StrategySpeed | None:
    """The measured loss of the strategy, for the nearest model size and number of GPUs; None on one GPU."""
    if world_size(config) == 1:
        return None
    is_packed, num_gpus = config.packing.mode is PackingMode.isolated, world_size(config)

    def distance(row: StrategySpeed) -> tuple[bool, float, float]:
        of_size = _distance(row.model.num_parameters, facts.num_parameters)
        return row.is_packed != is_packed, of_size, _distance(row.num_gpus, num_gpus)

    return min(_strategy_speeds(config), key=distance)


def nearest_adapter_speed(config: RunConfig, facts: ModelFacts) -> AdapterSpeed | None:
    """The adapter measurement with the nearest layer width, preferably compiled as in this run.

    None in a full fine-tune.
    """
    if config.peft.method is PeftMethod.full:
        return None

    def distance(row: AdapterSpeed) -> tuple[bool, float, bool]:
        width = _distance(row.model.hidden_size, facts.hidden_size)
        is_other = row.strategy is not config.parallelism.strategy
        return row.is_compiled is not bool(config.model.compile_layers), width, is_other

    return min(ADAPTER_SPEEDS, key=distance)


def measured_strategy(strategy: Strategy) -> Strategy:
    """The strategy whose measurements apply: ZeRO-1 was not measured and sends what ZeRO-2 sends."""
    return STRATEGIES[strategy].moves_as or strategy


def _strategy_speeds(config: RunConfig) -> list[StrategySpeed]:
    return [row for row in STRATEGY_SPEEDS if row.strategy is measured_strategy(config.parallelism.strategy)]


def _distance(one: float, other: float) -> float:
    """Distance of two sizes as a logarithmic ratio, rounded so that practically equal sizes are equal."""
    return round(abs(math.log(one / other)), 2)
