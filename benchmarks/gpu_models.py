"""The models that GPU benchmarks train: those of the book in fewer layers, and config.json files of published ones.

Weights are random. A folder with weights (`write_model`) is for runs that read them: in bf16, as published models are.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from gpu_image_models import write_image_model

from tunebook.config.book import book_root
from tunebook.config.model_facts import ModelFacts
from tunebook.plan.architecture import with_layers

ROW = 8192  # tokens that a model takes
_FIVE_LAYERS = {"num_hidden_layers": 5, "max_position_embeddings": 32768}
WIDTHS: dict[str, dict[str, Any]] = {
    "qwen25_05b": {
        "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2,
        "num_hidden_layers": 4,
    },
    "qwen25_7b": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4,
    } | _FIVE_LAYERS,
    "llama3_8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    } | _FIVE_LAYERS,
}  # fmt: skip


def sizes(
    hidden: int, inner: int, layers: int, heads: int, groups: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    """Keys of a config.json like Llama's, with `more` keys."""
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": groups, "vocab_size": vocabulary, "max_position_embeddings": ROW, "bos_token_id": 0,
        "eos_token_id": 1, "pad_token_id": 1, **more,
    }  # fmt: skip


TIED: dict[str, Any] = {"tie_word_embeddings": True}
APART: dict[str, Any] = {"tie_word_embeddings": False}
# By model_type of transformers: the published model and its config with fewer layers. `num_hidden_layers` covers every
# kind of layer of models that alternate kinds.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3-4B", sizes(2560, 9728, 8, 32, 8, 151936, head_dim=128, **TIED)),
    "mistral": ("Mistral-7B-v0.3", sizes(4096, 14336, 5, 32, 8, 32768, sliding_window=None, **APART)),
    "olmo": ("OLMo-1B", sizes(2048, 8192, 12, 16, 16, 50304, **TIED)),
    "olmo2": ("OLMo-2-7B", sizes(4096, 11008, 5, 32, 32, 100352, **APART)),
    "olmo3": ("OLMo-3-7B", sizes(4096, 11008, 4, 32, 32, 100278, sliding_window=4096, **APART)),
    "phi3": ("Phi-3-mini", sizes(3072, 8192, 10, 32, 32, 32064, sliding_window=None, **APART)),
    "smollm3": ("SmolLM3-3B", sizes(2048, 11008, 12, 16, 4, 128256, **TIED)),
    "gpt_neox": (
        "pythia-2.8b",
        {k: v for k, v in sizes(2560, 10240, 12, 32, 32, 50304, **APART).items() if k != "num_key_value_heads"},
    ),
    "gemma": ("gemma-2b", sizes(2048, 16384, 6, 8, 1, 256000, head_dim=256, **TIED)),
    "gemma2": ("gemma-2-2b", sizes(2304, 9216, 8, 8, 4, 256000, head_dim=256, sliding_window=4096, **TIED)),
    "gemma3_text": ("gemma-3-1b", sizes(1152, 6912, 12, 4, 1, 262144, head_dim=256, sliding_window=512, **TIED)),
    "gemma3": (  # with a tower for images, which text does not reach
        "gemma-3-4b",
        {"text_config": sizes(2560, 10240, 8, 8, 4, 262208, head_dim=256, sliding_window=1024, **TIED),
         "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16,
                           "num_hidden_layers": 27, "image_size": 896, "patch_size": 14, "vision_use_head": False},
         "mm_tokens_per_image": 256, "image_token_index": 262144},
    ),
    "granite": (
        "granite-3.1-2b",
        sizes(2048, 8192, 12, 32, 8, 49155, attention_multiplier=0.015625, embedding_multiplier=12.0,
               residual_multiplier=0.22, logits_scaling=8.0, **TIED),
    ),
    "starcoder2": (
        "starcoder2-3b",
        sizes(3072, 12288, 8, 24, 2, 49152, sliding_window=4096, residual_dropout=0.0, embedding_dropout=0.0, **TIED),
    ),
    "phi": ("phi-2", sizes(2560, 10240, 10, 32, 32, 51200, partial_rotary_factor=0.4, resid_pdrop=0.1, **APART)),
    "cohere": ("aya-23-8B", sizes(4096, 14336, 4, 32, 8, 256000, logit_scale=0.0625, **TIED)),
    "qwen3_moe": (
        "Qwen3-30B-A3B",
        sizes(2048, 6144, 2, 32, 4, 151936, head_dim=128, moe_intermediate_size=768, num_experts=128,
               num_experts_per_tok=8, norm_topk_prob=True, **APART),
    ),
    "qwen3_5_text": (  # a full layer of attention after three of linear attention
        "Qwen3.5-9B",
        sizes(4096, 12288, 4, 16, 4, 248320, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32,
               linear_key_head_dim=128, linear_value_head_dim=128, **APART),
    ),
    "gpt_oss": (
        "gpt-oss-20b",
        sizes(2880, 2880, 2, 64, 8, 201088, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
               sliding_window=128, **APART),
    ),
    "gpt2": (
        "gpt2-xl",
        {"n_embd": 1600, "n_head": 25, "n_layer": 16, "vocab_size": 50257, "n_positions": ROW, "bos_token_id": 0,
         "eos_token_id": 1},
    ),
}  # fmt: skip
# transformers' model_type, and the sizes as published but for some numbers of layers
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.2-1B": ("llama", sizes(2048, 8192, 16, 32, 8, 128256, head_dim=64, **TIED)),
    "Llama-3.2-3B, 14 layers": ("llama", sizes(3072, 8192, 14, 24, 8, 128256, head_dim=128, **TIED)),
    "SmolLM2-1.7B": ("llama", sizes(2048, 8192, 24, 32, 32, 49152, **TIED)),
    "Qwen2.5-1.5B": ("qwen2", sizes(1536, 8960, 28, 12, 2, 151936, **TIED)),
    "Qwen2.5-14B, 4 layers": ("qwen2", sizes(5120, 13824, 4, 40, 8, 152064, **APART)),
    "Qwen3-1.7B": ("qwen3", sizes(2048, 6144, 28, 16, 8, 151936, head_dim=128, **TIED)),
    "Qwen3-8B, 6 layers": ("qwen3", sizes(4096, 12288, 6, 32, 8, 151936, head_dim=128, **APART)),
    "OLMo-2-1B": ("olmo2", sizes(2048, 8192, 16, 16, 16, 100352, **APART)),
    "granite-3.1-8b, 8 layers": (
        "granite",
        sizes(4096, 12800, 8, 32, 8, 49155, attention_multiplier=0.0078125, embedding_multiplier=12.0,
               residual_multiplier=0.22, logits_scaling=16.0, **TIED),
    ),
    "Phi-4, 4 layers": ("phi3", sizes(5120, 17920, 4, 40, 10, 100352, sliding_window=None, **APART)),
}  # fmt: skip
# A few layers only, so that the working memory of one layer is most of the peak.
FEW_LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.2-1B, 3 layers": ("llama", PUBLISHED["Llama-3.2-1B"][1] | {"num_hidden_layers": 3}),
    "OLMo-2-1B, 3 layers": ("olmo2", PUBLISHED["OLMo-2-1B"][1] | {"num_hidden_layers": 3}),
    "granite-3.1-8b, 2 layers": ("granite", PUBLISHED["granite-3.1-8b, 8 layers"][1] | {"num_hidden_layers": 2}),
    "Qwen3-8B, 2 layers": ("qwen3", PUBLISHED["Qwen3-8B, 6 layers"][1] | {"num_hidden_layers": 2}),
}
OTHER_KINDS = {f"{model} ({kind})": (kind, config) for kind, (model, config) in MODELS.items()}


