"""Attention sinks on a GPU: GPT-OSS by `varlen_attention` against transformers' own eager attention. One JSON line.

    python tests/bench/sinks_gpu.py --output DIR [--layers 2]

Three checks on packed documents, each in bf16 and against fp32: the attention alone with the published heads; a tiny
model; layers of the published width, also with compiled blocks. The error of a tensor is the norm of its difference
from fp32 over fp32's norm. Eager attention in bf16 computes each document alone and has such an error, too: a check is
`ok` if ours is at most `ALLOWED` times as large, for the logits and for the gradient of every parameter. The speed of
both is measured by `gpu_runs.py`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from gpu_models import MODELS
from gpu_queue import machine_versions, require_gpus, wait_for_turn
from torch.nn import functional
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from tunebook.config.choices import Attention
from tunebook.model.blocks import compile_layers
from tunebook.model.varlen_attention import attention_with_sinks, register

ALLOWED = 1.5
NEGLIGIBLE = 1e-3  # an error that is none, in bf16
LENGTHS = (1500, 300, 900, 60, 1, 1335)
HEADS, GROUPS, SIZE, WINDOW = 64, 8, 64, 128  # of gpt-oss-20b
TINY: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 32,
    "num_key_value_heads": 2, "vocab_size": 512, "num_local_experts": 4, "num_experts_per_tok": 4,
    "sliding_window": 32, "pad_token_id": 0,
}  # fmt: skip

Tensors = dict[str, torch.Tensor]


def error_of(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the difference over the exact one's norm."""
    return float((found.float() - exact.float()).norm() / exact.float().norm().clamp_min(1e-12))


def judged(ours: Tensors, eager: Tensors, exact: Tensors) -> dict[str, Any]:
    """The largest error of each kind of tensor, of ours and of eager attention, and whether ours is small enough."""
    largest: dict[str, list[float]] = {}
    failed: list[str] = []
    for name, tensor in exact.items():
        one, other = error_of(ours[name], tensor), error_of(eager[name], tensor)
        if not one <= max(ALLOWED * other, NEGLIGIBLE):
            failed.append(name)
        kind = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        kept = largest.setdefault(kind, [0.0, 0.0])
        largest[kind] = [max(kept[0], one), max(kept[1], other)]
    errors = {kind: {"ours": round(one, 6), "eager": round(other, 6)} for kind, (one, other) in largest.items()}
    return {"ok": not failed, "failed": failed[:8], "errors": errors}


def attend(device: str, dtype: torch.dtype, window: int | None, *, is_ours: bool) -> Tensors:
    """The result of the attention alone and its gradients, for the same random inputs whatever the format."""
    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    shapes = {"query": (tokens, HEADS, SIZE), "key": (tokens, GROUPS, SIZE), "value": (tokens, GROUPS, SIZE)}
    inputs = {name: torch.randn(shape).to(device, torch.bfloat16).to(dtype) for name, shape in shapes.items()}
    inputs["sinks"] = torch.randn(HEADS).to(device, torch.bfloat16).to(dtype)
    grad = torch.randn(tokens, HEADS, SIZE).to(device, torch.bfloat16).to(dtype)
    query, key, value, sinks = (tensor.requires_grad_() for tensor in inputs.values())
    if is_ours:
        ends = ends_of(LENGTHS, device)
        found = attention_with_sinks(
            query, key, value, sinks, ends, max(LENGTHS), SIZE**-0.5, -1 if window is None else window - 1
        )
    else:
        layer = SimpleNamespace(sinks=sinks, num_key_value_groups=HEADS // GROUPS, training=True)
        parts = zip(*(tensor.split(LENGTHS) for tensor in (query, key, value)), strict=True)
        found = torch.cat([eager(layer, *part, window) for part in parts])
    found.backward(grad)
    return {"attended": found.detach()} | {name: tensor.grad for name, tensor in inputs.items()}  # type: ignore[dict-item]


def eager(layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None) -> torch.Tensor:
    """transformers' attention of one document. Shapes: (tokens, heads, size)."""
    places = torch.arange(len(query), device=query.device)
    behind = places[:, None] - places[None]
    seen = (behind >= 0) & (behind < (window or len(query)))
    mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device)
    mask.masked_fill_(~seen, torch.finfo(query.dtype).min)
    parts = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    return eager_attention_forward(layer, *parts, mask[None, None], SIZE**-0.5)[0][0]


def ends_of(lengths: tuple[int, ...], device: str) -> torch.Tensor:
    """The places between documents."""
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


