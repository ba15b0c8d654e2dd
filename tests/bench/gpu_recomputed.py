"""What a layer that is computed again has at work, on one GPU: few layers, many tokens, and what was there at the peak.

    python tests/bench/gpu_recomputed.py --output DIR [--peaks DIR] [--only NAME ...] [--list]

Models of five widths with two or three layers, so that a layer's backward pass is most of a peak, in each number
format, compiled or not, whole or with LoRA; and a few with selective checkpointing, ZeRO or eager attention. Each line
of the results has what the plan said before, as those of `gpu_held_out.py`; of those that were run h100_held_out.jsonl
keeps them as "looked_at again". With --peaks the sizes of all blocks at the peak of a step are written, from which
`inner_numbers_at_the_peak` comes: how many times the inner numbers of all tokens were there in 16 bits.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gpu_held_out import BASE, jobs_of, planned
from gpu_memory import DOCUMENT_TOKENS
from gpu_queue import add_arguments, run_jobs

LENGTH, ROWS, PASSES = 8192, 4, 2  # of a row in tokens; rows of a pass, and passes of a step
MEMORY_GIB = 79.6
_BF16, _PLAIN, _LORA = "precision.master_weights=bf16", "model.compile_layers=false", "peft=lora"
_AGAIN, _SELECTIVE = "activation=checkpointing", "activation=selective"
_CAST = "parallelism.mixed_precision=cast"
_ATTENTION = "peft.target_modules=[q_proj,k_proj,v_proj,o_proj]"
WAYS: dict[str, list[str]] = {
    "fc": [_AGAIN],
    "fb": [_AGAIN, _BF16],
    "fu": [_AGAIN, _PLAIN],
    "bu": [_AGAIN, _PLAIN, _BF16],
    "lc": [_AGAIN, _LORA],
    "lcf": [_AGAIN, _LORA, "precision.master_weights=fp32"],
    "lu": [_AGAIN, _PLAIN, _LORA],
    "ac": [_AGAIN, _LORA, _ATTENTION],
    "fs": [_SELECTIVE],
    "bs": [_SELECTIVE, _BF16],
    "z2c": [_AGAIN, "parallelism=zero2", _CAST],
    "z2h": [_AGAIN, "parallelism=zero2", "precision=fp16"],
    "z3": [_AGAIN, "parallelism=zero3"],
    "z3c": [_AGAIN, "parallelism=zero3", _CAST],
    "le": [_AGAIN, _PLAIN, _LORA, "attention=eager", "training.max_length=4096", "packing.row_length=4096",
           "training.micro_batch_size=1"],
}  # fmt: skip
# By the name that a case begins with: the model, its layers where it is the book's, and the ways it is run in.
MODELS: dict[str, tuple[str, int | None, tuple[str, ...]]] = {
    "L1": ("Llama-3.2-1B, 3 layers", None, ("fc", "fb", "fu", "bu", "lc", "lu", "fs", "ac", "lcf")),
    "Q": ("qwen25_3b", 3, ("fc", "fb", "fu", "bu", "lc", "lu", "fs")),
    "O": ("OLMo-2-1B, 3 layers", None, ("fc", "fb", "fu", "bu", "lc", "fs", "bs")),
    "G": ("granite-3.1-8b, 2 layers", None, ("fc", "fb", "fu", "bu", "fs", "bs")),
    "L8": ("llama3_8b", 2, ("fb", "bu")),
    "Q8": ("Qwen3-8B, 2 layers", None, ("fb", "bu")),
    # So many that DeepSpeed's step is the peak: planned by what was followed on a CPU, and met within 0.4%; "le"
    # was 8% too low, since nothing that is followed there shows the product in CUDA's softmax.
    "S": ("qwen25_3b", 20, ("z2c", "z2h", "z3", "z3c", "le")),
}


def cases(folder: Path, only: list[str] | None = None) -> list[dict[str, Any]]:
    """All that the plan allows, or those of some names; config.json of models are written below `folder`."""
    samples = ROWS * PASSES * LENGTH // DOCUMENT_TOKENS
    rows = [f"training.max_length={LENGTH}", f"packing.row_length={LENGTH}", f"training.micro_batch_size={ROWS}"]
    base = [word for word in BASE if not word.startswith("hardware.memory_gib=")]
    base += [f"hardware.memory_gib={MEMORY_GIB}", "training.max_steps=3", "parallelism=single"]
    base += ["hardware.gpus_per_node=1", *rows, f"training.global_samples={samples}", "attention=varlen_attention"]
    found = []
    for short, (model, layers, ways) in MODELS.items():
        for way in ways:
            case = {"model": model, "layers": layers, "gpus": 1, "accumulation": PASSES}
            case |= {"name": f"again_{short}_{way}", "overrides": [*base, *WAYS[way]]}
            if only and case["name"] not in only:
                continue
            said = planned(case, folder)
            found += [case | said] if said is not None else []
    return found


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, deadline_s=500)
    parser.add_argument("--only", nargs="*", metavar="NAME")
    parser.add_argument("--peaks", type=Path, help="a folder for the sizes of what filled the GPU at its peak")
    parser.add_argument("--configs", type=Path, default=Path("/tmp/configs"), help="where config.json are written")
    arguments = parser.parse_args()
    if arguments.peaks:
        arguments.peaks.mkdir(parents=True, exist_ok=True)
    found = cases(arguments.configs, arguments.only)
    run_jobs(jobs_of(found, 1, arguments.configs, arguments.peaks), arguments)


if __name__ == "__main__":
    main()
