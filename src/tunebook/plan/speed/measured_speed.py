"""All measured speeds with their sources; plans take speeds only from here.

There are two tables: the speed of a single GPU, and a strategy's loss to communication and bookkeeping. All were
measured on H200s, with random weights and generated documents, since neither changes the speed. A loss is stored in
seconds per pass rather than as a share, because its bytes and calls do not depend on the compute time.
tests/plan/speed/test_throughput.py compares runs that are in neither table with the resulting estimates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from tunebook.config.choices import Attention, Compute, Strategy
from tunebook.config.model_facts import ModelFacts
from tunebook.model.flops import flops_per_token, model_flops_utilization, recomputed_flops_per_token

RESULTS = "benchmarks/results/"
_SPEED, _SMALL = f"{RESULTS}h200_speed.jsonl", f"{RESULTS}h200_qwen05b_single.jsonl"
_ONE_GPU, _FOUR = f"{RESULTS}h200_speed_one_gpu.jsonl", f"{RESULTS}h200x4_speed.jsonl"
_WITH_PEERS = f"{RESULTS}h200x4_beside_peers.jsonl"
_ONE_PASS, _FLASH_4 = f"{RESULTS}h200_one_pass_head.jsonl", f"{RESULTS}h200_flash_attention_4.jsonl"
_SMOLLM2, _MODELS = f"{RESULTS}h100_smollm2.jsonl", f"{RESULTS}h100_models.jsonl"
_SELECTIVE, _SELECTIVE_FOUR = f"{RESULTS}h200_selective.jsonl", f"{RESULTS}h200x4_selective.jsonl"
BF16_PEAK, FP32_PEAK, FP8_PEAK = 989.0, 67.0, 1979.0  # TFLOP/s of the measured GPU
MEASURED_ON = "H200"

QWEN_3B = ModelFacts(num_parameters=3_085_938_688, num_layers=36, hidden_size=2048)
QWEN_05B = ModelFacts(num_parameters=494_032_768, num_layers=24, hidden_size=896)
LLAMA_8B = ModelFacts(num_parameters=8_030_261_248, num_layers=32, hidden_size=4096)
LLAMA_8B_SLICE = ModelFacts(num_parameters=3_668_021_248, num_layers=12, hidden_size=4096)
LLAMA_70B_SLICE = ModelFacts(num_parameters=3_946_913_792, num_layers=4, hidden_size=8192)
_NAMES = {
    QWEN_3B.num_parameters: "Qwen2.5-3B",
    QWEN_05B.num_parameters: "Qwen2.5-0.5B",
    LLAMA_8B.num_parameters: "Llama 3 8B",
    LLAMA_8B_SLICE.num_parameters: "12 layers of Llama 3 8B",
    LLAMA_70B_SLICE.num_parameters: "4 layers of Llama 2 70B, as one of four under FSDP",
}

# Token-weighted mean length of the generated documents (sum of squares / sum), uncut and cut at 1,024 tokens.
_UNCUT_LENGTH, _CUT_LENGTH = 1033.0, 640.0
# Real tokens in a padded pass of 11 documents. The cut length was not recorded: the mean is 424 tokens if cut at 1,024
# and 492 if uncut, so this is at most 7% off.
_PADDED_PASS = 11 * 458
# Real tokens in a packed pass: 132 documents of 424 on 2 GPUs in 8 passes each.
_SMALL_PASS = 132 * 424 // (2 * 8)


@dataclass(frozen=True)
class OneGpuSpeed:
    """A measured speed of one GPU."""

    source: str  # file and name of the result
    model: ModelFacts
    tokens_per_second: float  # real tokens
    tokens_per_pass: int  # forward and backward, including padding
    attention: Attention = Attention.varlen_attention
    attended_length: float = _UNCUT_LENGTH
    is_packed: bool = True
    padding_share: float | None = 0.0  # None: not recorded
    compute: Compute = Compute.bf16
    is_recomputed: bool = False
    is_compiled: bool = False  # model.compile_layers
    is_one_pass: bool = False  # model.one_pass_head
    is_selective: bool = False  # activation=selective

    @property
    def efficiency(self) -> float:
        """The achieved share of peak, including padding and recomputation.

        If the padding was not recorded, it is left out, so the share counts real tokens only.
        """
        flops = flops_per_token(self.model, self.attended_length)
        if self.is_recomputed:
            flops += recomputed_flops_per_token(self.model, self.attended_length)
        peak = {Compute.fp32: FP32_PEAK, Compute.fp8: FP8_PEAK}.get(self.compute, BF16_PEAK)
        return model_flops_utilization(self.tokens_per_second / (1 - (self.padding_share or 0.0)), flops, peak)

    @property
    def flops_per_pass(self) -> float:
        """Work of a pass, which decides how well it keeps a GPU busy."""
        return self.tokens_per_pass * flops_per_token(self.model, self.attended_length)

    @property
    def text(self) -> str:
        """Readable source of the number."""
        rows = ("packed" if self.is_packed else "padded") + (", compiled" if self.is_compiled else "")
        rows += ", head in one pass" if self.is_one_pass else ""
        rows += ", norms and activation functions recomputed" if self.is_selective else ""
        return (
            f"one {MEASURED_ON} with {_NAMES[self.model.num_parameters]}, {rows}, {self.attention.name}, "
            f"{self.compute.name} ({self.tokens_per_second:,.0f} tokens/s)"
        )


_compiled = partial(OneGpuSpeed, is_compiled=True, is_one_pass=True)


# The 3B model's packed passes on flash attention had two rows. Their 4,096 tokens are inferred: that is the longest
# document, and the recorded MFU is that of uncut documents.
ONE_GPU_SPEEDS = (
    OneGpuSpeed(f"{_SPEED} packed_flash_attention_2", QWEN_3B, 21_841, 8192, Attention.flash_attention_2),
    OneGpuSpeed(f"{_SPEED} packed_flash_attention_4", QWEN_3B, 22_233, 8192, Attention.flash_attention_4),
    OneGpuSpeed(f"{_ONE_GPU} varlen_8192", QWEN_3B, 22_936.35, 8192),
    _compiled(f"{_ONE_GPU} compiled_8192", QWEN_3B, 24_679.4, 8192, is_one_pass=False),
    _compiled(f"{_ONE_GPU} compiled_16384", QWEN_3B, 26_355.5, 16384, is_one_pass=False),
    _compiled(f"{_ONE_PASS} compiled_8192", QWEN_3B, 25_557.35, 8192),
    _compiled(f"{_ONE_PASS} compiled_16384", QWEN_3B, 26_807.5, 16384),
    _compiled(f"{_SELECTIVE} compiled_32768_selective", QWEN_3B, 27_808.45, 32768, is_selective=True),
    _compiled(f"{_FLASH_4} compiled_8192_flash_4", QWEN_3B, 26_439.05, 8192, Attention.varlen_attention_4),
    _compiled(f"{_FLASH_4} compiled_16384_flash_4", QWEN_3B, 27_851.3, 16384, Attention.varlen_attention_4),
    OneGpuSpeed(
        f"{_SMALL} flash_attention_4_rows_8192", QWEN_05B, 75_767.6, 8192, Attention.flash_attention_4,
        attended_length=_CUT_LENGTH,
    ),
    _compiled(f"{_SMALL} compiled_32768", QWEN_05B, 145_701.0, 25_786, attended_length=_CUT_LENGTH),
    OneGpuSpeed(f"{_SPEED} packed_sdpa", QWEN_3B, 7_080, 4096, Attention.sdpa),
    OneGpuSpeed(f"{_SMALL} single", QWEN_05B, 38_093.2, 4096, Attention.sdpa, attended_length=_CUT_LENGTH),
    # With TRL's head. Computing the logits twice is 5% of the time of these layers and 2% of that of all layers. With
    # the head in one pass, they would predict more than the full model reaches.
    _compiled(f"{_WITH_PEERS} llama8b_12_layers", LLAMA_8B_SLICE, 27_452.15, 16384, is_one_pass=False),
    _compiled(
        f"{_WITH_PEERS} llama8b_12_layers_fp8", LLAMA_8B_SLICE, 33_304.5, 16384, compute=Compute.fp8,
        is_one_pass=False,
    ),
    _compiled(f"{_ONE_PASS} compiled_16384_fp8", QWEN_3B, 30_754.4, 16384, compute=Compute.fp8),
    _compiled(f"{_FOUR} compiled_16384_fp8", QWEN_3B, 30_153.3, 16384, compute=Compute.fp8, is_one_pass=False),
    # Sharded over 4 GPUs, so a single GPU would be faster: the only measurement of wide layers with sdpa.
    OneGpuSpeed(
        f"{RESULTS}h200x4_recipes.jsonl llama2_70b_fsdp", LLAMA_70B_SLICE, 11_784.2, 4080, Attention.sdpa,
        attended_length=_CUT_LENGTH,
    ),
    OneGpuSpeed(
        f"{_SPEED} padded_as_published", QWEN_3B, 3_886, 11 * 1024, Attention.sdpa, is_packed=False,
        padding_share=None, is_recomputed=True,
    ),
    OneGpuSpeed(
        f"{_SMALL} padded", QWEN_05B, 24_423.0, 6 * 845, Attention.sdpa, attended_length=_CUT_LENGTH, is_packed=False,
        padding_share=0.4983,
    ),
    OneGpuSpeed(
        f"{_SMALL} fp32_as_volta", QWEN_05B, 8_946.25, 1024, Attention.sdpa, attended_length=_CUT_LENGTH,
        compute=Compute.fp32,
    ),
    OneGpuSpeed(f"{_FOUR} volta_by_document", QWEN_3B, 2_336.3, 4096, Attention.sdpa_by_document, compute=Compute.fp32),
    OneGpuSpeed(
        f"{_FOUR} volta_sdpa", QWEN_3B, 1_575.2, 4096, Attention.sdpa, compute=Compute.fp32, is_recomputed=True,
    ),
    OneGpuSpeed(
        f"{_FOUR} volta_padded", QWEN_3B, 1_200.5, 1411, Attention.sdpa, compute=Compute.fp32, is_packed=False,
        padding_share=0.3169, is_recomputed=True,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class ShortPass:
    """A measured pass with so little work that the GPU waited for kernel launches."""

    source: str
    tokens_per_second: float
    tokens_per_pass: int
    num_layers: int
    has_adapter: bool = False
    is_compiled: bool = False
    has_mask: bool = False  # attention by the mask of a whole row

    @property
    def seconds_of_a_layer(self) -> float:
        """Seconds of a pass per layer, forward and backward."""
        return self.tokens_per_pass / self.tokens_per_second / self.num_layers


# Their time hardly depends on the tokens, but on the kernels of a layer and on the host that launches them. Plans take
# the geometric mean of several hosts and models. Tokens are real ones: BoolQ's 64 documents of 185 in the mean; 132 of
# 424 in 67 rows of 1,024, as they are packed today; 4 of 512; the recorded 3,978 on two GPUs.
_BOOLQ_PASS, _SHORT_ROW = 64 * 185, 132 * 424 // 67
SHORT_PASSES = (
    ShortPass(f"{_SMALL} flash_attention_4", 13_509.9, _SHORT_ROW, 24),
    ShortPass(f"{RESULTS}h100_hopper_image.jsonl boolq-uncompiled", 37_041.4, _BOOLQ_PASS, 30),
    ShortPass(f"{_SMOLLM2} smollm2_135m_boolq-seed-42", 146_379.2, _BOOLQ_PASS, 30, is_compiled=True),
    ShortPass(f"{_SMOLLM2} smollm2_135m_boolq-seed-42-again", 197_409.7, _BOOLQ_PASS, 30, is_compiled=True),
    ShortPass(f"{_SMALL} sdpa", 11_359.6, _SHORT_ROW, 24, has_mask=True),
    ShortPass(f"{_MODELS} gemma3_4b_lora", 4_345.5, 2048, 34, has_adapter=True),
    ShortPass(f"{RESULTS}h200x2_models.jsonl lora", 7_903.450000000001, 2048, 36, has_adapter=True),
    # Of two GPUs: at most this, since ZeRO-2 and an optimizer on the host take a part of it.
    ShortPass(f"{RESULTS}h200x2_recipes.jsonl zero2_lora", 4_145.1, 3978 // 2, 36, has_adapter=True),
    ShortPass(f"{_MODELS} gemma3_4b_lora_compiled", 9_419.8, 2048, 34, has_adapter=True, is_compiled=True),
    ShortPass(f"{_SMOLLM2} smollm2_135m_lora-seed-42", 107_831.8, _BOOLQ_PASS, 30, has_adapter=True, is_compiled=True),
)
# Padding if the documents' lengths are unknown: measured with generated documents of up to 1,024 tokens, 6 per pass.
USUAL_PADDING_SHARE = 0.4983

# Tokens per second with and without recomputing every layer's forward pass.
RECOMPUTED_SPEED, STORED_SPEED = 17_810.0, 22_233.0
RECOMPUTED_SOURCE = f"{_SPEED} packed_flash_attention_4_checkpointing"
# Recomputation increases the share of the peak: a third more is computed, but the time grows by less than a third.
RECOMPUTED_GAIN = (
    RECOMPUTED_SPEED
    / STORED_SPEED
    * (1 + recomputed_flops_per_token(QWEN_3B, _UNCUT_LENGTH) / flops_per_token(QWEN_3B, _UNCUT_LENGTH))
)


@dataclass(frozen=True, kw_only=True)
class Selective:
    """A run's speed with norms and activation functions recomputed, and without.

    The recomputed operations are not products, so they count as time and not as work.
    """

    source: str  # of `again`; the source of `stored` has the same name without `_selective`
    again: float
    stored: float

    @property
    def gain(self) -> float:
        """Speed ratio; below one is a loss."""
        return self.again / self.stored


SELECTIVE = Selective(source=f"{_SELECTIVE} compiled_16384_selective", again=27_114.2, stored=27_503.05)
SELECTIVE_LORA = Selective(source=f"{_SELECTIVE} lora_8b_compiled_selective", again=14_711.9, stored=15_135.05)


@dataclass(frozen=True)
class StrategySpeed:
    """Speed per GPU of several GPUs with a strategy, and of a single GPU with the same passes."""

    source: str
    strategy: Strategy
    num_gpus: int
    model: ModelFacts
    tokens_per_pass: int  # real tokens of one GPU
    speed_per_gpu: float  # tokens per second of each GPU
    one_gpu_speed: float
    passes_per_step: int  # of h200_speed.jsonl for 528 documents, as published: its steps are not recorded
    is_packed: bool = True
    is_one_gpu_extrapolated: bool = False  # extrapolated from the share of peak of some layers, if all do not fit

    @property
    def lost_seconds(self) -> float:
        """Additional seconds per pass compared with a single GPU."""
        return self.tokens_per_pass * (1 / self.speed_per_gpu - 1 / self.one_gpu_speed)

    @property
    def text(self) -> str:
        """Readable source of the number."""
        how = ", extrapolated from some of its layers" if self.is_one_gpu_extrapolated else ""
        return (
            f"{self.speed_per_gpu:,.0f} for {self.one_gpu_speed:,.0f} tokens/s{how}, "
            f"{_NAMES[self.model.num_parameters]} on {self.num_gpus} {MEASURED_ON}"
        )


STRATEGY_SPEEDS = (
    StrategySpeed(f"{_SPEED} zero2", Strategy.zero2, 8, QWEN_3B, 8192, 17_289, 22_233, 4),
    StrategySpeed(f"{_SELECTIVE_FOUR} fsdp_16384", Strategy.fsdp, 4, QWEN_3B, 16384, 25_393.55, 27_391.05, 2),
    StrategySpeed(f"{_SPEED} fsdp", Strategy.fsdp, 8, QWEN_3B, 8192, 17_578, 22_233, 4),
    # No single GPU holds this model's states. The speed alone is computed from the share of peak that 12 of the 32
    # layers reached in rows of 16,384. The second was measured in shorter rows, and before blocks knew their own sizes
    # under FSDP, which explains part of its loss.
    StrategySpeed(
        f"{_WITH_PEERS} llama8b_fsdp_16384", Strategy.fsdp, 4, LLAMA_8B, 16384, 11_348.05, 12_502, 2,
        is_one_gpu_extrapolated=True,
    ),
    StrategySpeed(
        f"{_FOUR} llama8b_grad_op_sizes_open", Strategy.fsdp_grad_op, 4, LLAMA_8B, 8192, 10_594.05, 12_502, 4,
        is_one_gpu_extrapolated=True,
    ),
    StrategySpeed(f"{_SELECTIVE_FOUR} ddp_16384", Strategy.ddp, 4, QWEN_3B, 16384, 26_205.55, 27_391.05, 2),
    StrategySpeed(f"{_SPEED} zero3", Strategy.zero3, 8, QWEN_3B, 8192, 7_969, 22_233, 4),
    StrategySpeed(f"{_SPEED} fsdp_grad_op_compiled", Strategy.fsdp_grad_op, 8, QWEN_3B, 8192, 22_356, 23_171, 4),
    StrategySpeed(
        f"{_SPEED} padded_as_published_zero2", Strategy.zero2, 8, QWEN_3B, _PADDED_PASS, 1_863, 3_886, 6,
        is_packed=False,
    ),
    # OneGpuSpeed: the same 132 documents a step, sdpa_rows_4096 of the same file. Both ZeRO rows used
    # parallelism.mixed_precision=cast, the only option then.
    StrategySpeed(f"{_SMALL} ddp", Strategy.ddp, 2, QWEN_05B, _SMALL_PASS, 23_025.4, 28_746.9, 8),
    StrategySpeed(f"{_SMALL} fsdp", Strategy.fsdp, 2, QWEN_05B, _SMALL_PASS, 19_803.4, 28_746.9, 8),
    StrategySpeed(f"{_SMALL} zero2", Strategy.zero2, 2, QWEN_05B, _SMALL_PASS, 17_422.1, 28_746.9, 8),
    StrategySpeed(f"{_SMALL} zero3", Strategy.zero3, 2, QWEN_05B, _SMALL_PASS, 8_750.7, 28_746.9, 8),
)  # fmt: skip

# Seconds per trained parameter that the end of a step takes on several GPUs, beyond what the rows above lost to it in
# their passes. Of steps with fewer passes, these would be estimated exactly with 53, 50, 37, 27 and 7 ps: the fastest
# runs of llama3_8b_ddp (12 layers), qwen3b_zero2 (two H100), llama3_8b_fp8, qwen3b_zero2 in fp32 and llama2_70b_fsdp
# (8 layers) in recipes/*/evidence; and with 20 ps llama3_8b_fp8 (4 layers) of h200x2_recipes.jsonl. About the median.
STEP_END_SECONDS = 30e-12


@dataclass(frozen=True)
class AdapterSpeed:
    """Speed with an adapter (LoRA of rank 16 on every linear layer), and of the same full fine-tune."""

    source: str
    strategy: Strategy
    adapter: float  # tokens per second of each GPU
    full: float
    model: ModelFacts
    num_gpus: int = 2
    trained: int = 8_798_208
    attended_length: float = _CUT_LENGTH
    is_compiled: bool = False

    @property
    def gain(self) -> float:
        """Ratio of the shares of peak: an adapter computes less, in nearly the same time."""
        useful = flops_per_token(self.model, self.attended_length, self.trained)
        return self.adapter / self.full * useful / flops_per_token(self.model, self.attended_length)

    @property
    def text(self) -> str:
        """Readable source of the number."""
        return (
            f"{self.adapter:,.0f} for {self.full:,.0f} tokens/s, {_NAMES[self.model.num_parameters]} on "
            f"{self.num_gpus} {MEASURED_ON} with {self.strategy.name}"
        )


# An adapter adds many small kernels; compiling removes most of them. 8 layers of Qwen3-4B were 4% faster with an
# adapter than without if not compiled, and 23% if compiled (h200x2_architectures.jsonl). No GPU holds all states of the
# 8B model: its full fine-tune is computed from some of its layers, as for `STRATEGY_SPEEDS`.
ADAPTER_SPEEDS = (
    AdapterSpeed(f"{_SMALL} zero2_lora", Strategy.zero2, 18_102.1, 17_422.1, QWEN_05B),
    AdapterSpeed(f"{_SMALL} fsdp_lora", Strategy.fsdp, 14_602.7, 19_803.4, QWEN_05B),
    AdapterSpeed(
        f"{_SELECTIVE} lora_8b_compiled", Strategy.single, 15_135.05, 12_502, LLAMA_8B, num_gpus=1,
        trained=41_943_040, attended_length=_UNCUT_LENGTH, is_compiled=True,
    ),
)  # fmt: skip


# Share of its peak that a GPU reaches in the attention of long documents, where an operation counts as in the MFU: of
# Qwen3-4B in rows of 73,472 and 144,128 tokens on two H100s, once the products had their share. Flash attention 4 is
# quicker, and was not measured (benchmarks/results/h100x2_sequence.jsonl, longest_4b).
LONG_ATTENTION_SHARE = 0.27
LONG_ATTENTIONS = (Attention.varlen_attention, Attention.flash_attention_2)

# Inputs of recomputed layers that went to the host while a forward pass computed, without a loss of speed: Qwen3-4B in
# shared rows of 173,056 tokens on two H200s copied 31.9 GB in a quarter of 70.3 s, and was 3% slower than without, in
# rows 2% longer (benchmarks/results/h200x2_sequence.jsonl, fsdp_tiled_offload).
HIDDEN_COPIES_GB_PER_S = 1.8

# Remaining share of the speed with deterministic kernels and the same attention: Qwen2.5-0.5B on an H200.
DETERMINISTIC_SOURCE = f"{RESULTS}h200_deterministic.jsonl qwen05b_single_deterministic_1-2"
DETERMINISTIC_SHARE = 7_189.5 / 20_927.75

# Share of peak of layers with experts, relative to other layers: they have a router and many small products. With
# experts in fp32, which autocast does not cast, from two layers of Qwen3-30B-A3B, whose head takes most of their 13.5
# us a token (74,275 tokens/s, one H200). With experts in 16 bits from eight layers of it on one H100, where compiled
# ones were even somewhat faster than other models' layers (layers_8_bf16 and layers_8_bf16_compiled, h100_models).
EXPERTS_SOURCE = f"{RESULTS}h200x2_architectures.jsonl qwen3_moe_plain"
EXPERTS_SHARE = 0.33
EXPERTS_16_BIT_SHARE, COMPILED_EXPERTS_16_BIT_SHARE = 0.5, 1.0
