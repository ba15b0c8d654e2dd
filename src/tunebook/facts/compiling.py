"""torch's settings for compiling a transformer block, for training and for measuring what a block keeps.

torch has one set of these settings per process, so all blocks of a process are compiled in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tunebook.config.choices import Generation
from tunebook.config.schema import RunConfig
from tunebook.facts.attention import attention_facts

# Inputs of a block with dynamic sizes: everything passed to its forward pass, and nothing that belongs to the block
# itself. `dynamic=True` would make the head size dynamic too where FSDP has wrapped the block, which made a step 2.4%
# slower (h200x4_speed.jsonl). This replaces a user's own setting, such as TORCH_COMPILE_DYNAMIC_SOURCES.
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
    # blocks allow that already. Cut blocks kept more activations and were slower (h200_speed_spread.jsonl).
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


def compiles_kernels(config: RunConfig) -> bool:
    """Whether the first passes of a run compile kernels, which takes up to minutes without output."""
    facts = config.model.facts
    has_state_kernels = facts is not None and facts.measured is not None and bool(facts.measured.packing_packages)
    return bool(
        config.model.compile_layers
        or config.model.liger_kernel
        or attention_facts(config).compiles_itself
        or (has_state_kernels and config.hardware.generation is not Generation.cpu)
    )
