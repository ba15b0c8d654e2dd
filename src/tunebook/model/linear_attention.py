"""Keep packed documents apart in layers that carry a state along the row: linear attention, Mamba-2, convolutions.

transformers 5.23 computes their states by functions that call a kernel of fla-core, causal-conv1d or mamba-ssm if that
package can be imported. Otherwise they compute in PyTorch and refuse packed rows. This module replaces some of them,
for the model that is loaded:

- Short convolutions need no package. With zeros between two documents, as many as the kernel looks back, one ordinary
  convolution of the row gives the results of each document alone.
- On a CPU, states are computed document by document.
- On a GPU that would be slow, so fla-core is needed there (`packages_for_packing`). It computes Mamba-2's states, too:
  they are those of linear attention with one gate per head. mamba-ssm is not used. It would have to be compiled, and
  its fused kernel reads the weight of the output projection itself, so an adapter there would not be trained.

Replacements get the boundaries of documents by the argument that the kernel has for it, and by no other. So a model
that does not pass it on leaks here as it does with the kernel, and the leak probe finds it.

Source: transformers 5.23, integrations/hub_kernels.py, `use_kernel_func_from_hub_with_fallback`.
Shapes: B = 1 packed row, D features, G groups of heads, H heads, K kernel width, N documents, P size of a head, S size
of a state, T tokens.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from tunebook.model.varlen_attention import document_lengths

# The kernels that can keep documents apart, and their argument for the boundaries of documents: the starts and the end
# of the row (N + 1,), or each token's document (B, T).
_CONVOLUTION, _BOUNDARIES, _DOCUMENT_OF_TOKEN = "causal_conv1d_fn", "cu_seqlens", "seq_idx"
GATED_DELTA_RULE = "chunk_gated_delta_rule"
MAMBA_SCAN = "mamba_chunk_scan_combined"
MAMBA_FUSED = "mamba_split_conv1d_scan_combined"  # convolution, scan, norm and output projection of a Mamba-2 layer
_BOUNDARY_ARGUMENTS = {
    _CONVOLUTION: _DOCUMENT_OF_TOKEN,
    GATED_DELTA_RULE: _BOUNDARIES,
    "chunk_kda": _BOUNDARIES,
    MAMBA_SCAN: _DOCUMENT_OF_TOKEN,
    MAMBA_FUSED: _DOCUMENT_OF_TOKEN,
}
FLA_CORE = "fla-core"  # the part of flash-linear-attention that has the kernels, which is imported as fla
_INSIDE = {"func_name", "is_new_implementation", "torch_function"}  # of transformers' decorator


class StateFunction(NamedTuple):
    """A function of a modeling file that computes in PyTorch if its kernel's package is not installed."""

    file: Any
    name: str
    original: Callable[..., Any]  # what transformers calls
    kernel: str  # the kernel's own name
    reference: Callable[..., Any]  # the computation in PyTorch, for a row of one document
    has_kernel: bool


def isolate_documents(model: nn.Module, *, is_on_cpu: bool) -> Callable[[], None]:
    """Replace the functions of a model's layers that refuse packed rows; calling the result puts them back."""

    def replacement(function: StateFunction) -> Callable[..., Any] | None:
        is_mamba = function.kernel in (MAMBA_SCAN, MAMBA_FUSED)
        if is_mamba and not is_on_cpu and (kernel := _linear_attention_kernel()) is not None:
            return mamba_in_steps(kernel, function)
        if function.has_kernel and not is_on_cpu:  # the kernels are for GPUs
            return None
        if function.kernel == _CONVOLUTION:
            return functools.partial(convolve_documents, function.reference)
        if not is_on_cpu:
            return None
        return functools.partial(by_document, _BOUNDARY_ARGUMENTS[function.kernel], function.reference)

    return replace_functions(model, replacement)


def replace_functions(
    model: nn.Module, replacement: Callable[[StateFunction], Callable[..., Any] | None]
) -> Callable[[], None]:
    """Replace the functions for which there is a replacement; calling the result puts them back."""
    replaced: list[StateFunction] = []
    for function in _functions(model):
        if (other := replacement(function)) is not None:
            setattr(function.file, function.name, other)
            replaced.append(function)

    def put_back() -> None:
        for function in replaced:
            setattr(function.file, function.name, function.original)

    return put_back


def packages_for_packing(model: nn.Module) -> list[str]:
    """The distributions whose kernels a model's layers need on a GPU for packed rows."""
    return [FLA_CORE] if any(function.kernel != _CONVOLUTION for function in _functions(model)) else []


def _linear_attention_kernel() -> Callable[..., Any] | None:
    """The kernel of fla-core for linear attention with one gate per head; None if fla-core is not installed."""
    if importlib.util.find_spec("fla") is None:
        return None
    kernel: Callable[..., Any] = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
    return kernel


def _functions(model: nn.Module) -> Iterator[StateFunction]:
    """Those that can keep documents apart and are not replaced yet. transformers has no list of them."""
    for file in sorted({type(module).__module__ for module in model.modules()}):
        for name, function in list(vars(sys.modules[file]).items()):
            if not inspect.isfunction(function):
                continue
            cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
            if not cells.keys() >= _INSIDE:
                continue
            inside = {variable: cells[variable].cell_contents for variable in _INSIDE}
            if inside["func_name"] in _BOUNDARY_ARGUMENTS:
                yield StateFunction(
                    file=sys.modules[file],
                    name=name,
                    original=function,
                    kernel=inside["func_name"],
                    reference=inside["torch_function"],
                    has_kernel=inside["is_new_implementation"],
                )