class Models:
    """One set of random weights in three models: exact, eager and ours."""

    def __init__(self, keys: dict[str, Any], lengths: tuple[int, ...], device: str, seed: int) -> None:
        self.keys, self.lengths, self.device = keys, lengths, device
        torch.manual_seed(seed)
        drawn = self._make("eager", torch.bfloat16, {})
        with torch.no_grad():
            for name, parameter in drawn.named_parameters():
                if name.endswith(("sinks", "bias")):
                    parameter.normal_(std=1.0 if name.endswith("sinks") else 0.02)
                if name.endswith("router.weight"):
                    parameter.normal_(std=0.02)
        self.weights = drawn.state_dict()
        self.ids = torch.randint(2, keys["vocab_size"], (1, sum(lengths)), device=device)

    def _make(self, attention: str, dtype: torch.dtype, options: dict[str, Any]) -> Any:
        config = GptOssConfig(**self.keys)
        config._attn_implementation = attention
        with torch.device(self.device):
            model: Any = GptOssForCausalLM._from_config(config, dtype=dtype, **options)
        return model

    def passes(self, attention: str, dtype: torch.dtype, *, compiles: bool = False) -> Tensors:
        """Logits and all gradients. fp32 uses the experts' plain loop, since grouped products are for bf16."""
        model = self._make(attention, dtype, {"experts_implementation": "eager"} if dtype is torch.float32 else {})
        model.load_state_dict(self.weights)
        if compiles:
            compile_layers(model)
        if attention == "eager":
            alone = [model(input_ids=part, use_cache=False).logits for part in self.ids.split(self.lengths, dim=1)]
            logits = torch.cat(alone, dim=1)
        else:
            places = torch.cat([torch.arange(length, device=self.device) for length in self.lengths])[None]
            ends, longest = ends_of(self.lengths, self.device), max(self.lengths)
            lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
            logits = model(input_ids=self.ids, position_ids=places, use_cache=False, **lengths).logits
        functional.cross_entropy(logits[0].float(), self.ids[0].roll(-1)).backward()
        found = {"logits": logits.detach()}
        return found | {name: parameter.grad for name, parameter in model.named_parameters()}


def check_model(
    keys: dict[str, Any], lengths: tuple[int, ...], device: str, *, compiles: bool, seeds: Sequence[int] = (0,)
) -> dict[str, Any]:
    """The verdicts on one size of the model: uncompiled, and compiled if asked for.

    A tensor's error is that over the models of all seeds: in one gradient of four numbers, such as that of a small
    router's biases, a single rounding decides, and differently on each processor.
    """
    models = [Models(keys, lengths, device, seed) for seed in seeds]

    def passes(attention: str, dtype: torch.dtype, *, compiles: bool = False) -> Tensors:
        each = [model.passes(attention, dtype, compiles=compiles) for model in models]
        return {name: torch.stack([tensors[name] for tensors in each]) for name in each[0]}

    exact, theirs = passes("eager", torch.float32), passes("eager", torch.bfloat16)
    ours = Attention.varlen_attention.value
    found = {"uncompiled": judged(passes(ours, torch.bfloat16), theirs, exact)}
    if compiles:
        found["compiled"] = judged(passes(ours, torch.bfloat16, compiles=True), theirs, exact)
    return found


def check_attention(device: str) -> dict[str, Any]:
    """The verdicts on the attention alone, with and without a window."""
    found = {}
    for name, window in (("all keys", None), (f"window of {WINDOW}", WINDOW)):
        exact, theirs = (attend(device, dtype, window, is_ours=False) for dtype in (torch.float32, torch.bfloat16))
        found[name] = judged(attend(device, torch.bfloat16, window, is_ours=True), theirs, exact)
    return found


def main() -> None:
    """Run the checks and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=2, help="of the published width")
    arguments = parser.parse_args()
    require_gpus(1)
    register(Attention.varlen_attention)
    wait_for_turn()
    published = MODELS["gpt_oss"][1] | {"num_hidden_layers": arguments.layers}
    found = {
        "attention": check_attention("cuda"),
        "tiny": check_model(TINY, LENGTHS, "cuda", compiles=False),
        "published width": check_model(published, LENGTHS, "cuda", compiles=True),
    }
    is_ok = all(check["ok"] for checks in found.values() for check in checks.values())
    line = {"checks": found, "layers": arguments.layers, "verdict": "ok" if is_ok else "failed: see checks"}
    line |= {"memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3),
             "hardware": torch.cuda.get_device_name(), "machine": machine_versions()}  # fmt: skip
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "sinks.json").write_text(json.dumps(line))
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
