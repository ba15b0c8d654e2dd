"""Build a model without memory for its weights, and answer what planning asks of it.

One pass over a row of two documents on PyTorch's meta device shows which parameters text reaches, how wide the layers
attend, and whether a kernel that gets the boundaries of documents can stand for the model's attention.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, masking_utils
from transformers.initialization import no_init_weights

from tunebook.config.choices import Attention
from tunebook.config.model_facts import PROJECTORS, LayerFacts, ModelFacts, outermost_modules
from tunebook.errors import RequestError, did_you_mean
from tunebook.facts.architectures import CHOSEN_EXPERTS
from tunebook.facts.attention import ATTENTIONS, FLEX, LARGEST_FLASH_HEAD, MASKED, WITH_SINKS, WITHOUT_KERNEL
from tunebook.model.base_config import DTYPES, broken_config
from tunebook.model.linear_attention import isolate_documents, packages_for_packing
from tunebook.model.load import architecture_from_facts, auto_class, known_classes, largest
from tunebook.plan.architecture.layers import decoder_layers, quiet, text_decoder
from tunebook.plan.architecture.packing import isolation_of
from tunebook.plan.architecture.targets import adapters_of, is_linear
from tunebook.train.requirements import installed_version

_LONGEST = 2**20  # tokens, if an architecture has no highest position
_TOKENS = 64  # of the row
_NOTING = "tunebook_noting"  # the attention of the pass


def describe_file(config_file: Path, *, trust_remote_code: bool) -> ModelFacts:
    """The facts of the model that a config.json describes.

    Raises: RequestError if transformers has no such causal language model, or cannot build it.
    """
    stated = json.loads(config_file.read_text(encoding="utf-8"))
    kind = str(stated.get("model_type"))
    has_code = trust_remote_code and isinstance(stated.get("auto_map"), dict)
    kinds = {kind for kind, _ in known_classes()}
    if not has_code and kind not in kinds:
        raise RequestError(
            f"{config_file}: transformers {installed_version('transformers')} has no causal language model with "
            f"model_type={kind}; correct it in the file, use a newer transformers, or set model.trust_remote_code=true "
            f"if the model brings its own code.{did_you_mean(kind, kinds)}",
            problem_id="unknown-architecture",
        )
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
            f"{place}: no model can be built from this ({type(error).__name__}: {text}); correct it, or download or "
            "copy the model again"
        ) from error


def _facts(config: Any, options: dict[str, Any]) -> ModelFacts:
    """The facts of a model, within `quiet`."""
    text = config.get_text_config(decoder=True)
    dtype = _dtype(config, text)
    text.allow_global_per_layer_attribute_access = True  # layers say what theirs are
    model, unreached, calls = _pass(config, options)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    layers = decoder_layers(text_decoder(model), text.num_hidden_layers)
    heads = _whole(text, "num_attention_heads") or 1  # Mamba and RWKV have none
    hidden = _whole(text, "hidden_size") or embeddings.weight.shape[1]
    inner = (largest(getattr(text, name, None)) for name in ("intermediate_size", "n_inner", "ffn_dim"))
    patterns = outermost_modules(unreached, [name for name, _ in model.named_parameters()])
    numbers = _counted(model, layers, text, unreached)
    has_experts = numbers["active_parameters"] < numbers["parameters"]
    return ModelFacts(
        architecture=type(model).__name__,  # the loaded class; the file may name one with a vision tower
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),  # tied ones count once
        num_layers=len(layers),
        hidden_size=hidden,
        intermediate_size=next(filter(None, inner), 4 * hidden),
        num_attention_heads=heads,
        num_key_value_heads=_whole(text, "num_key_value_heads") or heads,
        vocab_size=embeddings.weight.shape[0],
        max_position_embeddings=_whole(text, "max_position_embeddings") or _LONGEST,
        tie_word_embeddings=head.weight is embeddings.weight,
        dtype=dtype,
        unreached=patterns,
        measured=LayerFacts(
            attention=[kernel.name for kernel in _kernels(model, calls)],
            **numbers,
            **_widths(calls),
            isolates=isolation_of(type(model), config, has_experts=has_experts),
            packing_packages=packages_for_packing(model),
            **adapters_of(model, patterns),
        ),
    )


def _counted(model: Any, layers: nn.ModuleList, text: Any, unreached: set[str]) -> dict[str, Any]:
    """The numbers of parameters in parts of a model."""
    chosen = _whole(text, *CHOSEN_EXPERTS) or 0
    experts = _expert_parameters(layers, chosen)
    in_layers = sum(parameter.numel() for parameter in layers.parameters())
    word_embeddings = model.get_input_embeddings().weight
    embeddings = {each.weight for each in model.modules() if isinstance(each, nn.Embedding)} - {word_embeddings}
    named = list(model.named_parameters())
    linear: list[Any] = [module for module in layers.modules() if is_linear(module)]
    return {
        "num_layers": len(layers),
        "parameters": in_layers,
        "linear_parameters": sum(module.weight.numel() for module in linear),
        "active_parameters": in_layers - sum(each.numel() * (len(each) - chosen) // len(each) for each in experts),
        "largest_parameter": max(parameter.numel() for _, parameter in named),
        "unreached_parameters": sum(each.numel() for name, each in named if name in unreached),
        "projector_parameters": sum(
            each.numel() for name, each in named if name in unreached and not {*name.split(".")}.isdisjoint(PROJECTORS)
        ),
        "looked_up_parameters": sum(
            each.numel() for name, each in named if each in embeddings and name not in unreached
        ),
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


def _dtype(*configs: Any) -> str:
    """Dtype of the published weights, from the first config that states one. Raises: ValueError for another."""
    stated = (dtype for config in configs if (dtype := getattr(config, "dtype", None)) is not None)
    name = str(next(stated, torch.float32)).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"weights in {name} are not trained, only those in {', '.join(DTYPES)}")
    return name


def _whole(config: Any, *names: str) -> int | None:
    """The first of these names with a single positive integer; some architectures have a list of one per layer."""
    values = (getattr(config, name, None) for name in names)
    return next((int(value) for value in values if isinstance(value, int) and value > 0), None)


# Attention


def _kernels(model: Any, calls: list[dict[str, Any]]) -> list[Attention]:
    """The attention kernels that can compute a model's attention, on any machine."""
    found = [WITHOUT_KERNEL]
    found += [MASKED] if model._supports_sdpa else []
    found += [FLEX] if model._supports_flex_attn else []
    only = getattr(model, "_compatible_flash_implementations", None)  # None: any
    if model._supports_flash_attn:
        flash = [kernel for kernel, facts in ATTENTIONS.items() if facts.is_flash and not facts.needs_lengths]
        found += [kernel for kernel in flash if only is None or kernel.value in only]
    head_size = max((each["head_size"] for each in calls), default=0)
    return [
        kernel
        for kernel in (*found, *_by_lengths(calls))
        if not ATTENTIONS[kernel].is_flash or head_size <= LARGEST_FLASH_HEAD
    ]


