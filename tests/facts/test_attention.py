"""Facts of attention kernels are whole, and nobody else asks for a kernel by its name."""

from __future__ import annotations

import re
from pathlib import Path

import tunebook
from tunebook.config.choices import Attention
from tunebook.facts.attention import ATTENTIONS, COMPILED, COMPILED_BETA, MASKED, WITHOUT_KERNEL

SOURCE = Path(tunebook.__file__).parent


def test_every_kernel_has_facts() -> None:
    assert set(ATTENTIONS) == set(Attention)


def test_what_needs_a_package_needs_a_gpu_and_what_is_masked_runs_everywhere() -> None:
    for facts in ATTENTIONS.values():
        assert facts.package is None or facts.oldest is not None
        assert not facts.is_flash or (facts.oldest is not None and not facts.has_mask)
        assert not facts.needs_lengths or not facts.has_mask
    assert ATTENTIONS[MASKED].oldest is None and ATTENTIONS[WITHOUT_KERNEL].oldest is None


def test_the_kernels_of_compiled_blocks_compile_with_them() -> None:
    assert ATTENTIONS[COMPILED].compiles_with_blocks and ATTENTIONS[COMPILED_BETA].compiles_with_blocks


def test_no_other_module_asks_for_a_kernel_by_its_name() -> None:
    asking = {
        file.relative_to(SOURCE).as_posix()
        for file in SOURCE.rglob("*.py")
        if re.search(r"\bAttention\.[a-z]", file.read_text(encoding="utf-8"))
    }
    # The default, and a record of what was measured.
    assert asking == {"config/schema.py", "facts/attention.py", "plan/speed/measured_speed.py"}
