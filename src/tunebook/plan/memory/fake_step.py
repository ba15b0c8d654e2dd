"""Activations of a training step, by running it: a few real layers on tensors without memory, counting live storages.

transformers builds the layers, PEFT adapts them, torch checkpoints and compiles them, as in the run. Forward pass,
output head and backward pass run on PyTorch's FakeTensors, and a dispatch mode counts the bytes of the storages that
are alive. Marks cut the step into segments: the forward pass of each layer, the head, the backward pass of each layer.
A segment of a layer starts with what the layers before it left, so the segments of a few layers put together give the
step of all layers (`step_of_all_layers`). `tracker` counts, `compiled` runs compiled layers, and `stand_ins` has what a
CPU lacks or does otherwise.

Fake tensors are on "cpu": on "cuda" they abort a CPU-only torch in autograd.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from peft import get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import _engine_run_backward  # Tensor.backward would leave CudaFunctions during recomputation
from torch.utils.flop_counter import FlopCounterMode
from transformers.initialization import no_init_weights

from tunebook.config.schema import RunConfig
from tunebook.errors import RequestError
from tunebook.facts.compiling import keeping_compiler_settings, set_up_compiler
from tunebook.model.adapted_products import share_inputs
from tunebook.model.adapters import adapter_config, freeze_parts, require_known_modules, see_without_gradients
from tunebook.model.blocks import block_forward, compile_layers
from tunebook.model.fp8 import convert_frozen_to_fp8, layers_for_fp8
from tunebook.model.load import auto_class
from tunebook.model.offloading import offload_activations
from tunebook.model.parameters import last_name
from tunebook.model.tiled_mlp import tile_mlps
from tunebook.plan.architecture.layers import decoder_layers, kinds_of, shortened, text_decoder
from tunebook.plan.memory import stand_ins
from tunebook.plan.memory.activations import Activations, Bytes, Mode
from tunebook.plan.memory.compiled import TracedLayers
from tunebook.plan.memory.ledger import Moment, page_locked
from tunebook.plan.memory.stand_ins import BF16
from tunebook.plan.memory.tower import KnownNumbers, Pixels, attend_in_tower, without_memory
from tunebook.plan.memory.tracker import TRACKERS, Segment, Tracker

MOST_LAYERS = 12  # that are run


class _FakeCopies:
    """Copies to page-locked memory, of which only the size is counted."""

    def to_host(self, tensors: list[torch.Tensor]) -> tuple[list[Any], None]:
        for tensor in tensors:
            for tracker in TRACKERS:
                tracker.offloaded += page_locked(tensor.nbytes)
        return [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors], None

    def to_gpu(self, copies: list[Any]) -> tuple[list[torch.Tensor], None]:
        return [torch.empty_strided(shape, stride, dtype=dtype) for shape, stride, dtype in copies], None

    def wait(self, event: None) -> None:
        """Nothing is under way."""


_NUMBERS = itertools.count()  # of steps in this process


# The step


class FakeStep:
    """A step of a few layers of a model. Building and compiling takes seconds; each `run` then a fraction of one.

    `run` takes modes that differ in `RUN_TIME` fields only.
    """

    def __init__(self, config: RunConfig, architecture: Any, mode: Mode) -> None:
        self._mode = mode
        # The second layer releases the first one's input, which the model's forward pass holds, so it frees nothing.
        # Layers into which a tower's own layers feed (Qwen3-VL) are the first ones.
        fed = len(getattr(getattr(architecture, "vision_config", None), "deepstack_visual_indexes", ()))
        self._kinds, self._places = _kinds_and_places(architecture, num_first=max(fed, 2 if mode.offloaded else 1))
        self._is_compiled, self._traced = False, TracedLayers()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._waiting: list[Any] = []  # parameters whose gradients are taken when the next segment begins
        with warnings.catch_warnings(action="ignore"), keeping_compiler_settings(), self._fake:
            self._build(config, shortened(architecture, self._places))

    def _build(self, config: RunConfig, architecture: Any) -> None:
        mode = self._mode
        loader = auto_class(architecture)
        self._register()
        options = {"dtype": getattr(torch, mode.weights), "trust_remote_code": config.model.trust_remote_code}
        with no_init_weights():  # some initializers fail on a tensor without memory
            try:
                stated = copy.deepcopy(architecture)
                causal: Any = loader.from_config(stated, attn_implementation=mode.attention, **options)
            except (KeyError, ValueError):  # attends by classes of its own, such as Falcon
                causal = loader.from_config(architecture, **options)
        causal.tie_weights()
        self._causal, self._decoder = causal, text_decoder(causal)
        self._layers = decoder_layers(self._decoder, len(self._places))
        attend_in_tower(causal, self._decoder)
        freeze_parts(config, causal)
        if mode.quantized and not mode.compiled:
            head = causal.get_output_embeddings()
            linear: list[Any] = [each for each in self._layers.modules() if isinstance(each, nn.Linear)]
            for module in linear:
                if module is not head:
                    module.forward = stand_ins.four_bit_forward.__get__(module)
        lora = adapter_config(config)
        if lora is not None:
            if config.peft.target_modules:  # of one layer: the layers here have other numbers
                lora.target_modules = [*{last_name(name) for name in config.peft.target_modules}]
            _adapt(causal, lora, mode)
            require_known_modules(config, causal)
            if mode.compiled:
                share_inputs(causal)
                if mode.quantized:
                    stand_ins.quantize(self._layers)
        see_without_gradients(config, causal)
        if mode.liger:
            stand_ins.use_liger(self._decoder)
        if mode.tile_tokens is not None:
            tile_mlps(causal, mode.tile_tokens)
        causal.train()
        if mode.recomputed:
            causal.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        self._hook()
        if mode.fp8 and lora is not None:
            convert_frozen_to_fp8(causal)
        elif mode.fp8:
            scaling = config.precision.fp8_scaling
            for name in layers_for_fp8(causal, scaling):
                layer: Any = causal.get_submodule(name)
                layer.forward = stand_ins.fp8_forward.__get__(layer)
        if mode.compiled:
            # torch takes compiled code by the code that it was compiled from, and remembers sizes that differed by its
            # name. Steps of other modes and models must share neither.
            code = block_forward.__code__.replace(co_name=f"fake_block_{next(_NUMBERS)}")
            for block in self._layers:
                block.forward = MethodType(FunctionType(code, block_forward.__globals__), block)
            compile_layers(causal, memory_budget=mode.memory_budget, backend=self._traced)
        if mode.offloaded:
            offload_activations(self._layers, _FakeCopies())

    def _register(self) -> None:
        mode = self._mode
        stand_ins.register_attention(
            repeats_heads=mode.repeats_heads, keeps_documents=mode.keeps_documents, group_size=mode.group_size
        )

    def run_tower(self, pixels: Pixels) -> tuple[int, float]:
        """Tokens that the language model reads for these images, and the FLOPs of the forward pass that makes them."""
        counter = FlopCounterMode(display=False)
        with (
            warnings.catch_warnings(action="ignore"),
            self._fake,
            counter,
            KnownNumbers(),
            torch.no_grad(),
            torch.autocast("cpu", BF16, enabled=self._mode.autocast),
        ):
            found = self._causal.base_model.get_image_features(**without_memory(pixels)).pooler_output
        features = [found] if isinstance(found, torch.Tensor) else found
        return sum(each.numel() // each.shape[-1] for each in features), float(counter.get_total_flops())

    def run(
        self, mode: Mode, rows: int, tokens: int, pixels: Pixels | None = None, num_image_tokens: int = 0
    ) -> Activations:
        """A step with so many rows of so many tokens on one rank. `pixels`: the model's inputs for the images in them.

        `num_image_tokens`: of the tokens.
        """
        self._mode = mode
        self._register()
        text = self._segments(rows, tokens, {}, 0)
        if not pixels:
            return step_of_all_layers(text, self._places, self._kinds)
        segments = self._segments(rows, tokens, pixels, num_image_tokens)
        found = step_of_all_layers(segments, self._places, self._kinds, text["uncached"])
        if segments["begin"].peak.live > found.at[Moment.forward].live:
            found.at[Moment.forward] = segments["begin"].peak
        return found

    def _segments(self, rows: int, tokens: int, pixels: Pixels, num_image_tokens: int) -> dict[str, Segment]:
        """Run a step and count it."""
        mode = self._mode
        put_back = stand_ins.replace_state_kernels(self._causal)
        try:
            with (
                warnings.catch_warnings(action="ignore"),
                keeping_compiler_settings(),
                self._fake,
                stand_ins.products(zero3_linear=mode.zero3_linear),
            ):
                set_up_compiler(mode.memory_budget)
                self._traced.cut(mode.memory_budget)
                if mode.compiled and not self._is_compiled:
                    self._step(rows, tokens, None, {}, 0)  # compiles both graphs, uncounted
                    self._causal.zero_grad()
                    self._is_compiled = True
                tracker = Tracker({_storage(each) for each in (*self._causal.parameters(), *self._earlier_gradients())})
                TRACKERS[:] = [tracker]
                with tracker:
                    self._step(rows, tokens, tracker, pixels, num_image_tokens)
                return tracker.segments()
        finally:
            TRACKERS.clear()
            self._causal.zero_grad()
            put_back()

    def _earlier_gradients(self) -> list[torch.Tensor]:
        """Make the gradients of earlier passes, which this one is added to. The ledger counts them."""
        if self._mode.accumulates:
            for parameter in self._causal.parameters():
                parameter.grad = torch.empty_like(parameter).detach() if parameter.requires_grad else None
        return [each.grad for each in self._causal.parameters() if each.grad is not None]

    def _step(self, rows: int, tokens: int, tracker: Tracker | None, pixels: Pixels, num_image_tokens: int) -> None:
        mode, causal = self._mode, self._causal
        trained = [each for each in causal.parameters() if each.requires_grad]
        inputs = {"input_ids": torch.zeros(rows, tokens, dtype=torch.long), "use_cache": False}
        inputs["position_ids"] = torch.arange(tokens).expand(rows, tokens)
        if pixels:
            inputs |= without_memory(pixels) | self._ids(rows, tokens, num_image_tokens)
        functions = contextlib.nullcontext() if mode.compiled else stand_ins.CudaFunctions()
        with self._taking_gradients(trained, tracker), functions:
            with torch.autocast("cpu", BF16, enabled=mode.autocast):
                hidden = self._see(inputs) if pixels else self._decoder(**inputs).last_hidden_state
                places = torch.zeros(rows * tokens - 1, dtype=torch.long)  # of the trained tokens
                picked = hidden.flatten(0, 1).index_select(0, places)
                head: Any = stand_ins.Head
                loss = head.apply(picked, causal.get_output_embeddings().weight, mode.one_pass_head).sum()
                del hidden, picked
                if tracker is not None:
                    tracker.mark("uncached")
            if tracker is not None:
                tracker.in_backward = True
                tracker.mark("cast")
            if not loss.requires_grad:  # text, where nothing but a part for images is trained
                return
            gradient = (torch.empty_like(loss),)
            with KnownNumbers() if pixels else contextlib.nullcontext():  # a tower may be recomputed
                _engine_run_backward((loss,), gradient, False, False, (), allow_unreachable=True, accumulate_grad=True)

    def _ids(self, rows: int, tokens: int, num_image_tokens: int) -> dict[str, torch.Tensor]:
        """The tokens with values, so that the model finds those of images."""
        with unset_fake_temporarily():
            ids = torch.zeros(rows, tokens, dtype=torch.long)
            ids.view(-1)[:num_image_tokens] = self._causal.config.image_token_id
        takes_types = "token_type_ids" in inspect.signature(self._causal.base_model.forward).parameters
        return {"input_ids": ids} | ({"token_type_ids": torch.zeros(rows, tokens).long()} if takes_types else {})

    def _see(self, inputs: dict[str, Any]) -> torch.Tensor:
        """The last hidden state of tokens and images."""
        with KnownNumbers() as known:
            hook = self._decoder.register_forward_pre_hook(lambda *_: setattr(known, "is_in_tower", False))
            try:
                hidden: torch.Tensor = self._causal.base_model(**inputs).last_hidden_state
            finally:
                hook.remove()
        return hidden

    @contextlib.contextmanager
    def _taking_gradients(self, trained: list[Any], tracker: Tracker | None) -> Iterator[None]:
        """Free each gradient as it has come, or those of a layer once the next one's backward pass begins."""
        mode, waiting = self._mode, self._waiting

        def take(parameter: Any) -> None:
            if mode.gradients == "sent":
                parameter.grad = None
            elif mode.gradients == "unit":
                waiting.append(parameter)
            elif tracker is not None and not mode.accumulates:
                tracker.gradients += parameter.grad.nbytes

        handles = [each.register_post_accumulate_grad_hook(take) for each in trained]
        try:
            yield
        finally:
            waiting.clear()
            for handle in handles:
                handle.remove()

    def _mark(self, label: str) -> None:
        if label != f"b{len(self._places) - 1}":  # the head's gradient stays during the last layer's backward pass
            for parameter in self._waiting:
                parameter.grad = None
            self._waiting.clear()
        for tracker in TRACKERS:
            tracker.mark(label)

    def _hook(self) -> None:
        """Mark the segments where layers begin and end, and where gradients reach their outputs."""
        last = len(self._layers) - 1

        def before(place: int) -> Callable[..., None]:
            def hook(_: Any, args: Any, kwargs: Any) -> None:
                if _is_in_backward():
                    return
                self._mark(f"f{place}")
                hidden = args[0] if args else kwargs["hidden_states"]
                if place == 0 and hidden.requires_grad:
                    hidden.register_hook(lambda _: self._mark("e"))

            return hook

        def after(place: int) -> Callable[..., Any]:
            def hook(_: Any, __: Any, output: Any) -> Any:
                hidden = output[0] if isinstance(output, tuple) else output
                if self._mode.fp32_between_layers:
                    hidden = hidden.float()
                if not _is_in_backward():
                    if hidden.requires_grad and hidden.grad_fn is not None:
                        hidden.register_hook(lambda _: self._mark(f"b{place}"))
                    if place == last:
                        self._mark("head")
                return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

            return hook

        def from_unit(_: Any, __: Any, output: Any) -> Any:
            return output.float() if self._mode.fp32_between_layers else output

        self._causal.get_input_embeddings().register_forward_hook(from_unit)
        for place, layer in enumerate(self._layers):
            layer.register_forward_pre_hook(before(place), with_kwargs=True)
            layer.register_forward_hook(after(place))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_in_backward() -> bool:
    return bool(TRACKERS) and TRACKERS[0].in_backward


