"""Count what is alive while a step runs on tensors without memory."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tunebook.plan.memory.activations import Bytes


@dataclass(frozen=True)
class Segment:
    """A part of the step: what is there at its start, its fullest moment and its end."""

    start: Bytes
    peak: Bytes
    end: Bytes
    offloaded: float  # bytes of page-locked host memory that activations were copied to


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Live bytes of all storages that operations return, by segment."""

    def __init__(self, parameters: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live, self.gradients, self.offloaded = 0, 0, 0.0
        self.counting, self.in_backward, self.in_graph = True, False, False
        self._parameters, self._alive = parameters, dict[int, Any]()
        self._found = dict[str, list[Any]]()  # by label: start, peak and offloaded bytes at the start
        self.mark("begin")

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True, or dynamo refuses to run compiled layers."""
        return True

    def mark(self, label: str) -> None:
        """Begin a segment. Recomputed layers call their hooks again, which is no new segment."""
        if label not in self._found:
            now = self._now()
            self._current = self._found[label] = [now, now, self.offloaded]

    def segments(self) -> dict[str, Segment]:
        """All segments, in order."""
        found = list(self._found.values())
        after = [*found[1:], [self._now(), None, self.offloaded]]
        return {
            label: Segment(start, peak, end, offloaded - before)
            for label, (start, peak, before), (end, _, offloaded) in zip(self._found, found, after, strict=True)
        }

    def _now(self) -> Bytes:
        return Bytes(self.live, self.gradients)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count what it returns."""
        if self._is_sum_of_gradients(function, args):
            self._drop(args[0].untyped_storage()._cdata)
        found = function(*args, **(kwargs or {}))
        if self.counting:
            for each in found if isinstance(found, tuple | list) else (found,):
                if isinstance(each, torch.Tensor):
                    self._note(each.untyped_storage())
        return found

    def _is_sum_of_gradients(self, function: Any, args: Any) -> bool:
        """Whether autograd adds up gradients. It does so in place, but for tensor subclasses such as fake ones."""
        is_sum = function is torch.ops.aten.add.Tensor and self.in_backward and not self.in_graph
        return is_sum and not torch.is_grad_enabled() and args[0].shape == getattr(args[1], "shape", None)

    def _drop(self, key: int) -> None:
        if key in self._alive:
            self.live -= self._alive.pop(key)[1]

    def _note(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or key in self._parameters or not isinstance(size, int):
            return

        self._alive[key] = weakref.ref(storage, lambda _: self._drop(key)), size
        self.live += size
        if self.live > self._current[1].live:
            self._current[1] = self._now()


TRACKERS: list[Tracker] = []  # of the pass that runs; empty: nothing is counted
