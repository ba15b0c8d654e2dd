"""Write the cases of rows that two GPUs share, for `gpu_runs.py`: losses, and the longest rows that the plan allows.

    python tests/bench/sequence_cases.py --cases CASES.jsonl --memory-gib 79.6 [--host-memory-gib 128] [--stretch 1.2]
    python tests/bench/gpu_runs.py CASES.jsonl --output DIR --gpus 2 --series sequence_fp32 sequence_bf16
    python tests/bench/gpu_runs.py CASES.jsonl --output DIR --gpus 2 --series longest_4b
    python tests/bench/gpu_runs.py CASES.jsonl --output DIR --gpus 2 --series recipe --profile qwen3_4b_long

`sequence_fp32` and `sequence_bf16` train the same packed rows for 50 steps on one GPU (`single`) and on two that share
each row, and with MLPs in tiles; losses may differ by 1e-4 and 2e-3. `longest_4b` (Qwen3-4B, every weight) and
`longest_8b` (Llama 3.1 8B, LoRA) train three steps of one document that is as long as `plan --longest` says, times
`--stretch`. The model's number of positions is raised, so that memory is the limit. A run that fails because memory ran
out has found the limit. `recipe` is qwen3_4b_long with 4 rows a step, and the same with compiled blocks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tunebook.config.compose import compose
from tunebook.hardware.detect import Machine
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.plan.longest import longest_rows

STEPS = 50
SHARED = ["hardware.gpus_per_node=2", "parallelism.sequence_group_size=2"]
ALONE = ["hardware.gpus_per_node=1", "parallelism=single"]
PLAIN = ["evaluation=none", "training.save_every_steps=null", f"training.max_steps={STEPS}"]
FP32 = [
    *PLAIN, "precision=fp32", "precision.tf32=disabled", "attention=sdpa_by_document", "training.global_samples=32",
    "packing.row_length=512", "schedule.warmup_steps=2",
]  # fmt: skip
# Six layers of Qwen2.5-0.5B on documents of up to 4,096 tokens, in eight packed rows a step.
BF16 = [
    *PLAIN, "model.weights=random", "model.facts.num_layers=6", "model.facts.num_parameters=225609856",
    "dataset=synthetic", "dataset.synthetic.num_documents=4000", "attention=varlen_attention",
    "training.max_length=4096", "packing.row_length=4096", "training.global_samples=null",
    "training.global_tokens=32768",
]  # fmt: skip
NOT_COMPILED, COMPILED = "model.compile_layers=false", "model.compile_layers=true"
SIXTEEN_BIT = "precision.master_weights=bf16"  # as TRL's guide to long contexts trains
TILES, OFFLOADED = "activation.mlp_tile_tokens=4096", "activation.offload=true"
LONGEST: dict[str, tuple[str, list[str], dict[str, list[str]]]] = {
    "longest_4b": ("qwen3_4b", ["peft=full"], {
        "single": ALONE,
        "single_16_bit": [*ALONE, SIXTEEN_BIT],
        "single_tiled_16_bit": [*ALONE, SIXTEEN_BIT, TILES],
        "single_tiled_offload_16_bit": [*ALONE, SIXTEEN_BIT, TILES, OFFLOADED],
        "fsdp": [*SHARED, "parallelism=fsdp"],
        "fsdp_16_bit": [*SHARED, "parallelism=fsdp", SIXTEEN_BIT],
        "zero3": [*SHARED, "parallelism=zero3"],
        "fsdp_offload": [*SHARED, "parallelism=fsdp", OFFLOADED],
        "fsdp_tiled": [*SHARED, "parallelism=fsdp", TILES],
        "zero3_tiled": [*SHARED, "parallelism=zero3", TILES],
        "fsdp_tiled_offload": [*SHARED, "parallelism=fsdp", TILES, OFFLOADED],
    }),
    "longest_8b": ("llama31_8b", ["peft=lora", "peft.dropout=0"], {
        "single": ALONE,
        "single_tiled": [*ALONE, TILES],
        "single_tiled_offload": [*ALONE, TILES, OFFLOADED],
        "fsdp": [*SHARED, "parallelism=fsdp"],
        "fsdp_offload": [*SHARED, "parallelism=fsdp", OFFLOADED],
        "fsdp_tiled": [*SHARED, "parallelism=fsdp", TILES],
        "fsdp_tiled_offload": [*SHARED, "parallelism=fsdp", TILES, OFFLOADED],
    }),
}  # fmt: skip
# qwen3_4b_long with an eighth of its rows a step, each of one document.
RECIPE = [
    "model.weights=random", "dataset=synthetic", "dataset.synthetic.num_documents=64",
    "dataset.synthetic.min_tokens=32768", "dataset.synthetic.max_tokens=32768", *PLAIN[:2],
    "training.evaluate_every_steps=null", "training.log_every_steps=1", "training.global_tokens=131072",
    "training.max_steps=10",
]  # fmt: skip
_POSITIONS, _UNIT = 2**20, 256
NO_GPU = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=120.0)


def parity_cases() -> Iterator[dict[str, Any]]:
    """The losses of shared rows and of whole ones."""
    for strategy in ("single", "ddp", "zero3", "fsdp"):
        where = ALONE if strategy == "single" else [*SHARED, f"parallelism={strategy}"]
        gpus = 1 if strategy == "single" else 2
        yield {"series": "sequence_fp32", "name": strategy, "gpus": gpus, "recipe": "quickstart",
               "overrides": [*FP32, *where]}  # fmt: skip
        yield {"series": "sequence_bf16", "name": strategy, "gpus": gpus, "recipe": "qwen05b_single",
               "overrides": [*BF16, NOT_COMPILED, *where]}  # fmt: skip
    for name, where, gpus in (("single_tiled", ALONE, 1), ("fsdp_tiled", [*SHARED, "parallelism=fsdp"], 2)):
        yield {"series": "sequence_fp32", "name": name, "gpus": gpus, "recipe": "quickstart",
               "overrides": [*FP32, *where, "activation.mlp_tile_tokens=128"]}  # fmt: skip
        yield {"series": "sequence_bf16", "name": name, "gpus": gpus, "recipe": "qwen05b_single",
               "overrides": [*BF16, NOT_COMPILED, *where, "activation.mlp_tile_tokens=1024"]}  # fmt: skip
    for name, word in (("qwen3_4b_long", NOT_COMPILED), ("qwen3_4b_long_compiled", COMPILED)):
        yield {"series": "recipe", "name": name, "gpus": 2, "recipe": "qwen3_4b_long", "against": "qwen3_4b_long",
               "weights": "random", "overrides": [*RECIPE, word]}  # fmt: skip
    yield {"series": "sequence_bf16", "name": "fsdp_compiled", "gpus": 2, "recipe": "qwen05b_single",
           "overrides": [*BF16, COMPILED, *SHARED, "parallelism=fsdp"]}  # fmt: skip


def longest_cases(memory_gib: float, host_memory_gib: float | None, stretch: float) -> Iterator[dict[str, Any]]:
    """The longest rows that the plan allows on GPUs of that size, and hosts of that size for each GPU.

    Whole layers are recomputed.
    """
    for series, (model, words, ways) in LONGEST.items():
        for name, where in ways.items():
            gpus = 2 if where[0] == SHARED[0] else 1
            words_of_case = [
                f"model={model}", "model.weights=random", f"model.facts.max_position_embeddings={_POSITIONS}",
                "dataset=synthetic", "dataset.synthetic.num_documents=8", "hardware=hopper",
                f"hardware.memory_gib={memory_gib}", "attention=varlen_attention", NOT_COMPILED, "schedule=constant",
                "activation=checkpointing", "optimizer.learning_rate=1e-5", "training.global_samples=1", *words, *where,
                *PLAIN[:2], "training.max_steps=3",
            ]  # fmt: skip
            if host_memory_gib is not None:
                words_of_case.append(f"hardware.host_memory_gib={gpus * host_memory_gib:g}")
            config = compose(None, [*words_of_case, "training.max_length=4096"], []).config
            row, *_ = longest_rows(resolve_auto(config, NO_GPU))  # the first is as typed
            tokens = round(row.tokens * stretch) // _UNIT * _UNIT
            if not tokens:
                continue
            length = [f"{key}={tokens}" for key in ("training.max_length", "packing.row_length",
                      "dataset.synthetic.min_tokens", "dataset.synthetic.max_tokens")]  # fmt: skip
            yield {"series": series, "name": name, "gpus": gpus, "weights": "random", "stretch": stretch,
                   "overrides": [*words_of_case, *length, "training.micro_batch_size=1"]}  # fmt: skip


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, required=True)
    parser.add_argument("--memory-gib", type=float, required=True, help="of one GPU, as `tunebook doctor` says")
    parser.add_argument("--host-memory-gib", type=float, help="of a machine, for each GPU; not a limit if not given")
    parser.add_argument("--stretch", type=float, default=1.0, help="rows this many times as long as planned")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    """Write the cases."""
    arguments = parse(words)
    cases = [*parity_cases(), *longest_cases(arguments.memory_gib, arguments.host_memory_gib, arguments.stretch)]
    arguments.cases.write_text("".join(json.dumps(case) + "\n" for case in cases))


if __name__ == "__main__":
    main()
