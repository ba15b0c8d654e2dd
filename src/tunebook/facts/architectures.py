"""Tables of architectures, by transformers class: which settings were tested with them."""

from __future__ import annotations

from typing import Any

from tunebook.config.choices import Attention, Compute, PackingMode
from tunebook.config.schema import RunConfig
from tunebook.facts.attention import COMPILED, MASKED, WITHOUT_KERNEL
from tunebook.facts.generations import can_run

# Architectures whose results with torch's varlen kernel were compared with sdpa (tests/model/test_varlen_attention.py).
# Except for those with sinks, `auto` chooses varlen for no others: some call no attention function, and some need what
# it cannot compute.
VARLEN_ARCHITECTURES = frozenset({
    "CohereForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "GemmaForCausalLM",
    "GPTNeoXForCausalLM", "GraniteForCausalLM",
    "LlamaForCausalLM", "MistralForCausalLM", "OlmoForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM",
    "Phi3ForCausalLM", "PhiForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
    "SmolLM3ForCausalLM", "Starcoder2ForCausalLM",
})  # fmt: skip

# Architectures with attention sinks, which were compared with eager attention (h100_sinks.jsonl, h100_models.jsonl). Of
# the kernels for packed rows, torch's varlen kernel alone computes them. GPUs that share rows were not tried. In
# compiled blocks losses differed by 0.22%. So these are not in VARLEN_ARCHITECTURES.
SINK_ARCHITECTURES = frozenset({"GptOssForCausalLM"})

# Architectures that were tested with compiled blocks (h200x2_architectures.jsonl, h100_models.jsonl). Losses differed
# by less than 9e-4 from blocks that are not compiled; with dropout, which draws other numbers, by 7e-3.
COMPILED_ARCHITECTURES = VARLEN_ARCHITECTURES

# Architectures with plain rotary positions in all layers, for which YaRN's rotations were compared with those of a
# stretched config.json and with the paper's (tests/model/test_positions.py).
YARN_ARCHITECTURES = frozenset({
    "GraniteForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "OlmoForCausalLM", "Olmo2ForCausalLM",
    "OlmoeForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "SmolLM3ForCausalLM",
    "Starcoder2ForCausalLM",
})  # fmt: skip

# Architectures whose packed rows with images have the loss of their documents (tests/train/test_packed_images.py).
# Not Gemma 3: transformers 5.24 finds the images of its sliding layers' mask at their places in the first document.
PACKED_IMAGE_ARCHITECTURES = frozenset({
    "Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration", "SmolVLMForConditionalGeneration",
})  # fmt: skip

# Architectures that let the tokens of an image see each other, by a mask: transformers' flash attention leaves it out.
IMAGE_MASK_ARCHITECTURES = frozenset({"Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration"})

# Architectures whose towers for images are planned (tests/plan/memory/test_tower.py), and what their published
# preprocessor_config.json say about sizes, for models that are planned by their facts. The keys are transformers'.
_QWEN = {"image_processor_type": "Qwen2VLImageProcessor", "temporal_patch_size": 2, "merge_size": 2}
IMAGE_PROCESSORS: dict[str, dict[str, Any]] = {
    "Qwen2_5_VLForConditionalGeneration": _QWEN
    | {"patch_size": 14, "size": {"shortest_edge": 56 * 56, "longest_edge": 3584 * 3584}},
    "Qwen3VLForConditionalGeneration": _QWEN
    | {"patch_size": 16, "size": {"shortest_edge": 256 * 256, "longest_edge": 4096 * 4096}},
    "Gemma3ForConditionalGeneration": {
        "image_processor_type": "Gemma3ImageProcessor", "size": {"height": 896, "width": 896}
    },
    "SmolVLMForConditionalGeneration": {
        "image_processor_type": "SmolVLMImageProcessor", "do_image_splitting": True, "size": {"longest_edge": 2048},
        "max_image_size": {"longest_edge": 512},
    },
}  # fmt: skip

# Keys of different architectures' configs for the number of experts, and for how many of them a token is sent to.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN_EXPERTS = (
    "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "top_k_experts", "moe_k"
)  # fmt: skip


def has_attention(config: RunConfig, kernel: Attention) -> bool:
    """Whether transformers supports an attention kernel for the model's architecture; true if unknown."""
    facts = config.model.facts
    names = facts.measured.attention if facts is not None and facts.measured is not None else []
    return not names or kernel.name in names


def without_flash_attn(config: RunConfig) -> Attention:
    """The kernel `auto` uses for compiled blocks or without flash-attn.

    It is torch's varlen for packed rows of architectures that were compared with it, else sdpa, else the one that every
    architecture supports. Not flex_attention: for GPT-OSS it found no kernel that an H200 could run (torch 2.11).
    """
    kernel, facts = COMPILED, config.model.facts
    is_known = facts is not None and facts.architecture in VARLEN_ARCHITECTURES | SINK_ARCHITECTURES
    is_packed = config.packing.mode is not PackingMode.padded
    is_possible = can_run(kernel, config.hardware.generation) and config.precision.compute is not Compute.fp32
    if is_known and is_packed and is_possible and has_attention(config, kernel):
        return kernel
    return MASKED if has_attention(config, MASKED) else WITHOUT_KERNEL
