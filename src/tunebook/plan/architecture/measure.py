"""Build a model from its config.json without memory for its weights, and write the facts that planning needs.

    python -m tunebook.plan.architecture.measure CONFIG_FILE ANSWER_FILE [--trust-remote-code] [--ways NAME,NAME]
    python -m tunebook.plan.architecture.measure --book [NAME ...]    (the files next to hydra_configs/model/NAME.yaml)

It runs in its own process because it imports torch and transformers, which `tunebook plan` must not import.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tunebook.config.book import book_root, resolve_path
from tunebook.config.choices import Attention
from tunebook.config.model_facts import CAST, SHIPPED_SUFFIX, ModelFacts
from tunebook.config.unreached import as_patterns
from tunebook.errors import nearest
from tunebook.facts.architectures import CHOSEN_EXPERTS, COMPILED_ARCHITECTURES
from tunebook.facts.attention import ATTENTIONS, FLEX, LARGEST_FLASH_HEAD, MASKED, WITHOUT_KERNEL
from tunebook.files import sha256_file
from tunebook.model.base_config import kind_without_causal_class
from tunebook.model.linear_attention import KERNEL_PACKAGES
from tunebook.model.load import architecture_from_facts, largest
from tunebook.plan.architecture import ALL_WAYS, STATED_FACTS, progress_file
from tunebook.plan.architecture.layers import decoder_layers, text_decoder
from tunebook.plan.architecture.packing import packing_facts
from tunebook.plan.architecture.saved import LENGTHS, adapted, measuring, quiet, varlen_kernels
from tunebook.plan.architecture.targets import (
    has_stacked_experts,
    is_linear,
    names_to_adapt,
    not_adapted,
    num_inputs,
    sizes_of_adapted,
    stacked_names,
)

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"  # transformers' layer types
_WINDOWED = (_SLIDING, "chunked_attention", "hybrid_sliding")
_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_LONGEST = 2**20  # tokens, if an architecture has no highest position
_FLASH_ATTN = [kernel for kernel, facts in ATTENTIONS.items() if facts.is_flash and not facts.needs_lengths]
_MIN_SIMILARITY = 0.75  # with so many short names, a lower similarity is hardly a typo: bart for foobar
_UNKNOWN_MODEL_ERRORS = (
    "unrecognized",
    "does not recognize",
    "should have a `model_type`",
    "trust_remote_code",
    "no file named",
)
# Operations that only tensors with memory support.
_FAKE_TENSOR_ERRORS = (
    DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)  # fmt: skip


class _NoPassError(Exception):
    """No pass through a model can be computed, even without memory."""


def describe(
    config_file: Path,
    *,
    trust_remote_code: bool,
    ways: Sequence[str] = ALL_WAYS,
    compiles: bool | None = True,
    on_found: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Return `model.facts` as plain values, or `error` and `reason`. `on_found` is called after each slow part.

    `compiles`: whether compiled layers are traced; None: if `auto` compiles those of the architecture.
    """
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    loader: Any = AutoModelForCausalLM
    try:
        config = _config(config_file, options)
        with torch.device("meta"):
            model = loader.from_config(copy.deepcopy(config), **options)
    except Exception as error:  # of any type: architectures check their sizes in various ways, or not at all
        if trust_remote_code and (absent := _absent_code(config_file)):
            return absent
        if any(word in str(error).lower() for word in _UNKNOWN_MODEL_ERRORS):
            return _unknown(config_file)
        return {"error": "cannot-build", "reason": _error_text(error)}
    if model.get_output_embeddings() is None or model.get_input_embeddings() is None:
        return {"error": "unknown-architecture", "reason": f"{type(model).__name__} has no output head over its words"}
    if compiles is None:
        compiles = type(model).__name__ in COMPILED_ARCHITECTURES
    try:
        return _facts(config, model, options, on_found=on_found, ways=ways, compiles=compiles)
    except _NoPassError as error:
        return {"error": "cannot-build", "reason": str(error)}


def _config(config_file: Path, options: dict[str, Any]) -> Any:
    """The architecture's config, from a config.json or from stated sizes."""
    stated = json.loads(config_file.read_text(encoding="utf-8")).get(STATED_FACTS)
    if stated is not None:
        config: Any = architecture_from_facts(ModelFacts(**stated))
    else:
        config = AutoConfig.from_pretrained(str(config_file.parent), **options)
    config.get_text_config(decoder=True).allow_global_per_layer_attribute_access = True  # layers say what theirs are
    return config


