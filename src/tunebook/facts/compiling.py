"""torch's settings for compiling a transformer block, for training and for measuring what a block keeps.

torch has one set of these settings per process, so all blocks of a process are compiled in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tunebook.config.choices import Generation
from tunebook.config.schema import RunConfig
from tunebook.facts.attention import attention_facts

# Inputs of a block with dynamic sizes: everything passed to its forward pass, and nothing that belongs to the block
# itself. `dynamic=True` would make the head size dynamic too where FSDP has wrapped the block, which made a step 2.4%
# slower (h200x4_speed.jsonl). This replaces a user's own setting, such as TORCH_COMPILE_DYNAMIC_SOURCES.
_OPEN = r"L\['(?!self'\]).*"  # matches torch's names of local variables and of their contents

CHEAP_BUDGET = 0.6  # the memory budget down to which norms and activation functions are recomputed, and few products
_SMALLEST_BUDGET = 1e-9  # at 0 torch would recompute seeds, too (`_keep_seeds`)
# Keys of each query in attention's FLOPs, whatever the documents: half of a document of 4,096 tokens.
_ATTENDED_KEYS = 2048


def set_up_compiler(memory_budget: float | None) -> None:
    """Set up torch before a block is compiled: pass lengths are dynamic, and each block is one graph.

    `memory_budget`: 0 to 1, the share of the activations that is kept of those that torch would keep; None for 1. Below
    1 torch recomputes what takes the fewest FLOPs for its bytes.
    """
    import torch
    import torch.nn.attention.varlen  # defines the operation
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor
    from torch.utils.flop_counter import flop_registry

    # torch would cut graphs at the ends of DDP's buckets, to send gradients while the rest of a graph runs. Separate
    # blocks allow that already. Cut blocks kept more activations and were slower (h200_speed_spread.jsonl).
    dynamo.optimize_ddp = False
    torch.compiler.config.dynamic_sources = _OPEN
    functorch.activation_memory_budget = 1.0 if memory_budget is None else max(memory_budget, _SMALLEST_BUDGET)
    # Else torch would recompute custom operations first, such as attention.
    functorch.is_non_builtin_to_include = True
    # torch 2.11 has no formula. That of 2.13 squares the longest document of the first pass, so that ranks, and a run
    # that resumes, would recompute different operations.
    flop_registry[torch.ops.torch_attn._varlen_attn] = attention_flops
    inductor.joint_custom_post_pass = _keep_seeds()


def attention_flops(query: Any, *_: Any, **__: Any) -> int:
    """FLOPs of the forward pass of attention to packed documents, by its query."""
    return 4 * int(query.numel()) * _ATTENDED_KEYS


def _keep_seeds() -> Any:
    """A pass over inductor's graphs of both passes, which has the forward pass keep the seeds of random numbers.

    Below a budget of about a half, torch (2.11 and 2.13) draws them again in the backward pass, so that dropout would
    drop other numbers there: the gradients would be wrong.
    """
    import torch
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
    from torch.utils.checkpoint import CheckpointPolicy

    class KeepSeeds(CustomGraphPass):
        def __call__(self, graph: Any) -> None:
            for node in graph.nodes:
                if node.target is torch.ops.prims.inductor_seeds.default:
                    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,))  # of cached graphs, which `attention_flops` changes, too

    return KeepSeeds()


@contextmanager
def keeping_compiler_settings() -> Iterator[None]:
    """Undo what `set_up_compiler` sets inside, in a process that compiles for a plan only."""
    import torch
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    compiler: Any = torch.compiler.config
    settings: list[tuple[Any, str]] = [
        (dynamo, "optimize_ddp"),
        (functorch, "activation_memory_budget"),
        (functorch, "is_non_builtin_to_include"),
        (inductor, "joint_custom_post_pass"),
        (compiler, "dynamic_sources"),
    ]
    with ExitStack() as stack:
        for module, name in settings:
            stack.enter_context(module.patch({name: getattr(module, name)}))
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
