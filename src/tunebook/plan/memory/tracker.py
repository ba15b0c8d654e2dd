"""Count what is alive while a step runs on tensors without memory, and run compiled layers as inductor would."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
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


# Compiled layers


TRACKERS: list[Tracker] = []  # of the pass that runs; empty: nothing is counted


class _Fused(torch.fx.Interpreter):
    """Runs a partitioned graph. Only what inductor writes to memory counts.

    That is results of products and kernels, what they read, and what the graph returns. All else is inside of fused
    kernels.
    """

    _PRODUCTS = (
        "mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "fake_attention", "fake_attention_backward", "embedding",
        "_grouped_mm", "convolution",
    )  # fmt: skip
    _VIEWS = (
        "view", "_unsafe_view", "reshape", "t", "transpose", "permute", "unsqueeze", "squeeze", "expand", "slice",
        "getitem", "detach", "alias", "select", "as_strided", "split",
    )  # fmt: skip

    def __init__(self, graph: Any) -> None:
        self._fuse(graph.graph)
        super().__init__(graph)
        self._written = set[Any]()
        self._read: list[Any] = []
        for node in reversed(graph.graph.nodes):
            name = self._name(node)
            ends = node.op == "output" or name in self._PRODUCTS
            if ends or (node in self._written and name in self._VIEWS):
                self._written.update(node.all_input_nodes)
            if name in self._PRODUCTS:
                self._written.add(node)
        self._keep_sources()

    def _keep_sources(self) -> None:
        """Keep what a result inside of kernels is computed from until its last use: each kernel computes it again."""
        nodes = list(self.graph.nodes)
        places = {node: place for place, node in enumerate(nodes)}
        last = {node: max([places[user] for user in node.users], default=places[node]) for node in nodes}
        for node in reversed(nodes):
            if node.op == "call_function" and node not in self._written:
                for source in node.all_input_nodes:
                    last[source] = max(last[source], last[node])
        self.user_to_last_uses = {}
        for node, place in last.items():
            if node.users:
                self.user_to_last_uses.setdefault(nodes[place], []).append(node)

    def _fuse(self, graph: Any) -> None:
        """Move operations that read the same tensors together, as inductor computes them in one kernel."""
        done = set[Any]()

        def is_ready(node: Any) -> bool:
            is_fusible = node.op == "call_function" and self._name(node) not in self._PRODUCTS
            return is_fusible and node not in done and done.issuperset(node.all_input_nodes)

        for node in list(graph.nodes):
            if node in done:
                continue
            done.add(node)
            if node.op != "call_function" or self._name(node) in self._PRODUCTS:
                continue
            place, waiting = node, [node]
            while waiting:
                read = waiting.pop(0)
                for other in [user for each in (read, *read.all_input_nodes) for user in each.users if is_ready(user)]:
                    if is_ready(other):
                        place.append(other)
                        done.add(other)
                        place = other
                        waiting.append(other)

    @staticmethod
    def _name(node: Any) -> str:
        return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "").split(".")[0]

    def run_node(self, node: Any) -> Any:
        """Run one operation."""
        if not TRACKERS:
            return super().run_node(node)
        if self._name(node) in self._PRODUCTS:
            self._read.clear()
        else:  # a fused kernel holds what it reads until all of it has been computed
            self._read.extend(self.env[each] for each in node.all_input_nodes)
        tracker = TRACKERS[0]
        tracker.counting, tracker.in_graph = node in self._written, True
        try:
            return super().run_node(node)
        finally:
            tracker.counting, tracker.in_graph = True, False

    def __call__(self, args: list[Any]) -> Any:
        """Run the graph, whose inputs are freed as it has read them."""
        try:
            return self.boxed_run(args)
        finally:
            self.env.clear()  # else it would hold the results until the next layer runs
            self._read.clear()


def _run_fused(graph: Any, _: Any) -> Any:
    fused = _Fused(graph)

    def run(args: list[Any]) -> Any:
        return fused(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


BACKEND: Any = aot_autograd(
    fw_compiler=_run_fused,
    bw_compiler=_run_fused,
    partition_fn=min_cut_rematerialization_partition,
    decompositions=select_decomp_table(),
)
