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

# What compiling costs and gains at most; `auto` compares them for the run. Both favor compiling, since a long run loses
# more by a wrong choice than a short one.
# Seconds of a run's checks and steps with empty caches above those of the same run with full ones: 30 layers of a Llama
# on an H100. Full caches are read in some seconds, too, so that compiling costs more.
# Source: the two runs of smollm2_135m_boolq with seed 42 in h100_smollm2.jsonl.
COMPILE_SECONDS = 20.0
# Most steps that compiled blocks took per time relative to the same blocks not compiled, over all measured
# architectures. Source: qwen3_compiled_lora and qwen3_lora of h200x2_architectures.jsonl.
LARGEST_GAIN = 1.63
# The same of SmolLM2-135M, assumed for all models with fewer parameters than Qwen2.5-0.5B: the GPU waits for the CPU to
# start each kernel, and compiled blocks have fewer. Source: smollm2_135m_boolq-2 and boolq-uncompiled of
# h100_hopper_image.jsonl, on two machines with an H100 each, of which one may be up to 1.4 times as fast as the other.
SMALL_PARAMETERS = 494_032_768
LARGEST_GAIN_OF_SMALL = 4.7

# torch's reasons for keeping a result that could be recomputed, by their configuration names (2.11 and 2.13): the
# backward pass has to write it to memory for a product, it is needed long after it was computed, or it depends on a
# long chain. Without these reasons, torch keeps only operations that are more than elementwise arithmetic.
_REASONS_TO_KEEP = (
    "ban_recompute_materialized_backward",
    "ban_recompute_used_far_apart",
    "ban_recompute_long_fusible_chains",
)


def largest_gain(num_parameters: int) -> float:
    """The most that compiled blocks can gain in speed, as a factor, for a model with this many parameters."""
    return LARGEST_GAIN_OF_SMALL if num_parameters < SMALL_PARAMETERS else LARGEST_GAIN


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
