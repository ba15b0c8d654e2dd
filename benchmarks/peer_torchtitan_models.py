"""Configurations of torchtitan 0.3, which its `--module peer_torchtitan_models --config NAME` finds.

Models are torchtitan's own. Qwen2.5-3B is its Qwen3 without norms of queries and keys: the same matrices, less
Qwen2.5's three bias vectors a layer (92,160 numbers of 3.09 billion).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from peer_torchtitan_start import IS_TORCH_2_11
from torchtitan.components.lora import LoRAConverter
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models import llama3, qwen3
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.trainer import Trainer


def _qwen25_3b(attn_backend: str) -> Any:
    dim, vocabulary = 2048, 151936
    layers = qwen3._build_qwen3_layers(
        n_layers=36, dim=dim, n_heads=16, n_kv_heads=2, head_dim=128, hidden_dim=11008, attn_backend=attn_backend,
        rope=CosSinRoPE.Config(dim=128, max_seq_len=32768, theta=1e6),
    )  # fmt: skip
    for layer in layers:
        layer.attention.qk_norm = None
    return qwen3.Qwen3Model.Config(
        vocab_size=vocabulary, dim=dim, norm=qwen3._qwen3_norm(dim), enable_weight_tying=True, layers=layers,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocabulary, embedding_dim=dim, param_init=qwen3._EMBEDDING_SKIP_INIT
        ),
        lm_head=Linear.Config(in_features=dim, out_features=vocabulary, param_init=qwen3._LINEAR_INIT),
    )  # fmt: skip


qwen3.qwen3_configs["2.5-3B"] = _qwen25_3b


def _config(
    family: Any, flavor: str, *, compiled: bool = True, fp8: bool = False, rank: int | None = None,
    recomputed: Any = None, dtype: str = "float32",
) -> Any:  # fmt: skip
    # As its own configurations of fp8 say.
    converters = [Float8LinearConverter.Config(filter_fqns=["lm_head"], model_compile_enabled=compiled)] if fp8 else []
    if rank is not None:
        projections = ["wqkv", "wo", "w1", "w2", "w3"]  # q, k and v are one matrix
        converters.append(LoRAConverter.Config(rank=rank, alpha=2.0 * rank, target_modules=projections))
    spec = family.model_registry(flavor, converters=converters)
    loss = CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size)
    return Trainer.Config(
        model_spec=spec,
        loss=loss if IS_TORCH_2_11 else ChunkedLossWrapper.Config(loss_fn=loss),  # chunks need a newer FSDP
        optimizer=default_adamw(lr=3e-5),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=3),
        training=TrainingConfig(dtype=dtype),
        # By default the trainer's own process makes its rows, about 25 ms of a step.
        dataloader=HuggingFaceTextDataLoader.Config(
            dataset="c4_test", num_workers=1, pin_memory=True, prefetch_factor=8
        ),
        metrics=MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),  # others need a newer torch for several GPUs
        activation_checkpoint=recomputed,
        compile=CompileConfig(enable=compiled),
    )


_llama8b, _qwen3b = partial(_config, llama3, "8B"), partial(_config, qwen3, "2.5-3B")
_adapters = partial(_llama8b, rank=16, dtype="bfloat16")

llama8b_default = partial(_llama8b, compiled=False, recomputed=SelectiveAC.Config())
llama8b_compiled = _llama8b
llama8b_compiled_selective = partial(_llama8b, recomputed=SelectiveAC.Config())
llama8b_fp8 = partial(_llama8b, fp8=True)
llama8b_lora = _adapters
llama8b_lora_budget = partial(_adapters, recomputed=MemoryBudgetAC.Config(memory_budget=0.5))
llama8b_lora_recomputed = partial(_adapters, recomputed=FullAC.Config())
llama8b_lora_fp8 = partial(_adapters, fp8=True)
qwen3b_default = partial(_qwen3b, compiled=False, recomputed=SelectiveAC.Config())
qwen3b_compiled = _qwen3b
qwen3b_compiled_selective = partial(_qwen3b, recomputed=SelectiveAC.Config())
tiny = partial(_config, llama3, "debugmodel", compiled=False)
tiny_lora = partial(tiny, rank=4)
