"""FSDP2 (`fully_shard`) through accelerate: the `fsdp_config` of the Trainer. Pure functions.

`fsdp` shards parameters, gradients and optimizer state; `fsdp_grad_op` keeps the gathered parameters after the forward
pass (less communication, more memory); `hsdp` shards inside a group of GPUs and replicates over groups.
"""

from __future__ import annotations

from typing import Any

from tunebook.config.choices import Offload, StateDict, Strategy, WrapPolicy
from tunebook.config.schema import FsdpConfig, RunConfig

_POLICIES = {WrapPolicy.transformer: "TRANSFORMER_BASED_WRAP", WrapPolicy.size: "SIZE_BASED_WRAP"}
_STATE_DICTS = {StateDict.sharded: "SHARDED_STATE_DICT", StateDict.full: "FULL_STATE_DICT"}


def is_fsdp(strategy: Strategy) -> bool:
    """Whether a strategy is one of FSDP's."""
    return strategy in (Strategy.fsdp, Strategy.fsdp_grad_op, Strategy.hsdp)


def fsdp_settings(config: RunConfig) -> dict[str, Any]:
    """The `fsdp_config` of TrainingArguments for a resolved run with an FSDP strategy."""
    fsdp = config.parallelism
    assert isinstance(fsdp, FsdpConfig)
    settings: dict[str, Any] = {
        "version": 2,
        "reshard_after_forward": fsdp.strategy is not Strategy.fsdp_grad_op,
        "auto_wrap_policy": _POLICIES[fsdp.wrap_policy],
        "cpu_ram_efficient_loading": fsdp.cpu_ram_efficient_loading,
        "offload_params": fsdp.offload_parameters is not Offload.none,
        "state_dict_type": _STATE_DICTS[fsdp.state_dict],
    }
    if fsdp.wrap_policy is WrapPolicy.size:
        settings["min_num_params"] = fsdp.wrap_min_num_parameters
    elif fsdp.wrap_classes:
        settings["transformer_layer_cls_to_wrap"] = list(fsdp.wrap_classes)
    return settings
