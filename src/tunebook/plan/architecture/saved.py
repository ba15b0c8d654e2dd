"""Measure what autograd saves in one pass through each decoder layer, on tensors with a shape and no memory.

A model of a few of the layers, each kind twice, runs under PyTorch's FakeTensorMode at three lengths, in every number
format and with each kind of attention. The storages that autograd saves are summed by the layer that saves them. The
three lengths separate the constant part, the part linear in tokens, and the quadratic part, such as a mask.

`compiled` says what compiled layers keep. For other layers, stand-ins save what a GPU's attention kernels save;
everything else runs as on a CPU under CUDA's autocast.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.integrations import moe

from tunebook.config.choices import Attention
from tunebook.config.model_facts import OFFLOADED, TILED
from tunebook.config.unreached import expression
from tunebook.facts.attention import ATTENTIONS, WITH_SINKS
from tunebook.model.linear_attention import (
    GATED_DELTA_RULE,
    MAMBA_FUSED,
    MAMBA_SCAN,
    StateFunction,
    mamba_in_steps,
    replace_functions,
)
from tunebook.model.tiled_mlp import mlps_of
from tunebook.plan.architecture import ALL_WAYS
from tunebook.plan.architecture.compiled import Receiver, compile_layers, load_compiler
from tunebook.plan.architecture.kernels import (
    MASKED,
    UNMASKED,
    VARLEN,
    CudaAutocast,
    gated_delta_rule,
    grouped_product,
    linear_attention,
    register_kernels,
)
from tunebook.plan.architecture.layers import decoder_layers, kinds_of, shortened, text_decoder, traced_places
from tunebook.plan.architecture.targets import names_beside_experts, names_to_adapt
from tunebook.processes import die_with_parent

LENGTHS = (62, 124, 186)  # tokens; unlike any size of a real model, so that shapes identify copies of weights
LORA_RANK = 1
# Number format of the weights, and whether autocast computes in bf16. Without autocast, adapters have the weights'
# format.
FORMATS = {
    "fp32": (torch.float32, False), "autocast": (torch.float32, True), "bf16": (torch.bfloat16, True),
    "cast": (torch.bfloat16, False),
}  # fmt: skip
# Our name for an attention, and transformers' name.
ATTENTION = {"sdpa": MASKED, "flash": UNMASKED, "eager": "eager"}
# Compiled layers, all with torch's kernel for packed rows, and the second number of the same trace: what they keep with
# selective checkpointing.
COMPILED, SELECTIVE = "compiled", "selective"
_METHODS = ("full", "adapter")
_BESIDE = "beside"  # method: an adapter on all layers except stacked experts
_DROPOUT = 0.05  # for the method "dropout", an adapter; the rate has no influence
_MODES = (
    *itertools.product(FORMATS, _METHODS, ATTENTION),
    *itertools.product(("autocast", "bf16"), (*_METHODS, "dropout"), (COMPILED,)),
)
_OF_ADAPTERS = {("adapter", kernels) for kernels in ATTENTION}
_MOST_BEING_COPIED, _SMALLEST_BYTES = 5, 1024  # TRL's max_fwd_stash_size and min_offload_size
_WORKERS = 8  # processes; compiling takes some seconds a mode, and there are up to 6 such modes
_MACHINES = (MemoryError, ImportError, OSError)  # machine faults; must not be cached as facts of a model
Saved = dict[str, list[int]]
_known: list[Any] = []  # in a worker: config, kinds of layers, options


@contextlib.contextmanager
def measuring(
    config: Any,
    layers: nn.ModuleList,
    options: dict[str, Any],
    *,
    on_found: Callable[[], None] = lambda: None,
    ways: Sequence[str] = ALL_WAYS,
    compiles: bool = True,
    has_experts: bool = False,
) -> Iterator[Callable[[], tuple[Saved, Saved]]]:
    """Trace the modes of some of `ALL_WAYS` in other processes; calling the result waits for them.

    It returns six numbers by "format/method/kernels", as in `MeasuredLayers`; modes that fail to run are left out. For
    layers that are not compiled there are also six numbers of what offloading leaves on the GPU, under the same key
    plus "offloaded", and of what is kept if MLPs are computed in tiles ("tiled"). The second mapping is the same with
    adapters on all layers except stacked experts, if `has_experts`, for layers that are not compiled.

    `on_found` is called after each mode. Compiled layers are traced only if the run may compile them (`compiles`), and
    if they have attention: recurrent layers such as RWKV's take minutes to compile.
    """
    kinds = kinds_of(config, layers)
    known = (config, kinds, traced_places(config, kinds, options), options, has_experts)
    has_attention = bool(getattr(config.get_text_config(decoder=True), "num_attention_heads", None))
    modes = _modes(ways, compiles=has_attention and compiles)
    if has_experts:  # not compiled: compiled traces with adapters on experts are missing too, and take a minute
        modes += [(each, _BESIDE, kernels) for each, method, kernels in modes if (method, kernels) in _OF_ADAPTERS]
    if not modes:
        yield lambda: ({}, {})
        return
    if any(mode[2] == COMPILED for mode in modes):
        load_compiler()
    workers = min(_WORKERS, os.cpu_count() or 1, len(modes))
    with ProcessPoolExecutor(workers, get_context("fork"), initializer=_set_worker_state, initargs=known) as pool:
        slowest_first = sorted(modes, key=lambda mode: mode[2] != COMPILED)
        asked = {mode: pool.submit(_measure_in_worker, mode) for mode in slowest_first}

        def found() -> tuple[Saved, Saved]:
            for _ in as_completed(asked.values()):
                on_found()
            every = [(mode, *item) for mode in modes for item in asked[mode].result().items()]
            beside = {key.replace(_BESIDE, "adapter"): six for mode, key, six in every if mode[1] == _BESIDE}
            return {key: six for mode, key, six in every if mode[1] != _BESIDE}, beside

        yield found


def _modes(ways: Sequence[str], *, compiles: bool) -> list[tuple[str, str, str]]:
    """The modes of some of `ALL_WAYS`; dropout changes compiled layers only (`plan.memory.kept` adds it to others)."""
    plain = {way.replace("dropout", "adapter") for way in ways}
    return [
        mode
        for mode in _MODES
        if (compiles and "/".join(mode[:2]) in ways if mode[2] == COMPILED else "/".join(mode[:2]) in plain)
    ]


def _set_worker_state(*known: Any) -> None:
    """Store in a worker what all modes share: inherited through fork, since not every config can be pickled.

    A worker that waits for a mode would not notice that its parent was killed, so it calls `die_with_parent`.
    """
    die_with_parent()
    _known.extend(known)


def _measure_in_worker(mode: tuple[str, str, str]) -> dict[str, list[int]]:
    config, kinds, places, options, has_experts = _known
    return _measure(config, kinds, places, mode, options, has_experts=has_experts)


def varlen_kernels(config: Any, layers: nn.ModuleList, options: dict[str, Any]) -> list[Attention]:
    """Tunebook's own kernels, which take document boundaries, as far as a training pass can use them.

    There are none if it asks more of its kernel than they compute. A model that does not get its kernel from
    AttentionInterface silently uses its own.
    """
    mode = ("bf16", "full", VARLEN)
    asked: list[bool] = []
    try:
        with quiet(on_call=asked.append), FakeTensorMode(allow_non_fake_inputs=True), _autocast(mode):
            model = _build(config, traced_places(config, kinds_of(config, layers), options), mode, options, [])
            with _state_kernels(model, mode):
                model.base_model(**_row(LENGTHS[0], has_lengths=True), use_cache=False)
    except _MACHINES:
        raise
    except Exception:  # needs other arguments, or does not accept document boundaries
        return []
    if any(asked):
        return [WITH_SINKS]
    return [kernel for kernel, facts in ATTENTIONS.items() if facts.needs_lengths] if asked else []


def _measure(
    config: Any,
    kinds: list[tuple[Any, ...]],
    places: list[int],
    mode: tuple[str, str, str],
    options: dict[str, Any],
    *,
    has_experts: bool = False,
) -> dict[str, list[int]]:
    """Six numbers by key: of what is kept, and for some keys of what offloading leaves and of what tiled MLPs leave.

    For compiled layers, the second are of what selective checkpointing keeps.

    Empty if the mode fails to run.
    """
    receivers = list[Receiver]()
    try:
        # Adapters reach stacked experts only if PEFT can adapt them (`has_experts`) and the method says so. Compiled
        # layers keep the fallback: in place of it, the partitioner would recompute a product that computes nothing.
        is_frozen = mode[1] == _BESIDE or (mode[1] == "adapter" and not has_experts and mode[2] != COMPILED)
        with quiet(has_frozen_experts=is_frozen), FakeTensorMode(allow_non_fake_inputs=True):
            model = _build(config, places, mode, options, receivers)
            # Compiled layers attend without a mask or scores, so they keep bytes per token only: two lengths tell.
            lengths = LENGTHS[:2] if mode[2] == COMPILED else LENGTHS
            with _state_kernels(model, mode):
                found = [_saved_by_layer(model, len(places), length, mode, receivers) for length in lengths]
    except _MACHINES:
        raise
    except Exception:  # unsupported attention, or an operation without a fake kernel
        return {}
    number_format, method, kernels = mode
    others = (SELECTIVE,) if kernels == COMPILED else (f"{kernels}/{OFFLOADED}", f"{kernels}/{TILED}")
    return {
        f"{number_format}/{method}/{name}": _six_numbers(kinds, places, numbers)
        for name, numbers in zip((kernels, *others), zip(*found, strict=True), strict=False)
    }


def _six_numbers(kinds: list[tuple[Any, ...]], places: list[int], found: Sequence[list[float]]) -> list[int]:
    """Fit all layers and the largest layer to the bytes of each traced layer at the three lengths."""
    by_kind = {kinds[place]: [bytes_[number] for bytes_ in found] for number, place in enumerate(places)}
    mean = [sum(bytes_) / len(places) for bytes_ in found]
    curves = [_curve(by_kind.get(kind, mean)) for kind in kinds]
    largest = max(curves, key=lambda curve: curve[0] + curve[1] * 4096 + curve[2] * 4096**2)
    return [round(number) for number in (*map(sum, zip(*curves, strict=True)), *largest)]


def _curve(found: list[float]) -> tuple[float, float, float]:
    """The parabola through the bytes at three lengths, which are 1, 2 and 3 times the first; a line through two."""
    one, two, *more = found
    three = more[0] if more else 2 * two - one
    step = LENGTHS[0]
    squared = (three - 2 * two + one) / (2 * step**2)
    per_token = (two - one) / step - 3 * step * squared
    return one - per_token * step - squared * step**2, per_token, squared


@contextlib.contextmanager
def quiet(
    on_call: Callable[[bool], None] = lambda has_sinks: None, *, has_frozen_experts: bool = False
) -> Iterator[None]:
    """Suppress warnings, and use an expert product that has a fake kernel in every number format."""
    register_kernels(on_call)
    instead: dict[str, Any] = {"_can_use_grouped_mm": lambda *_: False}  # the fallback keeps as much of trained experts
    if has_frozen_experts:
        instead["_grouped_mm"] = grouped_product
    before = {name: getattr(moe, name) for name in instead if hasattr(moe, name)}
    for name in before:
        setattr(moe, name, instead[name])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, product in before.items():
            setattr(moe, name, product)


def _build(
    config: Any, places: list[int], mode: tuple[str, str, str], options: dict[str, Any], receivers: list[Receiver]
) -> Any:
    """A model of these layers. Compiled ones give the receivers what they would keep with selective checkpointing."""
    number_format, method, kernels = mode
    shorter = shortened(config, places)
    loader: Any = AutoModelForCausalLM
    attention = ATTENTION.get(kernels, VARLEN)
    with no_init_weights():  # some initializers fail on a tensor without memory
        model = loader.from_config(shorter, dtype=FORMATS[number_format][0], attn_implementation=attention, **options)
    if method != "full":
        names = names_beside_experts(model) if method == _BESIDE else names_to_adapt(model)
        model = adapted(model, rank=LORA_RANK, dropout=_DROPOUT if method == "dropout" else 0.0, names=names)
        if number_format == "cast":
            _cast_trained(model)
    if kernels == COMPILED:
        compile_layers(decoder_layers(text_decoder(_causal(model)), len(places)), receivers=receivers)
    return model.train()


@contextlib.contextmanager
def _state_kernels(model: Any, mode: tuple[str, str, str]) -> Iterator[None]:
    """Stand-ins for fla-core's kernels, which compute in 16 bits; in fp32 PyTorch computes the states."""

    def stand_in(each: StateFunction) -> Callable[..., Any] | None:
        if mode[0] == "fp32":
            return None
        if each.kernel in (MAMBA_SCAN, MAMBA_FUSED):
            return mamba_in_steps(linear_attention, each)
        return gated_delta_rule if each.kernel == GATED_DELTA_RULE else None

    put_back = replace_functions(model, stand_in)
    try:
        yield
    finally:
        put_back()


