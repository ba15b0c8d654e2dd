"""What `fp8_products.py` trains: the first layers of Llama 3.1 8B, their products computed as asked."""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tunebook.config.choices import Attention, Fp8Scaling
from tunebook.model.blocks import compile_layers, transformer_blocks
from tunebook.model.fp8 import FP8, convert_to_fp8, in_fp8, scaled_product
from tunebook.model.varlen_attention import register
from tunebook.train.one_pass_head import OnePassLogProbFunction

if TYPE_CHECKING:
    from fp8_products import Variant

PASSES, DOCUMENT = 4, 512  # rows of a step; tokens
_TILE_TOKENS = 4096


class OwnProduct(torch.autograd.Function):
    """hidden (T, K) times weight (N, K) -> (T, N) in bf16, with both gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, weight_gradient: str) -> torch.Tensor:
        """Scales by token and by output feature."""
        values, scale = in_fp8(hidden)
        ctx.save_for_backward(hidden, scale, weight)
        ctx.weight_gradient = weight_gradient
        return scaled_product(values, scale, *in_fp8(weight))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Scales by token and by input feature for the hidden state's gradient."""
        hidden, hidden_scale, weight = ctx.saved_tensors
        values, scale = in_fp8(gradient)
        of_hidden = scaled_product(values, scale, *in_fp8(weight.t()))
        if ctx.weight_gradient == "16_bit":
            of_weight = gradient.t() @ hidden
        elif ctx.weight_gradient == "feature":
            of_weight = scaled_product(*in_fp8(gradient.t()), *in_fp8(hidden.t()))
        else:
            of_weight = _by_tensor(gradient, hidden, scale.amax(), hidden_scale.amax())
        return of_hidden, of_weight.to(weight.dtype), None


def _by_tensor(
    gradient: torch.Tensor, hidden: torch.Tensor, scale: torch.Tensor, hidden_scale: torch.Tensor
) -> torch.Tensor:
    """(T, N) and (T, K), each with one scale -> (N, K) in bf16."""
    left, right = ((gradient.float() / scale).to(FP8).t(), (hidden.float() / hidden_scale).to(FP8).t())
    if not left.is_cuda:
        return ((left.float() * scale) @ (right.float() * hidden_scale).t()).to(torch.bfloat16)
    return torch._scaled_mm(
        left.contiguous(), right.contiguous().t(), scale_a=scale, scale_b=hidden_scale, out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )  # fmt: skip


class OwnLinear(nn.Linear):
    """A trained linear layer without a bias."""

    weight_gradient = "tensor"

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., K) -> (..., N) in bf16."""
        function: Any = OwnProduct
        rows = hidden.reshape(-1, hidden.shape[-1]).to(torch.bfloat16)
        product: torch.Tensor = function.apply(rows, self.weight, self.weight_gradient)
        return product.reshape(*hidden.shape[:-1], -1)


def convert(model: Any, variant: Variant, *, emulate: bool) -> None:
    """Make the layers of the blocks multiply as the variant says."""
    if variant.by == "own":
        for block in transformer_blocks(model).values():
            for layer in block.modules():
                if type(layer) is nn.Linear:
                    layer.__class__ = OwnLinear
                    layer.weight_gradient = variant.weight_gradient  # type: ignore[assignment]
    elif variant.by == "torchao":
        convert_to_fp8(model, Fp8Scaling.tensorwise, emulate=emulate)
        for layer in model.modules():
            config: Any = getattr(layer, "config", None)
            for name in variant.fast if hasattr(config, "gemm_config_output") else ():
                product = f"gemm_config_{name}"
                layer.config = config = replace(config, **{product: replace(config.gemm_config_output)})


def build(variant: Variant, asked: argparse.Namespace, device: str) -> Any:
    """The model with compiled blocks."""
    torch.manual_seed(0)
    register(Attention.varlen_attention)
    hidden = asked.hidden_size
    sizes = {"hidden_size": hidden, "intermediate_size": hidden * 7 // 2, "num_hidden_layers": asked.layers,
             "num_attention_heads": hidden // 128, "num_key_value_heads": max(hidden // 512, 1),
             "vocab_size": 128256 if hidden == 4096 else 1024, "max_position_embeddings": 131072,
             "tie_word_embeddings": False}  # fmt: skip
    loader: Any = AutoModelForCausalLM
    with torch.device(device):
        model = loader.from_config(
            AutoConfig.for_model("llama", **sizes),
            attn_implementation="varlen_attention" if device == "cuda" else "sdpa",
            dtype=torch.float32,
        )
    convert(model, variant, emulate=device == "cpu")
    model.train()
    compile_layers(model, backend="inductor" if device == "cuda" else "aot_eager")
    return model


def measure(name: str, variant: Variant, asked: argparse.Namespace) -> dict[str, Any]:
    """Train some steps."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch._dynamo.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    began, length = time.time(), asked.row_length
    model = build(variant, asked, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5, fused=True)
    draw = torch.Generator().manual_seed(1)
    document = min(DOCUMENT, length // 2)
    ends = torch.arange(0, length + 1, document, dtype=torch.int32, device=device)
    row = {"position_ids": (torch.arange(length) % document)[None].to(device), "use_cache": False}
    if device == "cuda":
        row |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": document, "max_length_k": document}
    seconds, losses, profiler = [], [], None
    for step in range(asked.steps):
        if name == asked.profile and step == asked.steps - 1:
            profiler = torch.profiler.profile()
            profiler.start()
        start, total = time.time(), 0.0
        for _ in range(PASSES):
            tokens = torch.randint(0, 1000, (1, length), generator=draw).to(device)
            with torch.autocast(device, torch.bfloat16):
                hidden = model.model(input_ids=tokens, **row).last_hidden_state[0]
                loss = _loss(hidden[:-1], model.lm_head.weight, tokens[0, 1:]) / PASSES
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.time() - start)
        losses.append(round(total, 5))
    if profiler is not None:
        profiler.stop()
        sort = f"self_{device}_time_total"
        table = profiler.key_averages().table(sort_by=sort, row_limit=60, max_name_column_width=90)
        asked.output.with_suffix(f".{name}.kernels.txt").write_text(table)
        seconds.pop()  # of the profiler, too
    return {
        "tokens_per_second": round(PASSES * length / min(seconds)), "seconds": [round(each, 3) for each in seconds],
        "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device == "cuda" else None,
        "losses": losses, "took_s": round(time.time() - began, 1),
    }  # fmt: skip


def _loss(hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The mean negative log-likelihood."""
    if not hidden.is_cuda:
        return nn.functional.cross_entropy((hidden @ weight.t()).float(), tokens)
    function: Any = OnePassLogProbFunction
    log_probs: torch.Tensor = function.apply(hidden, weight, None, tokens, 1.0, _TILE_TOKENS)[0]
    return -log_probs.mean()
