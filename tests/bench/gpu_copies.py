"""What it is worth that autocast keeps the weights it converts: one JSON line for kept and one for not kept.

    python tests/bench/gpu_copies.py MODEL_FOLDER [--tokens 64]

The same model in fp32, computed in bf16, on the GPU: seconds for an answer of some tokens, seconds for one batch of
long prompts, and the most memory that each took in addition to the weights. `evaluate/trained_model.py` chooses one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

GIB = 2**30
PROMPT_TOKENS, BATCH_TOKENS, NUM_ROWS = 64, 512, 16


def measure(work: Callable[[], Any], device: str) -> dict[str, Any]:
    """The faster of two runs after one to warm up, and the memory beside what was there before."""
    seconds = []
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    for _ in range(3):
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.monotonic()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - started)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else before
    return {"seconds": round(min(seconds[1:]), 4), "beside_the_weights_gib": round((peak - before) / GIB, 3)}


def main() -> None:
    """Measure both ways, the answer and the batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    model = model.to(device).eval()
    torch.manual_seed(0)
    prompt = torch.randint(10, 800, (1, PROMPT_TOKENS), device=device)
    batch = torch.randint(10, 800, (NUM_ROWS, BATCH_TOKENS), device=device)

    def answer() -> Any:
        count = {"min_new_tokens": arguments.tokens, "max_new_tokens": arguments.tokens}
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **count)

    def read() -> Any:
        return model(batch, logits_to_keep=1).logits

    for is_kept in (True, False):
        model.requires_grad_(is_kept)
        with torch.no_grad():
            line: dict[str, Any] = {"is_kept": is_kept, "device": device, "tokens": arguments.tokens}
            line["weights_gib"] = round(sum(p.nbytes for p in model.parameters()) / GIB, 3)
            for name, work in (("answer", answer), ("batch", read)):

                def converted(work: Callable[[], Any] = work) -> Any:
                    with torch.autocast(device, dtype=torch.bfloat16):
                        return work()

                line[name] = measure(converted, device)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
