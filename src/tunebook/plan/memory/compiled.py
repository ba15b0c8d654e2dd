"""Compiled layers on tensors without memory: traced once, cut by torch's partitioner, run as inductor would do it."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from tunebook.plan.memory.tracker import TRACKERS


class TracedLayers:
    """A backend of torch.compile. Layers are traced once, and the trace is cut for each memory budget.

    Tracing takes seconds, cutting a fraction of one.
    """

    def __init__(self) -> None:
        self._traces: list[_Trace] = []
        self._budget = 1.0

    def cut(self, memory_budget: float) -> None:
        """From now on, run layers as torch cuts them with its present settings, which have this budget."""
        self._budget = memory_budget
        for trace in self._traces:
            trace.cut(memory_budget)

    def __call__(self, graph: Any, inputs: Any) -> Any:
        """Trace the forward and backward pass of a layer."""
        traces = []

        def keep(joint: Any, _: Any, **options: Any) -> Any:
            # As inductor does. An alias that is kept with its source would count twice.
            for alias in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.alias.default):
                alias.replace_all_uses_with(alias.args[0])
                joint.graph.erase_node(alias)
            traces.append(_Trace(joint, options))
            raise _IsTracedError

        def refuse(_: Any, __: Any) -> Any:
            raise _IsTracedError

        trace_only: Any = aot_autograd(fw_compiler=refuse, partition_fn=keep, decompositions=select_decomp_table())
        with contextlib.suppress(_IsTracedError):
            trace_only(graph, inputs)
        if not traces:  # no gradient is asked for, as in a frozen tower for images: it keeps nothing
            return graph.forward
        (trace,) = traces
        trace.cut(self._budget)
        self._traces.append(trace)
        passes: Any = _Passes
        return lambda *args: passes.apply(trace, *args)


class _IsTracedError(Exception):
    """Ends torch's compilation after the trace."""


class _Trace:
    """The forward and backward pass of a layer as one graph, and the two graphs that it was cut into."""

    def __init__(self, joint: Any, options: dict[str, Any]) -> None:
        self._joint, self._options = joint, options
        self._cuts = dict[float, tuple[_Fused, _Fused]]()

    @property
    def num_outputs(self) -> int:
        """Number of outputs of the forward pass."""
        return int(self._options["num_fwd_outputs"])

    def cut(self, memory_budget: float) -> None:
        """Cut it by torch's present settings, or take what they gave before."""
        if memory_budget not in self._cuts:
            joint = torch.fx.GraphModule(self._joint, copy.deepcopy(self._joint.graph))
            forward, backward = min_cut_rematerialization_partition(joint, None, **self._options)
            self._cuts[memory_budget] = _Fused(forward), _Fused(backward)
        self.forward, self.backward = self._cuts[memory_budget]


class _Passes(torch.autograd.Function):
    """The two passes of a layer, as torch's AOTAutograd runs them: numbers are saved last and read first."""

    boxed_grads_call = True  # torch 2.13: the gradients come in a list, and are freed as the pass has read them

    @staticmethod
    def forward(ctx: Any, trace: Any, *args: Any) -> Any:
        with torch._C._DisableAutocast():
            found = trace.forward(list(args))
        outputs, saved = found[: trace.num_outputs], found[trace.num_outputs :]
        ctx.save_for_backward(*(each for each in saved if isinstance(each, torch.Tensor)))
        ctx.numbers = [each for each in saved if not isinstance(each, torch.Tensor)]
        ctx.run = trace.backward
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        boxed = gradients[0] if isinstance(gradients[0], list) else [*gradients]
        args = [*ctx.numbers, *ctx.saved_tensors, *boxed]
        boxed.clear()
        ctx.maybe_clear_saved_tensors()
        with torch._C._DisableAutocast():
            return (None, *ctx.run(args))


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
