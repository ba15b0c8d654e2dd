"""Build a model without memory for its weights, and answer what planning asks of it.

Parameters are counted on PyTorch's meta device. One pass over a row of two documents on FakeTensors shows which
parameters text reaches, and whether a kernel that gets the boundaries of documents can stand for the model's attention.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tunebook.config.choices import Attention
from tunebook.config.model_facts import LayerFacts, ModelFacts
from tunebook.config.unreached import as_patterns
from tunebook.errors import RequestError, nearest
from tunebook.facts.architectures import CHOSEN_EXPERTS
from tunebook.facts.attention import ATTENTIONS, FLEX, LARGEST_FLASH_HEAD, MASKED, WITH_SINKS, WITHOUT_KERNEL
from tunebook.model.base_config import broken_config, kind_without_causal_class
from tunebook.model.linear_attention import isolate_documents
from tunebook.model.load import architecture_from_facts, largest
from tunebook.plan.architecture.layers import decoder_layers, quiet, text_decoder
from tunebook.plan.architecture.packing import packing_facts
from tunebook.plan.architecture.targets import adapters_of, has_stacked_experts, is_linear
from tunebook.train.packages import installed_version

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"  # transformers' layer types
_WINDOWED = (_SLIDING, "chunked_attention", "hybrid_sliding")
_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_LONGEST = 2**20  # tokens, if an architecture has no highest position
_TOKENS = 64  # of the row
_MIN_SIMILARITY = 0.75  # with so many short names, a lower similarity is hardly a typo: bart for foobar
_MACHINE_ERRORS = (MemoryError, ImportError, OSError)  # they say nothing about the model
# Operations that only tensors with memory support.
_FAKE_TENSOR_ERRORS = (
    DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)  # fmt: skip


def describe_file(config_file: Path, *, trust_remote_code: bool) -> ModelFacts:
    """The facts of the model that a config.json describes.

    Raises: RequestError if transformers has no such causal language model, or cannot build it.
    """
    stated = json.loads(config_file.read_text(encoding="utf-8"))
    has_code = trust_remote_code and isinstance(stated.get("auto_map"), dict)
    if has_code:
        _refuse_absent_code(config_file, stated)
    elif stated.get("model_type") not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise _unknown(config_file, stated, trust_remote_code)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    folder = str(config_file.parent)
    return _described(
        lambda: AutoConfig.from_pretrained(folder, local_files_only=True, **options), options, str(config_file)
    )


def describe_stated(facts: ModelFacts) -> ModelFacts:
    """The facts of a model with stated sizes. Raises: RequestError if transformers cannot build it."""
    return _described(lambda: architecture_from_facts(facts), {}, "model.facts")


def _described(make_config: Callable[[], Any], options: dict[str, Any], place: str) -> ModelFacts:
    try:
        with quiet():
            return _facts(make_config(), options)
    except (RequestError, MemoryError):
        raise
    except Exception as error:  # of any type: architectures check their sizes in various ways, or not at all
        text = " ".join(str(error).split())[:300]
        raise broken_config(
            f"{place}: no model can be built with these sizes ({type(error).__name__}: {text}); correct them, or "
            "download or copy the model again"
        ) from error


def _unknown(config_file: Path, stated: dict[str, Any], trust_remote_code: bool) -> RequestError:
    """The error for a file that names no causal language model of transformers, with a suggestion if there is one."""
    kind, architectures = str(stated.get("model_type") or ""), stated.get("architectures")
    named = f"model_type={kind}" + (f", architectures={json.dumps(architectures)}" if architectures else "")
    if other := kind_without_causal_class(kind):
        return RequestError(
            f"{config_file}: {named} is {other}, which is not trained here; name a causal language model, one that "
            "only continues a text",
            problem_id="model-not-causal",
        )
    meant = nearest(kind, {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}, least_alike=_MIN_SIMILARITY) if kind else None
    return RequestError(
        f"{config_file}: transformers {installed_version('transformers')} has no causal language model of this "
        f"architecture: {named}; correct model_type in the file"
        + (f" (did you mean '{meant}'?)" if meant else "")
        + ", or use a newer transformers"
        + ("" if trust_remote_code else ", or set model.trust_remote_code=true where the model brings its own code"),
        problem_id="unknown-architecture",
    )


def _refuse_absent_code(config_file: Path, stated: dict[str, Any]) -> None:
    """Raise RequestError if files of the model's own code are missing next to its config.json."""
    named = [stated["auto_map"].get(each) for each in ("AutoConfig", "AutoModelForCausalLM")]
    places = [place for place in named if isinstance(place, str) and "--" not in place]  # "--": in another repository
    files = dict.fromkeys(f"{place.rpartition('.')[0]}.py" for place in places)
    absent = [file for file in files if not (config_file.parent / file).is_file()]
    if absent:
        raise broken_config(
            f"{config_file}: auto_map names code of the model's own that is not in this folder: {', '.join(absent)}; "
            "copy it there, or download the whole model, or set model.trust_remote_code=false if transformers has a "
            "model of this kind itself"
        )


