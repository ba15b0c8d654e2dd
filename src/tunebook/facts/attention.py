"""Attention kernels: which of them need the flash-attn kernels, and how each learns where documents end."""

from __future__ import annotations

from tunebook.config.choices import Attention

FLASH = (
    Attention.flash_attention_2,
    Attention.flash_attention_3,
    Attention.flash_attention_4,
    Attention.varlen_attention,
    Attention.varlen_attention_4,
)
# Those that are told where documents begin and end, and by nothing else.
BY_LENGTHS = (Attention.varlen_attention, Attention.varlen_attention_4, Attention.sdpa_by_document)
WITHOUT_MASK = (*FLASH, Attention.sdpa_by_document)