def _unknown(config_file: Path) -> dict[str, str]:
    """Return the architecture's name in the file with `kind`, if it is another kind of model, or a suggestion."""
    config = json.loads(config_file.read_text(encoding="utf-8"))
    kind = str(config.get("model_type") or "")
    architectures = config.get("architectures")
    named = f"model_type={kind}" + (f", architectures={json.dumps(architectures)}" if architectures else "")
    if other := kind_without_causal_class(kind):
        return {"error": "not-causal", "reason": named, "kind": other}
    meant = (
        nearest(kind, set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - {kind}, least_alike=_MIN_SIMILARITY) if kind else None
    )
    return {"error": "unknown-architecture", "reason": named} | ({"meant": meant} if meant else {})


def _absent_code(config_file: Path) -> dict[str, Any] | None:
    """List files of the model's own code that are missing next to its config.json; None if none is missing.

    `is_known`: whether transformers itself has a model of this kind.
    """
    config = json.loads(config_file.read_text(encoding="utf-8"))
    auto_map = config.get("auto_map")
    named = (
        [auto_map.get(each) for each in ("AutoConfig", "AutoModelForCausalLM")] if isinstance(auto_map, dict) else []
    )
    places = [place for place in named if isinstance(place, str) and "--" not in place]  # "--": in another repository
    files = dict.fromkeys(f"{place.rpartition('.')[0]}.py" for place in places)
    absent = [file for file in files if not (config_file.parent / file).is_file()]
    if not absent:
        return None
    is_known = config.get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return {"error": "code-absent", "reason": ", ".join(absent), "is_known": is_known}