def convolve_documents(
    reference: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    seq_idx: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor:
    """A causal convolution (B, D, T) -> (B, D, T) with a weight (D, K), in which no document sees another.

    `seq_idx` (B, T) is each token's document; without it the row is one. `cu_seq_lens_q` (N + 1,) only tells their
    number without waiting for a GPU.
    """
    if seq_idx is None:
        return reference(hidden_states, weight, bias, activation)
    gap, num_tokens = weight.shape[-1] - 1, hidden_states.shape[-1]
    documents = seq_idx[0].long()
    num_documents = int(documents[-1]) + 1 if cu_seq_lens_q is None else cu_seq_lens_q.shape[0] - 1
    places = torch.arange(num_tokens, device=documents.device) + gap * documents
    spread = hidden_states.new_zeros(*hidden_states.shape[:2], num_tokens + gap * (num_documents - 1))
    spread = spread.index_copy(2, places, hidden_states)
    return reference(spread, weight, bias, activation).index_select(2, places)


def by_document(boundary_argument: str, reference: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute a state for each document alone, and join the results along the row.

    `boundary_argument`: the argument with the boundaries of documents; without it the row is one. Arguments
    (B, T, ...) are split, the others are the same for all documents. A result is a tensor (B, T, ...), or that and a
    last state, of which a packed row has none.
    """
    boundaries = kwargs.pop(boundary_argument, None)
    if boundaries is None:
        return reference(*args, **kwargs)
    if boundary_argument == _BOUNDARIES:
        lengths = document_lengths(boundaries)
    else:
        lengths = boundaries[0].unique_consecutive(return_counts=True)[1].tolist()
    num_tokens = sum(lengths)

    def split(value: Any) -> list[Any]:
        is_along_row = isinstance(value, torch.Tensor) and value.dim() > 2 and value.shape[:2] == (1, num_tokens)
        return list(value.split(lengths, dim=1)) if is_along_row else [value] * len(lengths)

    split_args = [split(value) for value in args]
    kwargs = {name: value for name, value in kwargs.items() if name not in (_BOUNDARIES, _DOCUMENT_OF_TOKEN)}
    split_kwargs = {name: split(value) for name, value in kwargs.items()}
    results = []
    for number in range(len(lengths)):
        document = {name: parts[number] for name, parts in split_kwargs.items()}
        results.append(reference(*(parts[number] for parts in split_args), **document))
    if results[0] is None:  # a kernel of several steps that PyTorch computes one by one
        return None
    if isinstance(results[0], tuple):
        return torch.cat([result[0] for result in results], dim=1), None
    return torch.cat(results, dim=1)


def mamba_in_steps(linear_attention: Callable[..., Any], function: StateFunction) -> Callable[..., Any]:
    """The replacement of a function of a Mamba-2 layer, so that a kernel of linear attention computes its states.

    The reference of the fused kernel returns None, which makes the layer compute step by step.
    """
    if function.kernel == MAMBA_FUSED:
        return function.reference
    return functools.partial(scan_documents, linear_attention, function.reference)


def scan_documents(
    linear_attention: Callable[..., Any],
    reference: Callable[..., Any],
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    rates: torch.Tensor,
    keys: torch.Tensor,
    queries: torch.Tensor,
    *,
    seq_idx: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **others: Any,
) -> Any:
    """Mamba-2's states as those of linear attention: hidden states (B, T, H, P), steps `dt` (B, T, H) -> (B, T, H, P).

    Mamba-2's B and C (B, T, G, S) are keys and queries, hidden states times steps are values, and its A (H), the
    `rates`, times steps are logarithms of gates. PyTorch computes a row that starts or ends with a state, which is not
    for training, and fp32, whose products the kernel would round to tf32.
    """
    is_cached = others.get("initial_states") is not None or others.get("return_final_states")
    if is_cached or hidden_states.dtype == torch.float32:
        others["seq_idx"] = seq_idx
        return by_document(_DOCUMENT_OF_TOKEN, reference, hidden_states, dt, rates, keys, queries, **others)
    boundaries = None
    if seq_idx is not None:
        boundaries = boundaries_of(seq_idx) if cu_seq_lens_q is None else cu_seq_lens_q
    bias, skip = others.get("dt_bias"), others.get("D")
    steps = dt.float() if bias is None else dt.float() + bias.float()
    if others.get("dt_softplus"):
        steps = nn.functional.softplus(steps)
    steps = steps.clamp(*others.get("dt_limit", (0.0, None)))
    heads_per_group = hidden_states.shape[2] // keys.shape[2]
    keys, queries = (tensor.repeat_interleave(heads_per_group, dim=2) for tensor in (keys, queries))
    values = (hidden_states * steps[..., None]).to(hidden_states.dtype)
    states, _ = linear_attention(queries, keys, values, rates.float() * steps, scale=1.0, cu_seqlens=boundaries)
    if skip is not None:
        states = (states + hidden_states * skip[:, None].float()).to(hidden_states.dtype)
    return states.contiguous()


def boundaries_of(documents: torch.Tensor) -> torch.Tensor:
    """Where documents start and end in a row (N + 1,), from each token's document (1, T)."""
    numbers: Any = documents[0]  # torch's next method has no types
    lengths = numbers.unique_consecutive(return_counts=True)[1]
    return nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
