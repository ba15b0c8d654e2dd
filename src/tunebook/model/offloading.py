"""Offload what transformer blocks keep for the backward pass to page-locked host memory, one block at a time.

While a block is computed, what the block before it keeps is copied to the host, by a stream of its own. In the backward
pass, what the block before will need is copied back meanwhile. The GPU holds the activations of two blocks.
TRL's offloading (1.16) goes tensor by tensor: steps of compiled blocks took a fifth longer with it, and no longer with
this, at a memory budget that keeps a fifth (h200_adapter_variants.jsonl).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from tunebook.model.blocks import block_forward

SMALLEST_BYTES = 2**20  # smaller tensors stay on the GPU


class Copies:
    """Copies between the GPU and page-locked memory, in order, by a stream of their own.

    Copies to the GPU go into memory of the stream that computes, so that no memory waits for another stream to be done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def to_host(self, tensors: list[torch.Tensor]) -> tuple[list[Any], Any]:
        """Copies of tensors with their strides, on which compiled blocks rely, and the event that completes them."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copies = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
        strides = [tensor.stride() for tensor in tensors]  # a copy of a part of a tensor has others
        return list(zip(copies, strides, strict=True)), self._stream.record_event()

    def to_gpu(self, copies: list[Any]) -> tuple[list[torch.Tensor], Any]:
        """The tensors of copies, and the event that completes them."""
        tensors = [
            torch.empty_strided(copy.shape, stride, dtype=copy.dtype, device=self._device) for copy, stride in copies
        ]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for tensor, (copy, _) in zip(tensors, copies, strict=True):
                tensor.copy_(copy, non_blocking=True)
        return tensors, self._stream.record_event()

    def wait(self, event: Any) -> None:
        """Let whatever is computed next wait for an event."""
        torch.cuda.current_stream(self._device).wait_event(event)


def offload_activations(blocks: Iterable[nn.Module], copies: Any) -> None:
    """Offload the activations of all blocks of a model, which run in this order. `copies`: a `Copies`, or like it."""
    offloading, blocks = _Offloading(copies), list(blocks)
    for block in blocks:
        forward = vars(block).get("forward") or MethodType(block_forward, block)
        block.forward = partial(offloading.run, block, forward, block is blocks[0], block is blocks[-1])


class _Offloading:
    """Runs the blocks. Several forward passes may precede their backward passes: each has tensors of its own."""

    def __init__(self, copies: Any) -> None:
        self._copies = copies
        self._last: _Kept | None = None

    def run(self, block: nn.Module, forward: Any, is_first: bool, is_last: bool, *args: Any, **kwargs: Any) -> Any:
        """A block's forward pass. The tensors of the last block stay: its backward pass comes next."""
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        before = None if is_first else self._last
        # What every block gets stays: the embeddings of positions, a mask.
        others = args[1:], {name: value for name, value in kwargs.items() if name != "hidden_states"}
        inputs = [each for each in tree_leaves(others) if isinstance(each, torch.Tensor)]
        staying = {_storage(tensor) for tensor in (*block.parameters(), *block.buffers(), *inputs)}
        kept = self._last = _Kept(self._copies, before, staying)
        with saved_tensors_hooks(kept.pack, kept.unpack):
            output = forward(*args, **kwargs)
        if before is not None:
            before.release()
        if not is_last:
            kept.send()
        return output


class _Kept:
    """The tensors that one block keeps for its backward pass."""

    def __init__(self, copies: Any, before: _Kept | None, staying: set[int]) -> None:
        self._copies, self._before, self._staying = copies, before, staying
        self._numbers = dict[Any, int]()  # of tensors by place and shape: one may be kept several times
        self._uses: list[int] = []
        self._tensors: list[torch.Tensor | None] = []
        self._on_host: list[Any] = []
        self._event: Any = None

    def pack(self, tensor: torch.Tensor) -> Any:
        """The tensor itself if it stays, else its number."""
        is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        if tensor.nbytes < SMALLEST_BYTES or is_weight or _storage(tensor) in self._staying:
            return tensor
        key = _storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        number = self._numbers.setdefault(key, len(self._tensors))
        if number == len(self._tensors):
            self._tensors.append(tensor)
            self._uses.append(0)
        self._uses[number] += 1
        return number

    def unpack(self, packed: Any) -> torch.Tensor:
        """The tensor. The first call of a backward pass fetches those of the block before."""
        if isinstance(packed, torch.Tensor):
            return packed
        self.fetch()
        if self._before is not None:
            self._before.fetch()
            self._before = None
        if self._event is not None:
            self._copies.wait(self._event)
            self._event = None
        tensor: torch.Tensor | None = self._tensors[packed]
        assert tensor is not None, "one backward pass per forward pass"
        self._uses[packed] -= 1
        if not self._uses[packed]:
            self._tensors[packed] = None
        return tensor

    def send(self) -> None:
        """Start to copy the tensors to the host."""
        self._on_host, self._event = self._copies.to_host(self._tensors)

    def release(self) -> None:
        """Free the GPU's memory. What is computed next, perhaps there, waits for the copies."""
        self._copies.wait(self._event)
        self._tensors, self._event = [], None

    def fetch(self) -> None:
        """Start to copy the tensors back, unless they are on the GPU."""
        if self._on_host and not self._tensors:
            self._tensors, self._event = self._copies.to_gpu(self._on_host)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
