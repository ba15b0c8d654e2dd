"""Facts of attention kernels are whole."""

from __future__ import annotations

from tunebook.config.choices import Attention
from tunebook.facts.attention import ATTENTIONS, COMPILED, MASKED, WITHOUT_KERNEL


def test_every_kernel_has_facts() -> None:
    assert set(ATTENTIONS) == set(Attention)


def test_what_needs_a_package_needs_a_gpu_and_what_is_masked_runs_everywhere() -> None:
    for facts in ATTENTIONS.values():
        assert facts.package is None or facts.oldest is not None
        assert not facts.is_flash or (facts.oldest is not None and not facts.has_mask)
        assert not facts.needs_lengths or not facts.has_mask
    assert ATTENTIONS[MASKED].oldest is None and ATTENTIONS[WITHOUT_KERNEL].oldest is None
    assert ATTENTIONS[COMPILED].compiles_with_blocks
