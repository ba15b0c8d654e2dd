"""Build a model from its config.json without memory for its weights, and say what planning needs to know of it.

    python -m tunebook.config.meta_device.measure CONFIG_FILE ANSWER_FILE [--trust-remote-code]

A process of its own, because it imports torch and transformers, which `tunebook plan` must not.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tunebook.config.choices import Attention
from tunebook.config.meta_device.saved import adapted, attends_by_lengths, decoder_layers, measure_saved
from tunebook.errors import did_you_mean

_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_LONGEST = 2**20  # tokens, where an architecture has no highest position
_FLASH_ATTN = (Attention.flash_attention_2, Attention.flash_attention_3, Attention.flash_attention_4)
_OURS = (Attention.varlen_attention, Attention.varlen_attention_4, Attention.sdpa_by_document)
_UNKNOWN = ("unrecognized", "does not recognize", "should have a `model_type`", "trust_remote_code", "no file named")


def describe(config_file: Path, *, trust_remote_code: bool) -> dict[str, Any]:
    """`model.facts` as plain values, or `error` and `reason`."""
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    loader: Any = AutoModelForCausalLM
    try:
        config = AutoConfig.from_pretrained(str(config_file.parent), **options)
        with torch.device("meta"):
            model = loader.from_config(copy.deepcopy(config), **options)
    except Exception as error:  # of any kind: architectures check their sizes in their own ways, or not at all
        if any(word in str(error).lower() for word in _UNKNOWN):
            return {"error": "unknown-architecture", "reason": _named(config_file)}
        return {"error": "cannot-build", "reason": _said(error)}
    if model.get_output_embeddings() is None or model.get_input_embeddings() is None:
        return {"error": "unknown-architecture", "reason": f"{type(model).__name__} has no output head over its words"}
    return _facts(config, model, options)


def _named(config_file: Path) -> str:
    """What the file calls its architecture, and what may have been meant."""
    config = json.loads(config_file.read_text(encoding="utf-8"))
    kind = str(config.get("model_type") or "")
    return f"model_type={kind}, architectures={config.get('architectures')}" + (
        did_you_mean(kind, set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - {kind}) if kind else ""
    )


def _said(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _facts(config: Any, model: Any, options: dict[str, Any]) -> dict[str, Any]:
    text, decoder = config.get_text_config(decoder=True), model.base_model
    layers = decoder_layers(decoder, text.num_hidden_layers)
    words = model.get_input_embeddings().weight
    linear = [module for layer in layers for module in layer.modules() if _is_linear(module)]
    saved = measure_saved(config, layers, options)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())  # tied ones are there once
    in_layers = sum(parameter.numel() for parameter in layers.parameters())
    num_inputs = sum(map(_num_inputs, linear))
    is_tied = model.get_output_embeddings().weight is words
    heads = text.num_attention_heads
    hidden = _whole(text, "hidden_size") or words.shape[1]
    return {
        "architecture": type(model).__name__,  # what is loaded; the file may name one with a vision tower
        "num_parameters": num_parameters,
        "num_layers": len(layers),
        "hidden_size": hidden,
        "intermediate_size": _whole(text, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": _whole(text, "num_key_value_heads") or heads,
        "vocab_size": words.shape[0],
        "max_position_embeddings": _whole(text, "max_position_embeddings") or _LONGEST,
        "tie_word_embeddings": is_tied,
        "dtype": _dtype(config, text),
        "measured": {
            "num_layers": len(layers),
            "parameters": in_layers,
            "linear_inputs": num_inputs,
            "adapter_parameters": adapter_parameters(model),
            "attention": [
                *(kernel.name for kernel in attention_of(model)),
                *(kernel.name for kernel in _OURS if attends_by_lengths(config, layers, options)),
            ],
            "saved": saved,
        },
    }


def attention_of(model: Any) -> list[Attention]:
    """What transformers lets a model's architecture attend with of its own kernels, wherever it runs."""
    found = [Attention.eager]
    found += [Attention.sdpa] if model._supports_sdpa else []
    found += [Attention.flex_attention] if model._supports_flex_attn else []
    only = getattr(model, "_compatible_flash_implementations", None)  # None: any
    is_flash = bool(model._supports_flash_attn)
    return found + [kernel for kernel in _FLASH_ATTN if is_flash and (only is None or kernel.value in only)]


def _dtype(*configs: Any) -> str:
    """Of the published weights, by the first config that states one."""
    stated = (getattr(config, "dtype", None) for config in configs)
    return next((_DTYPES[dtype] for dtype in stated if dtype in _DTYPES), "float32")


def _whole(config: Any, *names: str) -> int | None:
    """The first of these that is stated as one whole number; some architectures have a list of one per layer."""
    values = (getattr(config, name, None) for name in names)
    return next((int(value) for value in values if isinstance(value, int) and value > 0), None)


def _is_linear(module: nn.Module) -> bool:
    """What PEFT's "all-linear" takes: also GPT-2's Conv1D, which is a linear layer stored the other way round."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _num_inputs(module: Any) -> int:
    rows, columns = module.weight.shape
    return int(columns if isinstance(module, nn.Linear) else rows)


def adapter_parameters(model: Any) -> int:
    """Of an adapter of rank 1, as PEFT makes it. It changes the model."""
    return sum(parameter.numel() for parameter in adapted(model, rank=1).parameters() if parameter.requires_grad)


def main() -> None:
    """Parse the arguments and write the answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config_file", type=Path)
    parser.add_argument("answer_file", type=Path)
    parser.add_argument("--trust-remote-code", action="store_true")
    arguments = parser.parse_args()
    answer = describe(arguments.config_file, trust_remote_code=arguments.trust_remote_code)
    arguments.answer_file.write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