def _error_text(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _facts(config: Any, model: Any, options: dict[str, Any], **tracing: Any) -> dict[str, Any]:
    """The facts of a model that could be built. Raises: _NoPassError if no pass through it can be computed."""
    text = config.get_text_config(decoder=True)
    layers = decoder_layers(text_decoder(model), text.num_hidden_layers)
    with measuring(config, layers, options, has_experts=has_stacked_experts(model), **tracing) as found:
        problem = None
        try:
            unreached = _unreached(config, options)
        except _NoPassError as error:
            problem, unreached = error, set[str]()
        facts = _counted(config, model, layers, unreached)  # meanwhile
        saved, beside = found()
    if problem is not None and not saved:
        raise problem
    heads = [_whole(module, "qk_head_dim", "head_dim") or 0 for module in layers.modules()]
    facts["measured"] |= {
        "attention": [
            kernel.name
            for kernel in (*attention_of(model), *varlen_kernels(config, layers, options))
            if not ATTENTIONS[kernel].is_flash or max(heads) <= LARGEST_FLASH_HEAD
        ],
        **packing_facts(type(model).__name__, config, has_experts=has_stacked_experts(model)),
        "saved": {mode: numbers for mode, numbers in saved.items() if not mode.startswith(CAST)},
        "saved_without_autocast": {mode: numbers for mode, numbers in saved.items() if mode.startswith(CAST)},
        "saved_beside_experts": beside,
    }
    return facts


def _counted(config: Any, model: Any, layers: nn.ModuleList, unreached: set[str]) -> dict[str, Any]:
    """The facts that need no pass. Puts adapters on the model."""
    text = config.get_text_config(decoder=True)
    words = model.get_input_embeddings().weight
    linear: list[Any] = [module for module in layers.modules() if is_linear(module)]
    embeddings = {each.weight for each in model.modules() if isinstance(each, nn.Embedding)} - {words}
    patterns = as_patterns(unreached, [name for name, _ in model.named_parameters()])
    beside_layers = {
        "looked_up_parameters": sum(
            each.numel() for name, each in model.named_parameters() if each in embeddings and name not in unreached
        ),
        "per_layer_inputs": len(layers) * (_whole(text, "hidden_size_per_layer_input") or 0),
    }
    num_parameters = sum(parameter.numel() for parameter in model.parameters())  # tied ones count once
    in_layers = sum(parameter.numel() for parameter in layers.parameters())
    inputs, in_linear = sum(map(num_inputs, linear)), sum(module.weight.numel() for module in linear)
    is_tied = model.get_output_embeddings().weight is words
    heads = _whole(text, "num_attention_heads") or 1  # Mamba and RWKV have none
    hidden = _whole(text, "hidden_size") or words.shape[1]
    inner = (largest(getattr(text, name, None)) for name in ("intermediate_size", "n_inner", "ffn_dim"))
    return {
        "architecture": type(model).__name__,  # the loaded class; the file may name one with a vision tower
        "num_parameters": num_parameters,
        "num_layers": len(layers),
        "hidden_size": hidden,
        "intermediate_size": next(filter(None, inner), 4 * hidden),
        "num_attention_heads": heads,
        "num_key_value_heads": _whole(text, "num_key_value_heads") or heads,
        "vocab_size": words.shape[0],
        "max_position_embeddings": _whole(text, "max_position_embeddings") or _LONGEST,
        "tie_word_embeddings": is_tied,
        "dtype": _dtype(config, text),
        "measured": {
            "num_layers": len(layers),
            "parameters": in_layers,
            "linear_inputs": inputs,
            **_adapters(model, layers, patterns),
            "linear_parameters": in_linear,
            "active_parameters": in_layers - _unused_expert_parameters(layers, text),
            "largest_parameter": max(parameter.numel() for parameter in model.parameters()),
            "unreached": patterns,
            "unreached_parameters": sum(p.numel() for name, p in model.named_parameters() if name in unreached),
            **{name: number for name, number in beside_layers.items() if number},
            **_attention_widths(layers, text),
            **_experts(layers, text, hidden),
        },
    }


def _unreached(config: Any, options: dict[str, Any]) -> set[str]:
    """The names of the parameters that get no gradient from a row of words.

    Empty if a pass needs a value from a tensor without memory, so that the answer is unknown. Raises: _NoPassError if
    no pass through the model can be computed.
    """
    loader: Any = AutoModelForCausalLM
    try:
        with quiet(), torch.device("meta"), no_init_weights():
            model = loader.from_config(copy.deepcopy(config), attn_implementation="eager", **options)
        with quiet(), FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            model.tie_weights()
            output = model.train()(input_ids=torch.zeros(1, LENGTHS[0], dtype=torch.long), use_cache=False)
            last = getattr(getattr(output, "logits", None), "grad_fn", None)
            if last is None:  # architecture with its own code
                return set()
            reached = _leaves(last)
            return {name for name, parameter in model.named_parameters() if id(parameter) not in reached}
    except _FAKE_TENSOR_ERRORS:
        return set()
    except Exception as error:  # of any type, as in `describe`
        raise _NoPassError(f"no pass through its layers can be computed: {_error_text(error)}") from error


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


def _unused_expert_parameters(layers: nn.ModuleList, text: Any) -> int:
    """Number of parameters of the experts that a token is not sent to.

    transformers 5 keeps all experts of a layer in one tensor, and their biases in another of the same module. 0 if the
    config does not say how many are chosen.
    """
    chosen = _whole(text, *CHOSEN_EXPERTS) or 0
    unused = (each.numel() * (len(each) - chosen) // len(each) for each in _expert_parameters(layers, chosen))
    return sum(unused)


def _expert_parameters(layers: nn.ModuleList, chosen: int) -> list[nn.Parameter]:
    """Parameters that hold one matrix or bias for each expert; none unless a router chooses fewer than all."""
    found: list[nn.Parameter] = []
    for module in layers.modules() if chosen else ():
        own = list(module.parameters(recurse=False))
        numbers = {len(parameter) for parameter in own if parameter.dim() == 3}
        found += [each for each in own if each.dim() > 1 and len(each) in numbers and len(each) > chosen]
    return found


def _experts(layers: nn.ModuleList, text: Any, hidden: int) -> dict[str, int | bool]:
    """Experts per token, the inner size of one, and whether they have biases; empty if there are none."""
    chosen = _whole(text, *CHOSEN_EXPERTS) or 0
    found = _expert_parameters(layers, chosen)
    matrices = [each for each in found if each.dim() == 3]
    if not matrices:
        return {}
    narrowest = min(matrices, key=lambda each: each.numel())  # gate and up are one matrix, twice as large as down
    return {
        "experts_per_token": chosen,
        "expert_size": narrowest.numel() // (len(narrowest) * hidden),
        "has_expert_biases": len(matrices) < len(found),
    }


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
        widths[_SLIDING if is_windowed else _FULL] += (_whole(text, "num_attention_heads") or 0) * _head_size(
            layer, text
        )
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
    is_flash = bool(model._supports_flash_attn)
    return found + [kernel for kernel in _FLASH_ATTN if is_flash and (only is None or kernel.value in only)]


def _dtype(*configs: Any) -> str:
    """Dtype of the published weights, from the first config that states one."""
    stated = (getattr(config, "dtype", None) for config in configs)
    return next((_DTYPES[dtype] for dtype in stated if dtype in _DTYPES), "float32")


def _whole(config: Any, *names: str) -> int | None:
    """The first of these names with a single positive integer; some architectures have a list of one per layer."""
    values = (getattr(config, name, None) for name in names)
    return next((int(value) for value in values if isinstance(value, int) and value > 0), None)


def _adapters(model: Any, layers: nn.ModuleList, unreached: list[str]) -> dict[str, Any]:
    """Sizes of PEFT's rank-1 adapters on all layers that text reaches, and names of those that it refuses.

    Changes the model.
    """
    stacked, refused, names = stacked_names(model), not_adapted(model, layers), names_to_adapt(model)
    linear, experts = sizes_of_adapted(adapted(model, rank=1, unreached=unreached, names=names), stacked)
    both = (*linear.values(), *experts.values())
    found = {"adapter_parameters": sum(map(sum, both)), "adapters": linear, "expert_adapters": experts}
    return found | ({"not_adapted": refused} if refused else {})


def trace_book(names: list[str]) -> None:
    """Write the traces of all or the named models of the book next to their YAML, one mode a line.

    Facts that a YAML file leaves out, such as the number of parameters, are added to it. Those that it states must be
    what transformers builds.
    """
    folder = book_root() / "hydra_configs" / "model"
    for file in sorted(folder.glob("*.yaml")):
        text = file.read_text(encoding="utf-8")
        model = yaml.safe_load(text)
        if (names and file.stem not in names) or not (model.get("facts") or model.get("path")):
            continue
        facts = model.get("facts")
        with tempfile.TemporaryDirectory() as made:
            config_file = Path(made) / "config.json"
            own = {}
            if facts is not None:
                config_file.write_text(json.dumps({STATED_FACTS: facts}), encoding="utf-8")
            else:
                config_file = resolve_path(model["path"]) / "config.json"
                own = {"config_sha256": sha256_file(config_file)}
            answer = describe(config_file, trust_remote_code=False) | own
        assert "error" not in answer, f"{file}: {answer}"
        if facts is not None:
            answer |= {"dtype": facts["dtype"]} | ({"config": facts["config"]} if "config" in facts else {})
            found = answer | {"unreached": answer["measured"]["unreached"]}
            differing = [name for name, value in facts.items() if found.get(name) != value]
            assert not differing, f"{file} states another {', '.join(differing)} than transformers has: {answer}"
            head = text[: text.index("\nfacts:") + 1]
            file.write_text(head + facts_yaml(found), encoding="utf-8")
        text = re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), json.dumps(answer, indent=1))
        file.with_suffix(SHIPPED_SUFFIX).write_text(text + "\n", encoding="utf-8")
        print(file.stem, flush=True)