def _build(config: Any, options: dict[str, Any], **more: Any) -> Any:
    loader: Any = AutoModelForCausalLM
    with no_init_weights():  # some initializers fail on a tensor without memory
        model = loader.from_config(copy.deepcopy(config), **options, **more)
    model.tie_weights()
    return model


def _facts(config: Any, options: dict[str, Any]) -> ModelFacts:
    """The facts of a model, within `quiet`."""
    text = config.get_text_config(decoder=True)
    text.allow_global_per_layer_attribute_access = True  # layers say what theirs are
    with torch.device("meta"):
        model = _build(config, options)
    words, head = model.get_input_embeddings(), model.get_output_embeddings()
    if words is None or head is None:
        raise RequestError(
            f"{type(model).__name__} has no output head over its words; name a causal language model",
            problem_id="unknown-architecture",
        )
    layers = decoder_layers(text_decoder(model), text.num_hidden_layers)
    unreached, by_lengths = _pass(config, options)
    head_sizes = [_whole(module, "qk_head_dim", "head_dim") or 0 for module in layers.modules()]
    attention = [
        kernel.name
        for kernel in (*attention_of(model), *by_lengths)
        if not ATTENTIONS[kernel].is_flash or max(head_sizes) <= LARGEST_FLASH_HEAD
    ]
    heads = _whole(text, "num_attention_heads") or 1  # Mamba and RWKV have none
    hidden = _whole(text, "hidden_size") or words.weight.shape[1]
    inner = (largest(getattr(text, name, None)) for name in ("intermediate_size", "n_inner", "ffn_dim"))
    patterns = as_patterns(unreached, [name for name, _ in model.named_parameters()])
    return ModelFacts(
        architecture=type(model).__name__,  # the loaded class; the file may name one with a vision tower
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),  # tied ones count once
        num_layers=len(layers),
        hidden_size=hidden,
        intermediate_size=next(filter(None, inner), 4 * hidden),
        num_attention_heads=heads,
        num_key_value_heads=_whole(text, "num_key_value_heads") or heads,
        vocab_size=words.weight.shape[0],
        max_position_embeddings=_whole(text, "max_position_embeddings") or _LONGEST,
        tie_word_embeddings=head.weight is words.weight,
        dtype=_dtype(config, text),
        unreached=patterns,
        measured=LayerFacts(
            attention=attention,
            **_counted(model, layers, text, unreached),
            **packing_facts(type(model).__name__, config, has_experts=has_stacked_experts(model)),
            **adapters_of(model, patterns),
        ),
    )


