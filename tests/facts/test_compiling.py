"""What torch is told before it compiles a block."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from tunebook.facts.compiling import set_up_compiler


@pytest.mark.usefixtures("own_compiler")
def test_attention_costs_the_same_whatever_the_documents_are() -> None:
    """Else a low memory budget would recompute it for nothing, or other operations on each rank."""
    set_up_compiler(0.2)
    tokens, heads, groups, size = 96, 4, 2, 8
    for documents in (1, 3):
        with FakeTensorMode(), FlopCounterMode(display=False) as counted:
            query, key = (torch.empty(tokens, each, size, dtype=torch.bfloat16) for each in (heads, groups))
            ends = torch.empty(documents + 1, dtype=torch.int32)
            longest = tokens // documents
            torch.ops.torch_attn._varlen_attn(query, key, key, ends, ends, longest, longest, True, None, [-1, 0])
        # A product with the keys and one with the values, two FLOPs a number, 2,048 of each for every query.
        assert counted.get_total_flops() == 2 * 2 * tokens * heads * size * 2048
