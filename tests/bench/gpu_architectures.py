"""Measure models of many architectures on a GPU machine: with blocks as they are, compiled, and compiled selectively.

    python tests/bench/gpu_architectures.py --output DIR [--only NAME ...] [--modes plain compiled selective] [--list]

Each is the config.json of a published model (its sizes as published, its dropout mostly left out) cut to some whole
layers, with random weights, as a user's own folder: `model=hub model.path=DIR`. Packed rows of 8,192 tokens are
exactly full of documents of 1,024, so that peaks of memory can be compared with the plan. A line of JSON for each
says the losses, the speed and the peak.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from gpu_queue import Job, add_arguments, run_jobs

STEPS = 12
DOCUMENT_TOKENS, ROW = 1024, 8192
BASE = [
    "model=hub", "model.weights=random", "hardware=hopper", "dataset=synthetic",
    "dataset.synthetic.num_documents=1024", f"dataset.synthetic.min_tokens={DOCUMENT_TOKENS}",
    f"dataset.synthetic.max_tokens={DOCUMENT_TOKENS}", f"training.max_steps={STEPS}", "schedule=constant",
    "training.save_every_steps=null", "training.log_every_steps=1", "evaluation=none", "launcher=local",
    f"training.max_length={ROW}", f"packing.row_length={ROW}", "training.micro_batch_size=1",
]  # fmt: skip
_PLAIN = ["model.compile_layers=false", "activation=stored"]
_VARLEN = ["attention=varlen_attention", *_PLAIN]
_COMPILED = ["attention=varlen_attention", "model.compile_layers=true", "activation=stored"]
_SELECTIVE = ["attention=varlen_attention", "model.compile_layers=true", "activation=selective"]
_BF16, _LORA, _FSDP = "precision.master_weights=bf16", "peft=lora", "parallelism=fsdp"
_TWO_PASS = "model.one_pass_head=false"
MODES = {
    "plain": _VARLEN,
    "compiled": _COMPILED,
    "selective": _SELECTIVE,
    "bf16_weights": [*_VARLEN, _BF16],
    "compiled_bf16_weights": [*_COMPILED, _BF16],
    "sdpa": ["attention=sdpa", *_PLAIN],
    "flex": ["attention=flex_attention", *_PLAIN],
    "eager": ["attention=eager", *_PLAIN],
    "eager_two_pass_head": ["attention=eager", *_PLAIN, _TWO_PASS],
    "two_pass_head": [*_VARLEN, _TWO_PASS],
    "checkpointing": ["attention=sdpa", "model.compile_layers=false", "activation=checkpointing"],
    "fsdp": [_FSDP],
    "fsdp_plain": [_FSDP, *_VARLEN],
    "zero2": ["parallelism=zero2"],
    "lora": [*_VARLEN, _LORA],
    "compiled_lora": [*_COMPILED, _LORA],
    "selective_lora": [*_SELECTIVE, _LORA],
}


def sizes(hidden: int, inner: int, layers: int, heads: int, groups: int, words: int, **more: Any) -> dict[str, Any]:
    """Of a Llama-like config.json; what else it says is `more`."""
    return {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": groups, "vocab_size": words, "max_position_embeddings": ROW, "bos_token_id": 0,
        "eos_token_id": 1, "pad_token_id": 1, **more,
    }  # fmt: skip


TIED: dict[str, Any] = {"tie_word_embeddings": True}
APART: dict[str, Any] = {"tie_word_embeddings": False}
# By transformers' model_type: the published model, and its config with fewer layers. `num_hidden_layers` holds every
# kind of layer of those that alternate.
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
SPREAD = ("fsdp", "fsdp_plain", "zero2")  # over two GPUs; what is left open, auto decides
# Which ways were tried, where not all three.
WAYS: dict[str, tuple[str, ...]] = {
    # caps its attention's logits, which neither sdpa nor torch's varlen kernel can
    "gemma2": ("eager", "eager_two_pass_head", "flex"),
    "gpt2": ("sdpa",),  # asks for dropout of the attention, which the varlen kernel does not know
    "gpt_oss": ("eager", "flex"),
    "olmo2": ("plain", "compiled", "selective", "fsdp"),
    "granite": ("plain", "compiled", "selective", "two_pass_head"),
    "cohere": ("plain", "compiled", "selective", "two_pass_head"),
    "gpt_neox": ("plain", "compiled", "selective", "bf16_weights", "compiled_bf16_weights", "sdpa", "checkpointing"),
    "qwen3": ("plain", "compiled", "selective", "lora", "compiled_lora", "selective_lora", *SPREAD),
    "gemma3_text": ("plain", "compiled", "selective", "sdpa"),
    "gemma3": ("plain", "sdpa", "lora", "fsdp_plain", "zero2"),
}


def config_of(kind: str) -> dict[str, Any]:
    """What the model's config.json says; what it leaves out are transformers' defaults."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = AutoConfig.for_model(kind, **MODELS[kind][1])
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
    config.dtype = "bfloat16"
    content: dict[str, Any] = config.to_dict()
    return content


def jobs_of(names: list[str], modes: list[str], num_gpus: int, folder: Path) -> list[Job]:
    """Each model in each way. All ways of a model go to one GPU, since no two are equally fast."""
    jobs: list[Job] = []
    loads = [0] * num_gpus
    for kind in names:
        gpu = loads.index(min(loads))
        (folder / kind).mkdir(parents=True, exist_ok=True)
        config = config_of(kind)
        (folder / kind / "config.json").write_text(json.dumps(config))
        for mode in WAYS.get(kind, ("plain", "compiled", "selective")):
            if mode not in modes:
                continue
            gpus = (0, 1) if mode in SPREAD else (gpu,)
            size = [f"hardware.gpus_per_node={len(gpus)}"]
            size += [f"training.global_samples={len(gpus) * ROW // DOCUMENT_TOKENS}"]
            words = [*BASE, *size, f"model.path={folder / kind}", *MODES[mode]]
            line = {
                "kind": kind, "mode": mode, "model": MODELS[kind][0], "overrides": [*BASE, *size, *MODES[mode]],
                "sizes": MODELS[kind][1], "weights": "random",
                "data": f"generated documents of {DOCUMENT_TOKENS} tokens",
            }  # fmt: skip
            loads[gpu] += 1
            jobs.append(
                Job(name=f"{kind}_{mode}", gpus=gpus, words=words, line=line, priority=len(jobs), turn_timeout_s=120)
            )
    return jobs


def main() -> None:
    """Parse the arguments and run the queue."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, deadline_s=500)
    parser.add_argument("--only", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES))
    parser.add_argument("--gpus", type=int, default=2, help="of the machine")
    parser.add_argument(
        "--configs", type=Path, default=Path("/tmp/configs"), help="where config.json files are written"
    )
    arguments = parser.parse_args()
    run_jobs(jobs_of(arguments.only, arguments.modes, arguments.gpus, arguments.configs), arguments)


if __name__ == "__main__":
    main()