def _by_lengths(calls: list[dict[str, Any]]) -> list[Attention]:
    """Tunebook's own kernels, which get the boundaries of documents.

    None if the model asks more of its kernel than they compute, or does not get its kernel from AttentionInterface.
    """
    asks_more = any(each.get("dropout") or each.get("softcap") is not None for each in calls)
    if not calls or asks_more or any("cu_seq_lens_q" not in each for each in calls):
        return []
    if any(each.get("s_aux") is not None for each in calls):
        return [WITH_SINKS]
    return [kernel for kernel, facts in ATTENTIONS.items() if facts.needs_lengths]


def _widths(calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Heads x head size of all layers that attend to the whole document, and of those that attend to a window."""
    windowed = [each for each in calls if each.get("sliding_window")]
    return {
        "attention_width": sum(each["width"] for each in calls) - sum(each["width"] for each in windowed),
        "sliding_width": sum(each["width"] for each in windowed),
        "sliding_window": max((each["sliding_window"] for each in windowed), default=0),
    }


# The pass


def _pass(config: Any, options: dict[str, Any]) -> tuple[Any, set[str], list[dict[str, Any]]]:
    """The model, the parameters that get no gradient from a row of words, and how its layers call their attention.

    No calls if the model does not get its attention from AttentionInterface. No parameters if the pass needs a value
    from a tensor without memory, so that the answer is unknown.
    """
    calls: list[dict[str, Any]] = []

    def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **settings: Any) -> tuple[Any, None]:
        heads, sizes = query.shape[1], (query.shape[-1], value.shape[-1])
        calls.append(settings | {"width": heads * sum(sizes) // 2, "head_size": max(sizes)})
        sinks = 0 if settings.get("s_aux") is None else settings["s_aux"].sum()
        groups = heads // value.shape[1]
        return value.repeat_interleave(groups, dim=1).transpose(1, 2) + query.sum() + key.sum() + sinks, None

    AttentionInterface.register(_NOTING, attend)
    AttentionMaskInterface.register(_NOTING, lambda *_, **__: None)
    half = _TOKENS // 2
    try:
        model = _build(config, options, _NOTING)
        ends = torch.tensor([0, half, _TOKENS], dtype=torch.int32)  # with values, to split the row
        return model, _unreached(model, cu_seq_lens_q=ends, max_length_q=half), calls
    except Exception:  # it takes no boundaries, or its attention is of another form
        model = _build(config, options, WITHOUT_KERNEL.name)
    try:
        return model, _unreached(model), []
    except RuntimeError as error:
        if not isinstance(error, NotImplementedError) and "meta tensor" not in str(error):
            raise
        return model, set(), []


def _build(config: Any, options: dict[str, Any], attention: str) -> Any:
    loader = auto_class(config)
    with torch.device("meta"), no_init_weights():  # some initializers fail on a tensor without memory
        model = loader.from_config(copy.deepcopy(config), attn_implementation=attention, **options)
    model.tie_weights()
    return model


def _unreached(model: Any, **row: Any) -> set[str]:
    model.config.pad_token_id = None  # else some models look for it in the row, to warn
    put_back = isolate_documents(model, is_on_cpu=True)  # no kernels of other packages
    try:
        with torch.device("meta"), mock.patch.object(masking_utils, "is_tracing", lambda *_: True):
            tokens = torch.zeros(1, _TOKENS, dtype=torch.long)
            output = model.train()(input_ids=tokens, use_cache=False, **row)
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
