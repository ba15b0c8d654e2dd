"""Rules about spreading the model over ranks and nodes, and about offloading."""

from __future__ import annotations

from collections.abc import Iterator

from tunebook.config.choices import Offload, PackingMode, PeftMethod
from tunebook.config.schema import CHOICE_SCHEMAS, FsdpConfig, RunConfig, ZeroConfig, world_size
from tunebook.facts.architectures import VARLEN_ARCHITECTURES
from tunebook.facts.attention import attention_facts
from tunebook.facts.methods import method_facts
from tunebook.facts.sharing import uses_nvme
from tunebook.facts.strategies import UNDECIDED, strategy_facts
from tunebook.plan.rules.frame import Finding, rule

_GROUP = "parallelism.sequence_group_size"


@rule("strategy-settings-mismatch", "parallelism.strategy")
def strategy_settings_mismatch(config: RunConfig) -> Iterator[Finding]:
    """Refuse a group whose schema is not the strategy's.

    zero1 to zero3 read DeepSpeed's settings; fsdp, fsdp_grad_op and hsdp read torch's. Changing only
    parallelism.strategy leaves the other library's in place: choose the group, such as parallelism=fsdp.
    """
    strategy = config.parallelism.strategy
    # `auto` in the schema of a named strategy stays undecided
    if strategy is UNDECIDED or type(config.parallelism) is not CHOICE_SCHEMAS["parallelism"][strategy.name]:
        message = f"{strategy.name} is set in a group with the settings of another strategy"
        yield Finding(message, fix=f"parallelism={strategy.name}")


@rule("single-needs-one-gpu", "parallelism.strategy", "parallelism=ddp or hardware.gpus_per_node=1")
def single_needs_one_gpu(config: RunConfig) -> Iterator[str]:
    """Refuse `single` with more than one rank: the others would be idle, or train unsynchronized copies."""
    if strategy_facts(config).runs_on_one and world_size(config) > 1:
        yield f"single runs on one GPU, and the run has {world_size(config)}"


@rule("hsdp-group", "parallelism.shard_group_size", "a size that makes two or more groups, or parallelism=fsdp")
def hsdp_group(config: RunConfig) -> Iterator[str]:
    """Require a group size that is a proper divisor of the world size, above one.

    hsdp shards the model inside a group of GPUs and replicates it over the groups. By default a group is a node.
    """
    settings, world = config.parallelism, world_size(config)
    if not strategy_facts(config).within_groups or not isinstance(settings, FsdpConfig):
        return
    group = settings.shard_group_size or config.hardware.gpus_per_node or 1
    if not 1 < group < world or world % group:
        yield f"hsdp needs two or more equal groups of GPUs, and {world} GPUs do not divide into groups of {group}"


@rule("sequence-group-size", _GROUP, f"{_GROUP}=1, or a size that divides it")
def sequence_group_size(config: RunConfig) -> Iterator[str]:
    """Require sequence groups that divide the GPUs of a node, the attention heads, and the tokens of a row.

    The GPUs of a group exchange tokens in every layer, so a group stays on one node, whose links are fast. Each GPU
    has an equal part of a row, and in the attention an equal share of the heads.
    """
    group, facts = config.parallelism.sequence_group_size, config.model.facts
    numbers = {"GPUs of a node": config.hardware.gpus_per_node or 1, "tokens of a row": config.packing.row_length or 0}
    if facts is not None:
        numbers["heads"] = facts.num_attention_heads
        numbers["heads of keys and values"] = facts.num_key_value_heads
    for what, number in numbers.items():
        if number % group:
            yield f"{group} does not divide the number of {what}, {number}"


@rule("sequence-group-architecture", _GROUP, f"{_GROUP}=1")
def sequence_group_architecture(config: RunConfig) -> Iterator[str]:
    """Refuse sequence groups for architectures that were not compared with these kernels.

    Each GPU has a part of a row only, so all but the attention must work on single tokens. Linear attention carries a
    state along the row; other models need what the kernels do not compute, such as sinks.
    """
    facts = config.model.facts
    if config.parallelism.sequence_group_size == 1 or facts is None:
        return
    if facts.architecture not in VARLEN_ARCHITECTURES:
        yield f"{facts.architecture} was not trained with the kernels that exchange the tokens of a row"


@rule("sequence-group-attention", "attention.implementation", f"attention=auto packing=isolated or {_GROUP}=1")
def sequence_group_attention(config: RunConfig) -> Iterator[str]:
    """Refuse sequence groups with another attention than Tunebook's own kernels for packed rows.

    They get the boundaries of the documents of the whole row. Other kernels build a mask of a part of the row.
    """
    if config.parallelism.sequence_group_size == 1 or not method_facts(config).has_equal_tokens:
        return
    if config.packing.mode is PackingMode.padded or not attention_facts(config).needs_lengths:
        kernel, mode = config.attention.implementation.name, config.packing.mode.name
        yield f"{mode} rows with {kernel} cannot be shared by several GPUs"


@rule("offload-not-possible")
def offload_not_possible(config: RunConfig) -> Iterator[Finding]:
    """Refuse offload targets that the strategy does not support.

    DeepSpeed moves parameters, and anything to NVMe, in stage 3 only; FSDP offloads to host memory only. DeepSpeed
    reads files in the run's number format, and a 4-bit base is stored in another.
    """
    settings, name, on_nvme = config.parallelism, config.parallelism.strategy.name, Offload.nvme
    parameters, optimizer = "parallelism.offload_parameters", "parallelism.offload_optimizer"
    if isinstance(settings, FsdpConfig) and settings.offload_parameters is on_nvme:
        yield Finding(f"{name} cannot offload to nvme", parameters, f"{parameters}=cpu")
    if not isinstance(settings, ZeroConfig):
        return
    if strategy_facts(config).keeps_whole_weights and settings.offload_parameters is not Offload.none:
        yield Finding(f"{name} keeps whole parameters on every GPU", parameters, "parallelism=zero3_offload")
    elif config.peft.method is PeftMethod.qlora and settings.offload_parameters is on_nvme:
        yield Finding("4-bit weights cannot go through DeepSpeed's files", parameters, f"{parameters}=cpu")
    if strategy_facts(config).keeps_whole_weights and settings.offload_optimizer is on_nvme:
        yield Finding(f"{name} cannot offload to nvme", optimizer, f"{optimizer}=cpu")


@rule("nvme-path-missing", "parallelism.nvme_path", "parallelism.nvme_path=FOLDER")
def nvme_path_missing(config: RunConfig) -> Iterator[str]:
    """Require `nvme_path` if anything is offloaded to NVMe: DeepSpeed swaps states through files."""
    settings, is_possible = config.parallelism, strategy_facts(config).is_zero3
    if isinstance(settings, ZeroConfig) and is_possible and uses_nvme(config) and not settings.nvme_path:
        yield "offloading to nvme needs a folder on a local NVMe disk"
