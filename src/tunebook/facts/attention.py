"""Attention kernels: where they run, how each isolates packed documents, and what it keeps in memory."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from tunebook.config.choices import Attention

if TYPE_CHECKING:
    from tunebook.config.schema import RunConfig


class Isolation(Enum):
    """How a kernel gets the boundaries of the documents in a row."""

    mask = "mask"  # N x N entries, where N is the number of tokens in the pass
    block_mask = "block_mask"  # flex_attention's mask of blocks
    lengths = "lengths"  # cu_seqlens


@dataclass(frozen=True, kw_only=True)
class AttentionFacts:
    """One kernel."""

    isolation: Isolation = Isolation.mask
    oldest: tuple[int, int] | None = None  # lowest compute capability; None: every GPU, and CPUs
    package: str | None = None  # the distribution that transformers looks for; None: part of torch
    is_flash: bool = False  # a flash attention kernel: fp16 and bf16 only, heads of at most LARGEST_FLASH_HEAD
    needs_lengths: bool = False  # Tunebook's own kernel, registered with transformers: packed rows only
    trains_on_cpu: bool = True
    compiles_with_blocks: bool = True  # a block with it is one graph: see the rule `compiled-layers-not-possible`
    compiles_itself: bool = False  # in the first steps
    repeats_heads: bool = False  # keeps keys and values once for each query head
    keeps_softmax: bool = False  # keeps the scores of every pair of tokens, in fp32
    mask_bytes: int | None = None  # bytes of a mask entry; all layers share the mask. None: the compute format
    keeps_documents: bool = False  # keeps the output of each document, and all outputs again as one tensor
    # Tokens of a packed row that keep a GPU busy. Measured on one H200 with Qwen2.5-0.5B (benchmarks/results): rows of
    # 1,024 are bound by kernel launches; 8,192 with flash attention are 5.6 x as fast. sdpa computes the whole square
    # of a row, so a row longer than 4,096 (2.5 x) costs more than it gains. None: unknown.
    full_row_tokens: int | None = 8192

    @property
    def has_mask(self) -> bool:
        """Whether a mask, of entries or of blocks, isolates documents."""
        return self.isolation is not Isolation.lengths


# Flash attention kernels need the instructions of the oldest GPU named here. Version 3 is distributed as Hopper builds,
# but its source also compiles for 8.0. Whether the installed build has the GPU's code is checked when it is loaded.
ATTENTIONS: dict[Attention, AttentionFacts] = {
    Attention.auto: AttentionFacts(mask_bytes=0, full_row_tokens=None),  # not decided yet
    Attention.eager: AttentionFacts(repeats_heads=True, keeps_softmax=True, full_row_tokens=None),
    Attention.sdpa: AttentionFacts(repeats_heads=True, mask_bytes=1, full_row_tokens=4096),
    Attention.flex_attention: AttentionFacts(
        isolation=Isolation.block_mask,
        mask_bytes=0,
        trains_on_cpu=False,
        compiles_itself=True,
    ),
    Attention.flash_attention_2: AttentionFacts(
        isolation=Isolation.lengths, oldest=(8, 0), package="flash-attn", is_flash=True, mask_bytes=0,
        compiles_with_blocks=False,
    ),
    Attention.flash_attention_3: AttentionFacts(
        isolation=Isolation.lengths, oldest=(8, 0), package="flash-attn-3", is_flash=True, mask_bytes=0,
        compiles_with_blocks=False,
    ),
    Attention.flash_attention_4: AttentionFacts(
        isolation=Isolation.lengths, oldest=(9, 0), package="flash-attn-4", is_flash=True, mask_bytes=0,
        compiles_with_blocks=False, compiles_itself=True,
    ),
    Attention.varlen_attention: AttentionFacts(
        isolation=Isolation.lengths, oldest=(8, 0), is_flash=True, mask_bytes=0, needs_lengths=True
    ),
    Attention.sdpa_by_document: AttentionFacts(
        isolation=Isolation.lengths, mask_bytes=0, needs_lengths=True, repeats_heads=True, keeps_documents=True,
        compiles_with_blocks=False, full_row_tokens=4096,  # in fp32, where the products of a row keep a GPU busy
    ),
}  # fmt: skip
# flash-attn 2.8 (flash_api.cpp), flash-attn 4 (cute/interface.py) and torch's varlen kernel refuse larger heads, such
# as Gemma 4's of 512: https://github.com/Dao-AILab/flash-attention/issues/2427.
LARGEST_FLASH_HEAD = 256
UNDECIDED = Attention.auto
MASKED = Attention.sdpa  # on every GPU and on CPUs, in every number format
WITHOUT_KERNEL = Attention.eager  # supported by every architecture
FLEX = Attention.flex_attention
INSTALLED = Attention.flash_attention_2  # what `auto` uses if the package is installed and blocks are not compiled
COMPILED = Attention.varlen_attention  # tested in compiled blocks
WITH_SINKS = Attention.varlen_attention  # of Tunebook's own kernels, the one that computes attention sinks
BY_DOCUMENT = Attention.sdpa_by_document  # fastest in fp32


def attention_facts(config: RunConfig) -> AttentionFacts:
    """The facts of the run's attention kernel."""
    return ATTENTIONS[config.attention.implementation]