def _counted(model: Any, layers: nn.ModuleList, text: Any, unreached: set[str]) -> dict[str, Any]:
    """The numbers of parameters in parts of a model, and how wide its layers attend."""
    chosen = _whole(text, *CHOSEN_EXPERTS) or 0
    experts = _expert_parameters(layers, chosen)
    in_layers = sum(parameter.numel() for parameter in layers.parameters())
    words = model.get_input_embeddings().weight
    embeddings = {each.weight for each in model.modules() if isinstance(each, nn.Embedding)} - {words}
    named = list(model.named_parameters())
    linear: list[Any] = [module for module in layers.modules() if is_linear(module)]
    return {
        "num_layers": len(layers),
        "parameters": in_layers,
        "linear_parameters": sum(module.weight.numel() for module in linear),
        "active_parameters": in_layers - sum(each.numel() * (len(each) - chosen) // len(each) for each in experts),
        "largest_parameter": max(parameter.numel() for _, parameter in named),
        "unreached_parameters": sum(each.numel() for name, each in named if name in unreached),
        "looked_up_parameters": sum(
            each.numel() for name, each in named if each in embeddings and name not in unreached
        ),
        "experts_per_token": chosen if experts else 0,
        **_attention_widths(layers, text),
    }


def _expert_parameters(layers: nn.ModuleList, chosen: int) -> list[nn.Parameter]:
    """Parameters that hold one matrix or bias for each expert; none unless a router chooses fewer than all.

    transformers 5 keeps all experts of a layer in one tensor, and their biases in another of the same module.
    """
    found: list[nn.Parameter] = []
    for module in layers.modules() if chosen else ():
        own = list(module.parameters(recurse=False))
        numbers = {len(parameter) for parameter in own if parameter.dim() == 3}
        found += [each for each in own if each.dim() > 1 and len(each) in numbers and len(each) > chosen]
    return found


def _attention_widths(layers: nn.ModuleList, text: Any) -> dict[str, int]:
    """Heads x head size of all layers that attend to the whole document, and of those that attend to a window."""
    window = _whole(text, "sliding_window", "attention_chunk_size")
    kinds = getattr(text, "layer_types", None) or [_SLIDING if window else _FULL] * len(layers)
    widths = {_FULL: 0.0, _SLIDING: 0.0}
    for kind, layer in zip(kinds, layers, strict=False):
        # Others compare no token with all others: recurrent layers and convolutions. Hybrid layers also attend.
        if kind == _LINEAR or not (str(kind).endswith("attention") or str(kind).startswith("hybrid")):
            continue
        is_windowed = window is not None and kind in _WINDOWED
        width = (_whole(text, "num_attention_heads") or 0) * _head_size(layer, text)
        widths[_SLIDING if is_windowed else _FULL] += width
    widest = {"attention_width": round(widths[_FULL]), "sliding_width": round(widths[_SLIDING])}
    return widest | {"sliding_window": window if window and widths[_SLIDING] else 0}


def _head_size(layer: nn.Module, text: Any) -> float:
    """Mean size of a head's query and value in a layer."""
    for module in layer.modules():
        query, value = (_whole(module, name) for name in ("qk_head_dim", "v_head_dim"))
        if query and value:  # latent attention
            return (query + value) / 2
        own = _whole(module, "head_dim")
        if own and not hasattr(module, "A_log"):  # Mamba's heads have a size, too
            return own
    heads, hidden = _whole(text, "num_attention_heads"), _whole(text, "hidden_size")
    return _whole(text, "head_dim") or (hidden / heads if hidden and heads else 0)


def attention_of(model: Any) -> list[Attention]:
    """transformers' own attention kernels that it supports for a model's architecture, on any machine."""
    found = [WITHOUT_KERNEL]
    found += [MASKED] if model._supports_sdpa else []
    found += [FLEX] if model._supports_flex_attn else []
    only = getattr(model, "_compatible_flash_implementations", None)  # None: any
    if model._supports_flash_attn:
        flash = [kernel for kernel, facts in ATTENTIONS.items() if facts.is_flash and not facts.needs_lengths]
        found += [kernel for kernel in flash if only is None or kernel.value in only]
    return found


def _dtype(*configs: Any) -> str:
    """Dtype of the published weights, from the first config that states one."""
    stated = (getattr(config, "dtype", None) for config in configs)
    return next((_DTYPES[dtype] for dtype in stated if dtype in _DTYPES), "float32")


def _whole(config: Any, *names: str) -> int | None:
    """The first of these names with a single positive integer; some architectures have a list of one per layer."""
    values = (getattr(config, name, None) for name in names)
    return next((int(value) for value in values if isinstance(value, int) and value > 0), None)


# The pass

_NOTING = "tunebook_noting"


def _pass(config: Any, options: dict[str, Any]) -> tuple[set[str], list[Attention]]:
    """The parameters that get no gradient from a row of words, and Tunebook's own kernels that the model can use.

    Those get the boundaries of documents. There are none if the model asks more of its kernel than they compute, or
    does not get its kernel from AttentionInterface. No parameters if the pass needs a value from a tensor without
    memory, so that the answer is unknown.
    """
    calls: list[dict[str, Any]] = []

    def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **asked: Any) -> tuple[Any, None]:
        calls.append(asked)
        groups = query.shape[1] // value.shape[1]
        sinks = 0 if asked.get("s_aux") is None else asked["s_aux"].sum()
        return value.repeat_interleave(groups, dim=1).transpose(1, 2) + query.sum() + key.sum() + sinks, None

    AttentionInterface.register(_NOTING, attend)
    AttentionMaskInterface.register(_NOTING, lambda *_, **__: None)
    half = _TOKENS // 2
    ends = torch.tensor([0, half, _TOKENS], dtype=torch.int32)
    try:
        return _unreached(config, options, _NOTING, cu_seq_lens_q=ends, max_length_q=half), _by_lengths(calls)
    except _MACHINE_ERRORS:
        raise
    except Exception:  # it takes no boundaries, or its attention is of another form
        pass
    try:
        return _unreached(config, options, WITHOUT_KERNEL.name), []
    except _FAKE_TENSOR_ERRORS:
        return set(), []


def _by_lengths(calls: list[dict[str, Any]]) -> list[Attention]:
    asks_more = any(each.get("dropout") or each.get("softcap") is not None for each in calls)
    if not calls or asks_more or any("cu_seq_lens_q" not in each for each in calls):
        return []
    if any(each.get("s_aux") is not None for each in calls):
        return [WITH_SINKS]
    return [kernel for kernel, facts in ATTENTIONS.items() if facts.needs_lengths]


def _unreached(config: Any, options: dict[str, Any], attention: str, **row: Any) -> set[str]:
    with torch.device("meta"):  # fake tensors cannot change their format, as some initializers ask
        model = _build(config, options, attn_implementation=attention)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        model.tie_weights()
        words = torch.zeros(1, _TOKENS, dtype=torch.long)
        put_back = isolate_documents(model, is_on_cpu=True)  # no kernels of other packages
        try:
            output = model.train()(input_ids=words, use_cache=False, **row)
        finally:
            put_back()
    last = getattr(getattr(output, "logits", None), "grad_fn", None)
    if last is None:  # architecture with its own code
        return set()
    reached = _leaves(last)
    return {name for name, parameter in model.named_parameters() if id(parameter) not in reached}


def _leaves(last: Any) -> set[int]:
    """The ids of the parameters that autograd reaches backward from an operation."""
    seen, found, open_ = {None}, set(), [last]
    while open_:
        node = open_.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        open_.extend(before for before, _ in node.next_functions)
    return found
