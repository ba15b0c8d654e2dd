"""How torch splits a compiled layer's operations between forward and backward pass: what each way of splitting keeps.

A layer is traced once, which takes seconds, and its graph is split twice, with and without selective checkpointing,
with the same settings as on a GPU. The graphs run as they are, without code generation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo import reset
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode

from tunebook.facts.compiling import set_up_compiler

Receiver = Callable[[torch.Tensor], None]


def load_compiler() -> None:
    """Compile something small before the workers are forked, or each of them would import the compiler: 3 s of CPU."""
    layers = nn.ModuleList([nn.Linear(4, 4)])
    with FakeTensorMode(allow_non_fake_inputs=True):
        compile_layers(layers)
        layers[0](torch.zeros(2, 4))


def compile_layers(layers: nn.ModuleList, *, recomputes: bool = False, receivers: list[Receiver] | None = None) -> None:
    """Split each layer's operations between the passes as `model.compiled_layers` does.

    `recomputes`: with selective checkpointing. `receivers`: called in each pass with each tensor that the layer would
    keep the other way; the list may change between passes.
    """
    waiting: list[Callable[[Any], Callable[..., Any]]] = []  # for the forward graph that torch makes next

    def split(graph: Any, inputs: Any, **options: Any) -> Any:
        if receivers is not None:
            set_up_compiler(recomputes=not recomputes)
            other, _ = min_cut_rematerialization_partition(copy.deepcopy(graph), inputs, **options)
            waiting[:] = [partial(_run_both, other=other, num_results=options["num_fwd_outputs"], receivers=receivers)]
            set_up_compiler(recomputes=recomputes)
        return min_cut_rematerialization_partition(graph, inputs, **options)

    def run_unchanged(graph: Any, _: Any) -> Any:
        return graph.forward

    def run_forward(graph: Any, _: Any) -> Any:
        return waiting.pop()(graph) if waiting else graph.forward

    reset()
    set_up_compiler(recomputes=recomputes)
    backend = aot_autograd(
        fw_compiler=run_forward,
        bw_compiler=run_unchanged,
        partition_fn=split,
        decompositions=select_decomp_table(),
    )
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=True)


def _run_both(graph: Any, *, other: Any, num_results: int, receivers: list[Receiver]) -> Callable[..., Any]:
    """A forward pass that also runs the other graph, whose results stand for those of the first."""

    def run(*args: Any) -> Any:
        results, others = graph.forward(*args), other.forward(*args)
        same = {
            each.untyped_storage()._cdata: result
            for result, each in zip(results[:num_results], others[:num_results], strict=True)
            if isinstance(each, torch.Tensor)
        }
        for tensor in others[num_results:]:
            if isinstance(tensor, torch.Tensor):  # else a size
                for receive in receivers:
                    receive(same.get(tensor.untyped_storage()._cdata, tensor))
        return results

    return run