def _adapt(causal: Any, lora: Any, mode: Mode) -> None:
    """Put adapters into the model, as `train.build` and TRL do. Moves are off: tensors without memory have none."""
    module: Any = nn.Module
    moving = module.to
    module.to = lambda self, *_, **__: self
    try:
        adapted: Any = get_peft_model(causal, lora)
    except ValueError as error:
        text = f"PEFT cannot adapt this model: {error}; name other peft.target_modules or peft.target_parameters"
        raise RequestError(text, problem_id="adapter-not-possible") from error
    finally:
        module.to = moving
    if mode.recomputed:
        adapted.enable_input_require_grads()  # as TRL does
    else:
        causal.get_input_embeddings().register_forward_hook(lambda _, __, output: output.requires_grad_())
    for part in adapted.modules():
        if mode.quantized and hasattr(part, "lora_A"):
            part.cast_input_dtype_enabled = False  # peft 0.21, tuners/lora/bnb.py, under autocast
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, mode.adapters))


# From a few layers to all


def _kinds_and_places(architecture: Any, num_first: int = 1) -> tuple[list[Any], list[int]]:
    """The kind of every layer, and the layers to run: the first and the last, and one of each kind between them.

    A model whose layers' kinds follow from their places, so that a shortened model would have others, is run with its
    first layers.
    """
    kinds = _kinds(architecture)
    between = list(range(num_first, len(kinds) - 1))
    of_each = [next(place for place in between if kinds[place] == kind) for kind in dict.fromkeys(kinds[num_first:-1])]
    places = sorted({*range(min(num_first, len(kinds))), *of_each, len(kinds) - 1})
    if len(places) <= MOST_LAYERS and _kinds(shortened(architecture, places)) == [kinds[place] for place in places]:
        return kinds, places
    return kinds, list(range(min(len(kinds), MOST_LAYERS)))


