"""Tiny models for images and text of four families, made on the spot: weights, a tokenizer of bytes, and a processor.

A token is a byte or one of the family's special tokens. The chat templates are the families' own, as TRL ships them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.data.conftest import write_tokenizer
from tunebook.model.tokenizer_files import read_chat_template

_TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 512, "max_position_embeddings": 2048,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
_GEMMA = (
    "<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>",
    "<image_soft_token>",
)  # fmt: skip
_IDEFICS = ("<|im_start|>", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<pad>")


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family: its classes in transformers, and sizes that make a model tiny."""

    kind: str  # model_type
    template: str  # TRL's
    special: tuple[str, ...]
    eos: str
    pad: str
    processor: str
    image_processor: dict[str, Any]
    text: dict[str, Any]
    vision: dict[str, Any]
    config: Callable[[Callable[[str], int]], dict[str, Any]]  # further keys, from tokens
    processor_config: dict[str, Any]
    named: dict[str, str]  # tokens by the names that the processor asks the tokenizer for


def _mrope(**more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3], **more}}


def _qwen(kind: str, patch: int, text: dict[str, Any], vision: dict[str, Any]) -> Family:
    unit = (2 * patch) ** 2
    return Family(
        kind=kind,
        template=f"trl:{kind}",
        special=(*_QWEN, "<|video_pad|>"),
        eos="<|im_end|>",
        pad="<|endoftext|>",
        processor="Qwen2_5_VLProcessor" if kind == "qwen2_5_vl" else "Qwen3VLProcessor",
        image_processor={
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": patch,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "size": {"shortest_edge": unit, "longest_edge": 12 * unit},
        },
        text=text,
        vision={"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": patch}
        | {"out_hidden_size": 32, **vision},
        config=lambda token: {
            "image_token_id": token("<|image_pad|>"),
            "video_token_id": token("<|video_pad|>"),
            "vision_start_token_id": token("<|vision_start|>"),
            "vision_end_token_id": token("<|vision_end|>"),
        },
        processor_config={},
        named={},
    )


FAMILIES = {
    "qwen2_5_vl": _qwen("qwen2_5_vl", 14, _mrope(), {"fullatt_block_indexes": [1], "window_size": 56}),
    "qwen3_vl": _qwen(
        "qwen3_vl", 16, _mrope(mrope_interleaved=True), {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    ),
    "gemma3": Family(
        kind="gemma3",
        template="trl:gemma3",
        special=_GEMMA,
        eos="<end_of_turn>",
        pad="<pad>",
        processor="Gemma3Processor",
        image_processor={"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 28, "width": 28}},
        text={"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
        vision={"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        | {"image_size": 28, "patch_size": 7, "vision_use_head": False},
        config=lambda token: {
            "mm_tokens_per_image": 4,
            "boi_token_index": token("<start_of_image>"),
            "eoi_token_index": token("<end_of_image>"),
            "image_token_index": token("<image_soft_token>"),
        },
        processor_config={"image_seq_length": 4},
        named={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    ),
    "smolvlm": Family(
        kind="smolvlm",
        template="trl:smolvlm",
        special=(*_IDEFICS, *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))),
        eos="<end_of_utterance>",
        pad="<pad>",
        processor="SmolVLMProcessor",
        image_processor={
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 56},
            "max_image_size": {"longest_edge": 28},
            "do_image_splitting": True,
        },
        text={"model_type": "llama"},
        vision={"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        | {"image_size": 28, "patch_size": 7},
        config=lambda token: {"scale_factor": 2, "image_token_id": token("<image>")},
        processor_config={"image_seq_len": 4},
        named={},
    ),
}


def write_model(folder: Path, family: Family, *, has_weights: bool = True, template: str | None = None) -> Path:
    """A model's folder: config.json, weights, tokenizer, chat template and processor."""
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

    write_tokenizer(
        folder,
        template=read_chat_template(template or family.template),
        eos_token=family.eos,
        bos_token="<bos>" if family.kind == "gemma3" else None,
        pad_token=family.pad,
        special=family.special,
    )
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"extra_special_tokens": family.named} if family.named else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    token = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids
    kind = {"processor_class": family.processor}
    (folder / "preprocessor_config.json").write_text(json.dumps(family.image_processor | kind))
    (folder / "processor_config.json").write_text(json.dumps(family.processor_config | kind))
    ends = {"eos_token_id": token(family.eos), "pad_token_id": token(family.pad)}
    text = _TEXT | ends | family.text
    config = AutoConfig.for_model(
        family.kind, text_config=text, vision_config=family.vision, tie_word_embeddings=True, **family.config(token)
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    if has_weights:
        model.save_pretrained(folder)
    else:
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
    return folder


def draw_image(seed: int, width: int, height: int) -> Image.Image:
    """Random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def load_processor(folder: Path, tokenizer: Any) -> Any:
    """transformers' own processor, without its part for videos, which needs more packages."""
    import transformers
    from transformers import AutoImageProcessor, ProcessorMixin
    from transformers.models.smolvlm import processing_smolvlm

    processing_smolvlm.num2words = str  # it writes numbers of video frames
    stated = ProcessorMixin.get_processor_dict(str(folder))[0]
    kind: Any = getattr(transformers, stated["processor_class"])
    made: Any = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None})
    parts = {"tokenizer": tokenizer, "image_processor": AutoImageProcessor.from_pretrained(folder, backend="pil")}
    processor = made.from_args_and_dict([parts.get(part) for part in kind.get_attributes()], stated)
    processor.video_processor = SimpleNamespace(num_frames=1, fps=1, model_input_names=[])
    return processor
