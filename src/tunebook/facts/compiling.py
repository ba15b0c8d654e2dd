"""torch's settings for compiling a transformer block, for training and for measuring what a block keeps.

torch has one set of these settings per process, so all blocks of a process are compiled in the same way. Also the
notice on the terminal before compilations, which take long without output.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tunebook.config.choices import Generation
from tunebook.config.schema import RunConfig
from tunebook.facts.attention import attention_facts

# Inputs of a block with dynamic sizes: everything passed to its forward pass, and nothing that belongs to the block
# itself. `dynamic=True` would make that dynamic too where FSDP has wrapped the block, since torch (2.11 and 2.13) then
# does not treat the block's numbers as constants. With a head size unknown to the compiler, rotating the positions took
# 178 ms of a step of 3.1 s (Llama 3 8B on each of four H200); without that, a step was 2.4% faster (h200x4_speed.jsonl
# and h200x4_beside_peers.jsonl). This replaces a user's own setting, such as TORCH_COMPILE_DYNAMIC_SOURCES.
_OPEN = r"L\['(?!self'\]).*"  # matches torch's names of local variables and of their contents

# torch's reasons for keeping a result that could be recomputed, by their configuration names (2.11 and 2.13): the
# backward pass has to write it to memory for a product, it is needed long after it was computed, or it depends on a
# long chain. Without these reasons, torch keeps only operations that are more than elementwise arithmetic.
_REASONS_TO_KEEP = (
    "ban_recompute_materialized_backward",
    "ban_recompute_used_far_apart",
    "ban_recompute_long_fusible_chains",
)


def set_up_compiler(*, recomputes: bool) -> None:
    """Set up torch before a block is compiled: pass lengths are dynamic, and each block is one graph.

    `recomputes`: the backward pass recomputes cheap results instead of keeping them.
    """
    import torch
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch

    # torch would cut graphs at the ends of DDP's buckets, to send gradients while the rest of a graph runs. Separate
    # blocks allow that already. Cut blocks kept 8 GiB more of Qwen2.5-3B's activations and were slower (2 H200, rows of
    # 8,192 tokens: h200_speed_spread.jsonl).
    dynamo.optimize_ddp = False
    torch.compiler.config.dynamic_sources = _OPEN
    for reason in _REASONS_TO_KEEP:
        setattr(functorch, reason, not recomputes)


@contextmanager
def keeping_compiler_settings() -> Iterator[None]:
    """Undo what `set_up_compiler` sets inside, in a process that compiles for a plan only."""
    import torch
    from torch._dynamo import config as dynamo
    from torch._functorch import config

    functorch: Any = config
    compiler: Any = torch.compiler.config
    with (
        dynamo.patch(optimize_ddp=dynamo.optimize_ddp),
        functorch.patch({reason: getattr(functorch, reason) for reason in _REASONS_TO_KEEP}),
        compiler.patch(dynamic_sources=compiler.dynamic_sources),
    ):
        yield


def compilation_notice(config: RunConfig) -> str | None:
    """What the first passes of a run compile, and how long it takes; None if nothing.

    Without DeepSpeed's operators, which are compiled earlier.
    """
    parts: list[str] = []
    if config.model.compile_layers:
        parts.append("torch.compile the model's blocks (8 to 98 s on an H200, longer on a CPU)")
    parts += filter(None, [attention_facts(config).compiles_itself])
    if config.model.liger_kernel:
        parts.append("Triton the kernels of Liger (some seconds)")
    facts = config.model.facts
    packages = facts.measured.packing_packages if facts is not None and facts.measured is not None else []
    if packages and config.hardware.generation is not Generation.cpu:
        # Layers of Qwen3.5-9B: h200x2_models.jsonl, 56 s for the leak probe and 117 s for the first step.
        parts.append(f"Triton the kernels of {', '.join(packages)}, in several variants each (3 minutes on an H200)")
    return f"the first steps compile, without output: {'; '.join(parts)}. Later runs reuse them" if parts else None
