"""Architectures, by the class that transformers loads: which keep packed documents apart, and which were tried how."""

from __future__ import annotations

from tunebook.config.choices import Attention, Compute, PackingMode
from tunebook.config.schema import RunConfig
from tunebook.facts.attention import COMPILED, MASKED, WITHOUT_KERNEL
from tunebook.facts.generations import can_run

# Architectures in which packed documents reach each other whatever the attention kernel: those that do not take
# position_ids, from which transformers works out where a document starts, and those that carry a state along the row,
# as linear attention does. Found by trying the causal language models of transformers 5.23 that can be made small, but
# for encoders that can be told to be decoders; a test does it again for these. The leak probe looks at every run's own.
LEAKING_ARCHITECTURES = frozenset({
    "BailingHybridForCausalLM", "BambaForCausalLM", "BloomForCausalLM", "CpmAntForCausalLM", "DeepseekV4ForCausalLM",
    "FalconH1ForCausalLM", "FalconMambaForCausalLM", "GraniteMoeHybridForCausalLM", "InklingForCausalLM",
    "Inkling2ForCausalLM", "JambaForCausalLM", "KimiLinearForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM",
    "Lfm3ForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM", "MiniMaxForCausalLM", "MptForCausalLM",
    "NemotronHForCausalLM", "OlmoHybridForCausalLM", "OpenAIGPTLMHeadModel", "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "RecurrentGemmaForCausalLM", "RwkvForCausalLM", "XGLMForCausalLM",
    "Zamba2ForCausalLM", "ZambaForCausalLM", "xLSTMForCausalLM",
})  # fmt: skip
# Those that do not tell transformers the positions when it makes the mask, but do tell the attention, so that kernels
# without a mask may know where documents end.
LEAKING_THROUGH_MASKS = frozenset({
    "AfmoeForCausalLM", "BioGptForCausalLM", "FalconForCausalLM", "GptOssForCausalLM", "OPTForCausalLM",
})  # fmt: skip

# Architectures that were compared with sdpa under torch's varlen kernel (tests/model/test_varlen_attention.py): `auto`
# takes it for no others, since some call no attention function, and some ask for what it cannot compute.
VARLEN_ARCHITECTURES = frozenset({
    "CohereForCausalLM", "Gemma3ForCausalLM", "GemmaForCausalLM", "GPTNeoXForCausalLM", "GraniteForCausalLM",
    "LlamaForCausalLM", "MistralForCausalLM", "OlmoForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM",
    "Phi3ForCausalLM", "PhiForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
    "SmolLM3ForCausalLM", "Starcoder2ForCausalLM",
})  # fmt: skip

# Seen compiled on H200s: Llama and Qwen2 in h200_speed_one_gpu.jsonl and h200_speed_spread.jsonl, the others with
# losses within 9e-4 of blocks that are not (Phi 2, which has dropout, 7e-3), and 12 to 58% faster, in
# h200x2_architectures.jsonl. A mixture of experts (Qwen3-MoE) gained 2% there, for 30 s of compiling, and is left as it
# is.
COMPILED_ARCHITECTURES = frozenset({
    "CohereForCausalLM", "Gemma3ForCausalLM", "GemmaForCausalLM", "GPTNeoXForCausalLM", "GraniteForCausalLM",
    "LlamaForCausalLM", "MistralForCausalLM", "OlmoForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM",
    "Phi3ForCausalLM", "PhiForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM",
    "Starcoder2ForCausalLM",
})  # fmt: skip

# The class of one transformer block, as the architecture's `_no_split_modules` names it in transformers 5.23.
DECODER_LAYERS = {
    "GPT2LMHeadModel": "GPT2Block",
    "GPTNeoXForCausalLM": "GPTNeoXLayer",
    "GemmaForCausalLM": "GemmaDecoderLayer",
    "Gemma2ForCausalLM": "Gemma2DecoderLayer",
    "Gemma3ForCausalLM": "Gemma3DecoderLayer",
    "LlamaForCausalLM": "LlamaDecoderLayer",
    "MistralForCausalLM": "MistralDecoderLayer",
    "MixtralForCausalLM": "MixtralDecoderLayer",
    "Phi3ForCausalLM": "Phi3DecoderLayer",
    "Qwen2ForCausalLM": "Qwen2DecoderLayer",
    "Qwen3ForCausalLM": "Qwen3DecoderLayer",
}


def has_attention(config: RunConfig, kernel: Attention) -> bool:
    """Whether transformers lets the model's architecture attend with a kernel; true where nobody has looked."""
    facts = config.model.facts
    names = facts.measured.attention if facts is not None and facts.measured is not None else []
    return not names or kernel.name in names


def nearest_attention(config: RunConfig) -> Attention:
    """What the architecture has without another package: sdpa, or the one that every architecture has.

    Not flex_attention, which for GPT-OSS found no kernel that an H200 could run (torch 2.11).
    """
    return MASKED if has_attention(config, MASKED) else WITHOUT_KERNEL


def without_flash_attn(config: RunConfig) -> Attention:
    """What `auto` takes for compiled blocks and where flash-attn is missing: torch's for packed rows, or else sdpa."""
    kernel, facts = COMPILED, config.model.facts
    is_known = facts is not None and facts.architecture in VARLEN_ARCHITECTURES
    is_packed = config.packing.mode is not PackingMode.padded
    is_possible = can_run(kernel, config.hardware.generation) and config.precision.compute is not Compute.fp32
    is_taken = is_known and is_packed and is_possible and has_attention(config, kernel)
    return kernel if is_taken else nearest_attention(config)
