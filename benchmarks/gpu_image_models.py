"""Models for images and text as GPU benchmarks train them: the book's sizes, and processors set as published.

    PYTHONPATH=src python benchmarks/gpu_image_models.py inputs/models qwen25_vl_3b gemma3_4b

writes folders that `model.path=... model.weights=random` trains without a hub. The tokenizer is made on the spot: a
token is a byte or one of the family's special tokens. So a document has more tokens of text than with the published
one, and the same number for an image.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tunebook.config.book import book_root
from tunebook.config.model_facts import ModelFacts
from tunebook.model.load import architecture_from_facts
from tunebook.model.tokenizer_files import read_chat_template

_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
         "<|video_pad|>")  # fmt: skip
_GEMMA = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>",
          "<image_soft_token>")  # fmt: skip
_IDEFICS = ("<|im_start|>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<pad>")
_QWEN_IDS = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
             "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Family:
    """What the models of one architecture share."""

    special: tuple[str, ...]
    named: dict[str, str]  # tokens of tokenizer_config.json
    ids: dict[str, str]  # keys of config.json that are ids of tokens
    processor: str
    image_processor: dict[str, Any]  # of preprocessor_config.json
    settings: dict[str, Any] = field(default_factory=dict)  # of processor_config.json
    asked: dict[str, str] = field(default_factory=dict)  # tokens by the names that the processor asks for


def _qwen(processor: str, patch: int, pixels: tuple[int, int]) -> _Family:
    size = dict(zip(("shortest_edge", "longest_edge"), pixels, strict=True))
    return _Family(
        special=_QWEN,
        named={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        ids=_QWEN_IDS,
        processor=processor,
        image_processor={"image_processor_type": "Qwen2VLImageProcessor", "patch_size": patch, "size": size,
                         "temporal_patch_size": 2, "merge_size": 2},
    )  # fmt: skip


FAMILIES = {  # by transformers' model_type
    "qwen2_5_vl": _qwen("Qwen2_5_VLProcessor", 14, (3136, 12845056)),
    "qwen3_vl": _qwen("Qwen3VLProcessor", 16, (65536, 16777216)),
    "gemma3": _Family(
        special=_GEMMA,
        named={"eos_token": "<end_of_turn>", "bos_token": "<bos>", "pad_token": "<pad>"},
        ids={"boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>",
             "image_token_index": "<image_soft_token>"},
        processor="Gemma3Processor",
        image_processor={"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 896, "width": 896}},
        settings={"image_seq_length": 256},
        asked={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    ),
    "smolvlm": _Family(
        special=(*_IDEFICS, *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))),
        named={"eos_token": "<end_of_utterance>", "pad_token": "<pad>"},
        ids={"image_token_id": "<image>"},
        processor="SmolVLMProcessor",
        image_processor={"image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 2048},
                         "max_image_size": {"longest_edge": 512}, "do_image_splitting": True},
        settings={"image_seq_len": 64},
    ),
}  # fmt: skip


@cache  # many runs read one model, and drawing it takes long
def write_image_model(name: str, folder: Path, *, layers: int | None = None, has_weights: bool = False) -> Path:
    """Write a model of the book below `folder` and return its place; `layers` of the language model, all if None."""
    facts = yaml.safe_load((book_root() / f"hydra_configs/model/{name}.yaml").read_text())["facts"]
    config = architecture_from_facts(ModelFacts(**facts | ({"num_layers": layers} if layers else {})))
    kind, place = FAMILIES[config.model_type], folder / f"{name}-{layers or 'all'}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    token = _write_tokenizer(place, config.model_type)
    for key, of in kind.ids.items():
        setattr(config, key, token(of))
    text = config.get_text_config()
    text.eos_token_id, text.bos_token_id = token(kind.named["eos_token"]), None
    text.pad_token_id = token(kind.named["pad_token"])
    config.dtype = "bfloat16"
    config.save_pretrained(place)
    if has_weights:
        _write_weights(config, place)
    return place


def _write_tokenizer(place: Path, model_type: str) -> Callable[[str], int]:
    """Write a tokenizer of bytes with template and processor; returns a token's id."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = FAMILIES[model_type]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in kind.special])
    tokenizer.save(str(place / "tokenizer.json"))
    named = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **kind.named,
        "extra_special_tokens": kind.asked,
    }
    processor = {"processor_class": kind.processor}
    for file, content in (
        ("tokenizer_config.json", named),
        ("preprocessor_config.json", kind.image_processor | processor),
        ("processor_config.json", kind.settings | processor),
    ):
        (place / file).write_text(json.dumps(content))
    (place / "chat_template.jinja").write_text(read_chat_template(f"trl:{model_type}_training"))
    return tokenizer.token_to_id


def _write_weights(config: Any, place: Path) -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        drawn = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    drawn.to("cpu").save_pretrained(place)


def main(words: list[str] | None = None) -> int:
    """Write the models that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a model of the book")
    asked = parser.parse_args(words)
    for name in asked.models:
        print(write_image_model(name, asked.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