def model_words(case: dict[str, Any], folder: Path, *, has_weights: bool = False) -> list[str]:
    """The overrides that choose the model of a recorded or drawn run, whose files are written below `folder`.

    Empty if the run's own overrides choose it. `has_weights`: write weights for a run that reads them.
    """
    name, overrides = case.get("model"), case["overrides"]
    if any(word.startswith("model=/") for word in overrides):  # a folder
        return []
    if case.get("images"):
        weights = "pretrained" if "model.weights=pretrained" in overrides else "random"
        written = write_image_model(
            str(name), folder, layers=case.get("layers"), has_weights=has_weights and weights == "pretrained"
        )
        return [f"model={written}", f"model.weights={weights}"]
    if "model.weights=pretrained" in overrides:
        return [f"model.path={write_model(name or 'qwen25_05b', folder, has_weights=has_weights)}"]
    if "kind" in case:
        return [f"model.path={_write_config(case['kind'], case['kind'], None, folder)}"]
    if name is None or any(word.startswith("model=") for word in overrides):
        return []
    if not (book_root() / f"hydra_configs/model/{name}.yaml").exists():
        place = "-".join(name.translate(str.maketrans("", "", ",()")).split())
        return [
            f"model={_write_config(place, *(PUBLISHED | FEW_LAYERS | OTHER_KINDS)[name], folder)}",
        ]
    layers = case.get("layers")
    cut = first_layers(name, layers) if layers and layers != facts_of(name)["num_layers"] else []
    return [f"model={name}", "model.facts.dtype=bfloat16", *cut]


def first_layers(model: str, layers: int) -> list[str]:
    """The overrides for a model of the book with fewer layers, with its exact number of parameters."""
    facts = facts_of(model)
    found = with_layers(ModelFacts(**facts)).measured
    if found is None or found.parameters % found.num_layers:
        raise ValueError(f"{model}: its layers are not known, or have several sizes")
    gone = (facts["num_layers"] - layers) * found.parameters // found.num_layers
    return [f"model.facts.num_layers={layers}", f"model.facts.num_parameters={facts['num_parameters'] - gone}"]


def facts_of(model: str) -> dict[str, Any]:
    """The planned sizes of a model of the book."""
    content = yaml.safe_load((book_root() / f"hydra_configs/model/{model}.yaml").read_text())
    return dict(content["facts"])


def config_of(kind: str, keys: dict[str, Any] | None = None) -> dict[str, Any]:
    """The config.json of a model_type, with the sizes of `MODELS` unless `keys` are given."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = AutoConfig.for_model(kind, **(keys or MODELS[kind][1]))
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
    config.dtype = "bfloat16"
    return dict(config.to_dict())


def _write_config(name: str, kind: str, keys: dict[str, Any] | None, folder: Path) -> Path:
    """Write a config.json to its own folder below `folder`; returns that folder."""
    model = folder / name
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(config_of(kind, keys)))
    return model


@cache  # many runs read one model, and drawing it takes long
def write_model(width: str, folder: Path, *, has_weights: bool = True) -> Path:
    """Write one of `WIDTHS` below `folder` and return its place. Weights are drawn on a GPU if there is one."""
    model = folder / width
    shutil.rmtree(model, ignore_errors=True)
    shutil.copytree(book_root() / "recipes" / "quickstart" / "model", model)
    content = json.loads((model / "config.json").read_text()) | {"dtype": "bfloat16", "initializer_range": 0.02}
    content |= WIDTHS[width]
    for name in ("layer_types", "head_dim"):
        content.pop(name, None)
    (model / "config.json").write_text(json.dumps(content))
    if has_weights:
        _write_weights(model)
    return model


def _write_weights(model: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        drawn = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.bfloat16)
    drawn.to("cpu").save_pretrained(model)