def _cast_trained(model: Any) -> None:
    """Cast adapters to bf16, as FSDP gathers them over bf16 weights and DeepSpeed casts them.

    PEFT creates them in fp32.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)


def _causal(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def adapted(
    model: Any, *, rank: int, dropout: float = 0.0, unreached: Collection[str] = (), names: Collection[str] = ()
) -> Any:
    """Return the model with LoRA on every linear layer or the named ones, except those that no text reaches.

    Module moves are disabled because a tensor without memory cannot be swapped.
    """
    lora = LoraConfig(
        r=rank,
        target_modules=list(names) or "all-linear",
        exclude_modules=expression(unreached) if unreached else None,
        lora_dropout=dropout,
        task_type="CAUSAL_LM",
    )
    module: Any = nn.Module
    moving = module.to
    module.to = lambda self, *_, **__: self
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrapped: Any = get_peft_model(model, lora)
            wrapped.enable_input_require_grads()
    finally:
        module.to = moving
    return wrapped


def _saved_by_layer(
    model: Any, prefix: int, length: int, mode: tuple[str, str, str], receivers: list[Receiver]
) -> tuple[list[float], list[float], list[float]]:
    """Return saved bytes by layer, those of them that offloading leaves on the device, and those with tiled MLPs.

    For compiled layers, the second are the bytes saved with selective checkpointing. Tiled MLPs save their inputs only.
    A storage counts toward the layer that saves it first. Weights are left out, and so are their copies, which are
    recognized by shape.
    """
    decoder = text_decoder(_causal(model))
    of_weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    sides = {tuple(parameter.shape) for parameter in model.parameters()}
    sides |= {tuple(reversed(shape)) for shape in sides}
    now: list[int | None] = [None]
    saved: dict[int, tuple[int | None, int]] = {}
    selective: dict[int, tuple[int | None, int]] = {}
    tiled: dict[int, tuple[int | None, int]] = {}
    is_in_mlp = [False]
    offloading = Offloading(of_weights)
    kept_alive = []  # prevents reuse of a storage's address

    def note(tensor: Any, found: dict[int, tuple[int | None, int]]) -> None:
        storage = tensor.untyped_storage()
        kept_alive.append(storage)
        if storage._cdata not in of_weights and tuple(tensor.shape) not in sides:
            found.setdefault(storage._cdata, (now[0], storage.nbytes()))

    def keep(tensor: Any) -> Any:
        note(tensor, saved)
        if not is_in_mlp[0]:
            note(tensor, tiled)
        offloading.save(tensor)
        return tensor

    def enter_mlp(_: Any, inputs: tuple[Any, ...]) -> None:
        note(inputs[0], tiled)
        is_in_mlp[0] = True

    for place, layer in enumerate(decoder_layers(decoder, prefix)):
        layer.register_forward_pre_hook(lambda *_, place=place: now.__setitem__(0, place))
        layer.register_forward_hook(lambda *_: now.__setitem__(0, None))
        for mlp in mlps_of(layer) if mode[2] != COMPILED else ():
            mlp.register_forward_pre_hook(enter_mlp)
            mlp.register_forward_hook(lambda *_: is_in_mlp.__setitem__(0, False))
    receivers[:] = [lambda tensor: note(tensor, selective)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), _autocast(mode):
        decoder(**_row(length, has_lengths=mode[2] == COMPILED), use_cache=False)
    left = {storage: found for storage, found in saved.items() if storage in offloading.left}
    second = selective if mode[2] == COMPILED else left
    return _by_layer(saved, prefix), _by_layer(second, prefix), _by_layer(tiled, prefix)


def _by_layer(found: dict[int, tuple[int | None, int]], prefix: int) -> list[float]:
    return [float(sum(size for where, size in found.values() if where == place)) for place in range(prefix)]


@contextlib.contextmanager
def _autocast(mode: tuple[str, str, str]) -> Iterator[None]:
    """Autocast as on a GPU; the norms of compiled layers compute in fp32 anyway."""
    like_cuda = contextlib.nullcontext() if mode[2] == COMPILED else CudaAutocast()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=FORMATS[mode[0]][1]), like_cuda:
        yield


def _row(length: int, *, has_lengths: bool) -> dict[str, Any]:
    """Build one row of two documents."""
    parts = (length // 2, length - length // 2)
    positions = torch.cat([torch.arange(part) for part in parts])[None]
    row = {"input_ids": torch.zeros(1, length, dtype=torch.long), "position_ids": positions}
    ends = {"cu_seq_lens_q": torch.tensor([0, parts[0], length], dtype=torch.int32), "max_length_q": max(parts)}
    return row | ends if has_lengths else row


class Offloading:
    """Determine which tensors of one pass TRL's activation offloading leaves on the GPU, without moving anything.

    Follows `OffloadActivations` of trl 1.16 (models/activation_offloading.py): a storage that is saved again during an
    earlier copy is not copied twice, and stays. The caller keeps storages alive.
    """

    def __init__(self, of_weights: Set[int]) -> None:
        """`of_weights`: storages of parameters, which are never moved."""
        self.left: set[int] = set()  # storages that stay on the device
        self._of_weights = of_weights
        self._number = 0
        self._being_copied: dict[int, tuple[Any, ...]] = {}  # by the number of the save
        self._newest: dict[tuple[Any, ...], int] = {}  # by tensor key

    def save(self, tensor: Any) -> None:
        """Record that autograd saves a tensor."""
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
        self._being_copied[self._number] = key
        self._newest[key] = self._number

    def _let_go(self) -> None:
        """Release the tensors whose copies have finished."""
        for number in [each for each in self._being_copied if each <= self._number - _MOST_BEING_COPIED]:
            key = self._being_copied.pop(number)
            if self._newest.get(key) == number:
                del self._newest[key]
