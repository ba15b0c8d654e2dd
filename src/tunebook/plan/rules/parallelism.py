"""Rules about spreading the model over ranks and nodes, and about each strategy's settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tunebook.config.choices import (
    Generation,
    MasterWeights,
    Offload,
    PackingMode,
    PeftMethod,
    WrapPolicy,
)
from tunebook.config.identity import default_of
from tunebook.config.override_text import as_typed
from tunebook.config.schema import FsdpConfig, RunConfig, ZeroConfig, world_size
from tunebook.facts.architectures import (
    SINK_ARCHITECTURES,
    VARLEN_ARCHITECTURES,
    has_attention,
    without_flash_attn,
)
from tunebook.facts.attention import ATTENTIONS, BY_DOCUMENT
from tunebook.facts.sharing import uses_nvme
from tunebook.facts.strategies import UNDECIDED, strategy_facts
from tunebook.plan.rules.frame import Finding, another_model, rule
from tunebook.plan.rules.quantized import quantizer_of

_TO_NVME = "parallelism=zero3_nvme parallelism.nvme_path=FOLDER"
_ZERO3_ONLY = (
    "max_live_parameters", "max_reuse_distance", "prefetch_bucket_size", "param_persistence_threshold",
    "sub_group_size", "gather_weights_on_save",
)  # fmt: skip


@rule("strategy-settings-mismatch", "parallelism.strategy")
def strategy_settings_mismatch(config: RunConfig) -> Finding | None:
    """Refuse a group whose schema is not the strategy's.

    zero1 to zero3 read DeepSpeed's settings; fsdp, fsdp_grad_op and hsdp read torch's. Changing only
    parallelism.strategy leaves the other library's in place: choose the group, such as parallelism=fsdp.
    """
    settings, strategy, facts = config.parallelism, config.parallelism.strategy, strategy_facts(config)
    needed = ZeroConfig if facts.is_zero else FsdpConfig if facts.is_fsdp else None
    has_settings = isinstance(settings, ZeroConfig | FsdpConfig)
    if strategy is UNDECIDED:  # auto over an earlier named strategy keeps its settings
        return Finding("auto replaces a named strategy, whose settings would be lost", "parallelism=auto")
    if (needed is None and not has_settings) or (needed is not None and isinstance(settings, needed)):
        return None
    owner = {ZeroConfig: "ZeRO", FsdpConfig: "FSDP"}.get(type(settings), "no")
    return Finding(f"{strategy.name} is set in a group with {owner} settings", f"parallelism={strategy.name}")


@rule("single-needs-one-gpu", "parallelism.strategy")
def single_needs_one_gpu(config: RunConfig) -> Finding | None:
    """Refuse `single` with more than one rank: the others would be idle, or train unsynchronized copies."""
    world = world_size(config)
    if not strategy_facts(config).runs_on_one or world == 1:
        return None
    message = f"single runs on one GPU, and {world} are asked for"
    fix = "hardware.num_nodes=1 hardware.gpus_per_node=1 or parallelism=ddp"
    return Finding(message, fix)


@rule("fsdp-on-cpu", "parallelism.strategy")
def fsdp_on_cpu(config: RunConfig) -> Finding | None:
    """Refuse any FSDP strategy without GPUs: accelerate silently trains with DDP there instead."""
    strategy = config.parallelism.strategy
    if not strategy_facts(config).is_fsdp or config.hardware.generation is not Generation.cpu:
        return None
    message = f"{strategy.name} would silently become ddp on a CPU"
    other = "ddp" if world_size(config) > 1 else "single"
    return Finding(message, f"parallelism={other}")


@rule("hsdp-group", "parallelism.shard_group_size")
def hsdp_group(config: RunConfig) -> Finding | None:
    """Require a group size that is a proper divisor of the world size, above one.

    hsdp shards the model inside a group of GPUs and replicates it over the groups. By default a group is a node.
    """
    settings, world = config.parallelism, world_size(config)
    if not strategy_facts(config).within_groups or not isinstance(settings, FsdpConfig):
        return None
    group = settings.shard_group_size or config.hardware.gpus_per_node or 1
    if 1 < group < world and world % group == 0:
        return None
    message = f"groups of {group} do not split {world} GPUs into equal groups of several"
    return Finding(message, "parallelism.shard_group_size=null or parallelism=fsdp")


def _sequence_group(config: RunConfig) -> int:
    return config.parallelism.sequence_group_size


def _smaller_group(config: RunConfig, *sizes: int) -> str:
    """The override for the largest group below the present one that divides all sizes, and the GPUs of a node."""
    numbers = (*sizes, (config.hardware.gpus_per_node or 1))
    below = range(min(_sequence_group(config), *numbers), 0, -1)
    size = next(size for size in below if not any(number % size for number in numbers))
    return f"parallelism.sequence_group_size={size}"


@rule("sequence-group-size", "parallelism.sequence_group_size")
def sequence_group_size(config: RunConfig) -> Finding | None:
    """Require sequence groups that divide the GPUs of a node.

    Its GPUs exchange tokens in every layer. So a group stays on one node, whose links are fast, and every GPU is in
    one.
    """
    group, gpus = _sequence_group(config), config.hardware.gpus_per_node or 1
    if gpus % group == 0:
        return None
    message = f"groups of {group} do not divide the {gpus} GPU{'s' if gpus > 1 else ''} of a node"
    return Finding(message, _smaller_group(config))


@rule("sequence-group-heads", "parallelism.sequence_group_size")
def sequence_group_heads(config: RunConfig) -> Finding | None:
    """Require a group that divides the heads, of queries and of keys and values.

    In the attention, each GPU of a group computes whole rows of an equal share of the heads.
    """
    group, facts = _sequence_group(config), config.model.facts
    if facts is None or not (facts.num_attention_heads % group or facts.num_key_value_heads % group):
        return None
    heads, groups = facts.num_attention_heads, facts.num_key_value_heads
    of_keys = "" if groups == heads else f" and {groups} heads of keys and values"
    message = f"{group} GPUs cannot share {heads} heads{of_keys} evenly"
    return Finding(message, _smaller_group(config, heads, groups))


def _can_share_rows(config: RunConfig) -> bool:
    """Whether the architecture was compared with the kernels that exchange tokens for heads; true if unknown."""
    return config.model.facts is None or config.model.facts.architecture in VARLEN_ARCHITECTURES


@rule("sequence-group-architecture", "parallelism.sequence_group_size")
def sequence_group_architecture(config: RunConfig) -> Finding | None:
    """Refuse sequence groups for architectures that were not compared with these kernels.

    Each GPU has a part of a row only, so all but the attention must work on single tokens. Linear attention carries a
    state along the row; other models need what the kernels do not compute, such as sinks.
    """
    facts = config.model.facts
    if _sequence_group(config) == 1 or facts is None or _can_share_rows(config):
        return None
    message = f"{facts.architecture} is not known to attend only by the kernels that exchange the tokens of a row"
    if facts.architecture in SINK_ARCHITECTURES:
        message = (
            f"{facts.architecture} has an attention sink for each head, and GPUs that share heads would need theirs"
        )
    return Finding(message, "parallelism.sequence_group_size=1")


@rule("sequence-group-attention", "attention.implementation")
def sequence_group_attention(config: RunConfig) -> Finding | None:
    """Refuse sequence groups with another attention than Tunebook's own kernels for packed rows.

    They get the boundaries of the documents of the whole row. Other kernels build a mask of a part of the row.
    """
    kernel, is_padded = config.attention.implementation, config.packing.mode is PackingMode.padded
    if _sequence_group(config) == 1 or (ATTENTIONS[kernel].needs_lengths and not is_padded):
        return None
    own = without_flash_attn(replace(config, packing=replace(config.packing, mode=PackingMode.isolated)))
    own = own if ATTENTIONS[own].needs_lengths else BY_DOCUMENT
    fix = f"attention.implementation={own.name}" + (" packing.mode=isolated" if is_padded else "") + " or "
    what = "padded rows" if is_padded else f"rows with {kernel.name}"
    message = f"{what} cannot be shared by {_sequence_group(config)} GPUs"
    is_possible = _can_share_rows(config) and has_attention(config, own)
    return Finding(message, (fix if is_possible else "") + "parallelism.sequence_group_size=1")


@rule("sequence-group-row", "packing.row_length")
def sequence_group_row(config: RunConfig) -> Finding | None:
    """Require rows that a group can divide into equal parts: each GPU gets the same number of tokens."""
    group, row = _sequence_group(config), config.packing.row_length
    if row is None or row % group == 0 or config.packing.mode is PackingMode.padded:
        return None
    message = f"rows of {row} tokens cannot be divided into {group} equal parts"
    return Finding(message, f"packing.row_length={-(-row // group) * group}")


@rule("parallelism-setting-ignored", is_error=False)
def parallelism_setting_ignored(config: RunConfig) -> Iterator[Finding]:
    """Warn about settings that the chosen strategy does not read: of stage 3, NVMe, HSDP or another wrap policy."""
    settings, strategy = config.parallelism, strategy_facts(config)
    ignored: list[str] = []
    if isinstance(settings, ZeroConfig):
        ignored += _ZERO3_ONLY if strategy.keeps_whole_weights else []
        ignored += [] if uses_nvme(config) else ["nvme_path"]
    if isinstance(settings, FsdpConfig):
        ignored += [] if strategy.within_groups else ["shard_group_size"]
        ignored += ["wrap_classes" if settings.wrap_policy is WrapPolicy.size else "wrap_min_num_parameters"]
    for name in ignored:
        key, value, unset = f"parallelism.{name}", getattr(settings, name), default_of(f"parallelism.{name}")
        if value != unset:
            message = f"{as_typed(value)} is not used by {settings.strategy.name}"
            yield Finding(message, f"{key}={as_typed(unset)}", key=key)


@rule("bf16-weights-under-zero", "precision.master_weights")
def bf16_weights_under_zero(config: RunConfig) -> Finding | None:
    """Refuse bf16 weights in a full fine-tune; under LoRA the frozen weights may be bf16.

    DeepSpeed's optimizer always keeps fp32 weights and casts them, so the setting would save nothing.
    """
    is_bf16 = config.precision.master_weights is MasterWeights.bf16
    if not is_bf16 or not strategy_facts(config).is_zero or config.peft.method is not PeftMethod.full:
        return None
    message = f"{config.parallelism.strategy.name} keeps fp32 weights whatever precision.master_weights says"
    return Finding(message, "precision.master_weights=fp32")


@rule("qlora-without-gpu", "peft.method")
def qlora_without_gpu(config: RunConfig) -> Finding | None:
    """Refuse 4-bit layers without a GPU.

    On CPUs with AVX-512 BF16 bitsandbytes repacks 4-bit weights for inference, and the first training step fails.
    """
    # Observed in Linear4bit.forward, bitsandbytes 0.50.2: "a view of a leaf Variable that requires grad is being used
    # in an in-place operation".
    if config.peft.method is not PeftMethod.qlora or config.hardware.generation is not Generation.cpu:
        return None
    # A base stored in 4 bits can be trained with QLoRA only.
    other = "" if quantizer_of(config) is None else f" {another_model(config)}"
    return Finding("4-bit layers are trained on GPUs", f"peft.method=lora{other}")


@rule("qlora-parameters-on-nvme", "parallelism.offload_parameters")
def qlora_parameters_on_nvme(config: RunConfig) -> Finding | None:
    """Refuse QLoRA with parameters on NVMe (zero3_nvme).

    DeepSpeed reads parameters from files in the run's number format; a 4-bit base is stored in another.
    """
    # AsyncPartitionedParameterSwapper(ds_config, self.dtype) derives its buffers' dtype and element size from that
    # dtype (DeepSpeed 0.19.8, runtime/swap_tensor/partitioned_param_swapper.py).
    settings = config.parallelism
    if config.peft.method is not PeftMethod.qlora or not isinstance(settings, ZeroConfig):
        return None
    if settings.offload_parameters is not Offload.nvme:
        return None
    return Finding("4-bit weights cannot go through DeepSpeed's files", "parallelism.offload_parameters=cpu")


@rule("offload-not-possible")
def offload_not_possible(config: RunConfig) -> Iterator[Finding]:
    """Refuse offload targets that the strategy does not support.

    DeepSpeed moves parameters, and anything to NVMe, in stage 3 only; FSDP offloads to host memory only.
    """
    settings, strategy = config.parallelism, config.parallelism.strategy
    if isinstance(settings, FsdpConfig) and settings.offload_parameters is Offload.nvme:
        message, key = f"{strategy.name} cannot offload to nvme", "parallelism.offload_parameters"
        yield Finding(message, f"{key}=cpu or {_TO_NVME}", key=key)
    if not isinstance(settings, ZeroConfig) or not strategy_facts(config).keeps_whole_weights:
        return
    if settings.offload_parameters is not Offload.none:
        message, key = f"{strategy.name} keeps whole parameters on every GPU", "parallelism.offload_parameters"
        yield Finding(message, f"{key}=none or parallelism=zero3_offload", key=key)
    if settings.offload_optimizer is Offload.nvme:
        message, key = f"{strategy.name} cannot offload to nvme", "parallelism.offload_optimizer"
        yield Finding(message, f"{key}=cpu or {_TO_NVME}", key=key)


@rule("nvme-path-missing", "parallelism.nvme_path")
def nvme_path_missing(config: RunConfig) -> Finding | None:
    """Require `nvme_path` if anything is offloaded to NVMe: DeepSpeed swaps states through files."""
    settings = config.parallelism
    if not isinstance(settings, ZeroConfig) or settings.nvme_path:
        return None
    if not uses_nvme(config) or not strategy_facts(config).is_zero3:  # other stages cannot offload to NVMe
        return None
    return Finding("an offload to nvme needs a folder on a local NVMe disk", "parallelism.nvme_path=/local_nvme")
