"""Which saved tensors TRL's activation offloading leaves on the device: those that are saved again while on their way.

Follows `OffloadActivations` of trl 1.16 (models/activation_offloading.py) without moving anything: a storage that is
saved once more while an earlier save of it is still being copied is not copied a second time, and stays where it is.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

_MOST_ON_THEIR_WAY = 5  # its max_fwd_stash_size
_SMALLEST_BYTES = 1024  # its min_offload_size


class Offloading:
    """The saves of one pass, in their order. Storages must be kept alive by whoever tells of them."""

    def __init__(self, of_weights: Set[int]) -> None:
        """`of_weights`: the storages of parameters, which it never moves."""
        self.left: set[int] = set()  # storages that stay on the device
        self._of_weights = of_weights
        self._number = 0
        self._on_their_way: dict[int, tuple[Any, ...]] = {}  # by the number of the save
        self._newest: dict[tuple[Any, ...], int] = {}  # by what tells tensors apart

    def save(self, tensor: Any) -> None:
        """Autograd saves a tensor."""
        self._number += 1
        storage = tensor.untyped_storage()._cdata
        key = (storage, tensor.storage_offset(), tensor.dtype)
        if key in self._newest:
            self._newest[key] = self._number
            self.left.add(storage)
            return
        if storage in self._of_weights or tensor.element_size() * tensor.nelement() < _SMALLEST_BYTES:
            return
        self._let_go()
        self._on_their_way[self._number] = key
        self._newest[key] = self._number

    def _let_go(self) -> None:
        """Of those that were sent long enough ago."""
        for number in [each for each in self._on_their_way if each <= self._number - _MOST_ON_THEIR_WAY]:
            key = self._on_their_way.pop(number)
            if self._newest.get(key) == number:
                del self._newest[key]
