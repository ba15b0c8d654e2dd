"""DDP: a whole model on every rank, and gradients summed over the ranks while the backward pass still runs. Pure."""

from __future__ import annotations

from typing import Any

from tunebook.config.choices import Generation
from tunebook.config.schema import RunConfig

# Of gradients that are sent at once over the links inside one machine. torch's 25 MiB make 500 messages of a 3B model:
# 23,825 tokens/s/GPU on 4 H200, and 24,139 this way. Between machines a large last message would be waited for.
_BUCKET_MIB = 400


def ddp_arguments(config: RunConfig) -> dict[str, Any]:
    """The arguments of the Trainer for a resolved run that is neither DeepSpeed's nor FSDP's; one GPU ignores them."""
    arguments: dict[str, Any] = {
        "ddp_find_unused_parameters": False,
        "ddp_broadcast_buffers": False,  # constants, which every rank has computed
    }
    if config.hardware.generation is not Generation.cpu and config.hardware.num_nodes == 1:
        arguments["ddp_bucket_cap_mb"] = _BUCKET_MIB
    return arguments