def facts_yaml(found: dict[str, Any]) -> str:
    """The `facts` of a model group file, in the order of the schema, without empty ones."""
    names = [each.name for each in fields(ModelFacts) if found.get(each.name) not in (None, [], {})]
    stated = {name: found[name] for name in names if name != "measured"}
    return yaml.dump({"facts": stated}, Dumper=_IndentedLists, sort_keys=False, default_flow_style=False)


class _IndentedLists(yaml.SafeDumper):
    """Writes lists in the style that yamllint expects."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Indent an item deeper than its list's key."""
        super().increase_indent(flow, False)


def main() -> None:
    """Parse the arguments and write one model's answer, or those of the book."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config_file", type=Path, nargs="?")
    parser.add_argument("answer_file", type=Path, nargs="?")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=ALL_WAYS, help="see ALL_WAYS")
    parser.add_argument(
        "--compiled", action=argparse.BooleanOptionalAction, help="compiled layers; default: if auto does"
    )
    parser.add_argument("--book", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    for package in KERNEL_PACKAGES:  # their kernels cannot compute on tensors without memory
        sys.modules[package] = None  # type: ignore[assignment]  # importing it fails
    if arguments.book is not None:
        trace_book(arguments.book)
        return
    if arguments.answer_file is None:
        parser.error("CONFIG_FILE and ANSWER_FILE are needed, or --book")
    gc.disable()  # a sixth of the time, and this short process holds no more memory without it
    progress = progress_file(arguments.answer_file)

    def note() -> None:
        with progress.open("ab") as file:
            file.write(b".")

    answer = describe(
        arguments.config_file,
        trust_remote_code=arguments.trust_remote_code,
        ways=arguments.ways,
        compiles=arguments.compiled,
        on_found=note,
    )
    arguments.answer_file.write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
