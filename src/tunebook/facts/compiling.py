"""How torch compiles a transformer block: for what compiles them, and for what only counts what they keep.

torch keeps its settings for the whole process, so blocks of one kind are compiled in one. Also what the terminal says
of compilations, which take long in silence.
"""

from __future__ import annotations

import os

from tunebook.config.schema import RunConfig
from tunebook.facts.attention import attention_facts

# What of a block's inputs stays open: all that is handed to its forward pass, and nothing that hangs on the block
# itself. `dynamic=True` leaves that open too where FSDP has wrapped the block, whose numbers torch does not take for
# constants then (2.11 and 2.13): with a head's size unknown to the compiler, rotating the positions took 178 ms of a
# step of 3.1 s of Llama 3 8B on each of four H200; without that a step was 2.4% faster (h200x4_speed.jsonl and
# h200x4_beside_peers.jsonl). What a user has set there, as by TORCH_COMPILE_DYNAMIC_SOURCES, is replaced.
_OPEN = r"L\['(?!self'\]).*"  # a pattern of the names that torch gives to local variables, and of what is in them

# torch's reasons for keeping what could be computed again, by their names in its configuration (2.11 and 2.13): that
# the backward pass has to write it to memory for a product, that it is needed long after it was computed, and that it
# hangs on a long chain. What is left are operations that are more than arithmetic on single numbers.
_REASONS_TO_KEEP = (
    "ban_recompute_materialized_backward",
    "ban_recompute_used_far_apart",
    "ban_recompute_long_fusible_chains",
)


def set_up_compiler(*, recomputes: bool) -> None:
    """Before a block is compiled: how long a pass is stays open, and each block is one graph.

    `recomputes`: what costs little is computed again in the backward pass and not kept for it.
    """
    import torch
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch

    # torch would cut graphs where DDP's buckets end, so that gradients are sent while the rest of a graph runs, which
    # blocks by themselves allow already; pieces of blocks kept 8 GiB more of Qwen2.5-3B's activations and were slower
    # (2 H200, rows of 8,192 tokens: h200_speed_spread.jsonl).
    dynamo.optimize_ddp = False
    torch.compiler.config.dynamic_sources = _OPEN
    for reason in _REASONS_TO_KEEP:
        setattr(functorch, reason, not recomputes)


def compilation_notice(config: RunConfig) -> str | None:
    """What the first passes of a run compile, for how long, and where it is kept; None for nothing.

    DeepSpeed's operators are not among it: they are compiled earlier, and each is named when that begins.
    """
    parts: list[str] = []
    if config.model.compile_layers:
        parts.append("torch.compile the model's blocks (8 to 98 s on an H200, longer on a CPU)")
    parts += filter(None, [attention_facts(config).compiles_itself])
    if config.model.liger_kernel:
        parts.append("Triton the kernels of Liger (some seconds)")
    if not parts:
        return None
    return f"the first steps compile, in silence: {'; '.join(parts)}. Kept in {_kernel_cache()} for the next run"


def _kernel_cache() -> str:
    """Where torch keeps what it has compiled."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()