def _kinds(architecture: Any) -> list[Any]:
    loader = auto_class(architecture)
    with warnings.catch_warnings(action="ignore"), torch.device("meta"):
        model = loader.from_config(copy.deepcopy(architecture), trust_remote_code=True)
    layers = decoder_layers(text_decoder(model), architecture.get_text_config(decoder=True).num_hidden_layers)
    return kinds_of(architecture, layers)


def step_of_all_layers(
    segments: dict[str, Segment], places: Sequence[int], kinds: Sequence[Any], uncached: Segment | None = None
) -> Activations:
    """The step of all layers, from the segments of a step of those at `places`.

    `kinds`: of all layers. A layer adds what the layer that stands for it added. `uncached`: that segment of a step
    without a tower for images, of which all layers run.
    """
    names = [_stand_in(place, places, kinds) for place in range(len(kinds))]
    now, offloaded = segments["f0"].start, 0.0
    found = {Moment.start: now}

    def go_through(label: str, moment: Moment) -> None:
        nonlocal now, offloaded
        segment = segments[label]
        peak = now + segment.peak - segment.start
        if moment not in found or peak.live > found[moment].live:
            found[moment] = peak
        now += segment.end - segment.start
        offloaded += segment.offloaded

    for name in names:
        go_through(f"f{name}", Moment.forward)
    found[Moment.gather] = now
    go_through("head", Moment.head)
    dropped = _added(segments["uncached"])  # autocast drops its copies of the weights of all layers
    in_layers = dropped if uncached is None else _added(uncached)
    now += Bytes(in_layers * len(kinds) / len(places) + (dropped - in_layers))
    go_through("cast", Moment.cast)
    found[Moment.reduce] = now
    for place in reversed(range(len(kinds))):
        moment = Moment.last if place == len(kinds) - 1 else Moment.first if place == 0 else Moment.middle
        if f"b{names[place]}" in segments:
            go_through(f"b{names[place]}", moment)
    found[Moment.end] = now
    if "e" in segments:
        go_through("e", Moment.end)
    found[Moment.sent] = now
    return Activations(at=found, offloaded=offloaded)


def _added(segment: Segment) -> float:
    return (segment.end - segment.start).live


def _stand_in(place: int, places: Sequence[int], kinds: Sequence[Any]) -> int:
    """The number in `places` of the layer that stands for one: itself, or the last of its kind between the ends."""
    if place in places:
        return places.index(place)
    of_kind = [number for number in range(len(places)) if kinds[places[number]] == kinds[place]]
    inner = [number for number in of_kind if 0 < number < len(places) - 1]
    return [len(places) // 2, *of_kind, *inner][-1]
