"""How fast is a fine-tune on each GPU, and in what is its time spent? One JSON line per variant, side by side.

    python tests/bench/gpu_speed.py --output DIR [--gpus 2] [--only NAME ...] [--steps 40] [--deadline-s 400]

Qwen2.5-3B, or what a variant names, at full size: random weights, generated documents of lognormal(5.8, 0.9) tokens cut
to 16 to 4,096, all of whose tokens count; 32,768 tokens per GPU and optimizer step. The speed is that of real tokens,
the median of the optimizer steps after the first 10. A variant is what is typed after the recipe. Each has its GPU for
itself; of those named after `--profile` the kernels of the eighth step are looked at, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import cycle
from pathlib import Path
from typing import Any

from gpu_queue import Job, add_arguments, run_jobs
from gpu_recipes import SHORT, facts_of

from tunebook.plan.auto.decisions import AS_ASKED

DECIDED = ("model.one_pass_head",)  # by no variant of those that were there before it
WARM_UP_STEPS = 10  # compiled layers and flash attention 4 meet their shapes in these
TOKENS_PER_STEP = 32_768
DOCUMENTS_PER_GPU = 4000  # 60 steps without a second time around
DATA = ["model.weights=random", "dataset=synthetic", "dataset.train_on=everything",
        "training.max_length=4096", "training.global_samples=null"]  # fmt: skip
QUIET = ["evaluation=none", "optimizer.learning_rate=3e-5", "schedule.warmup_steps=3", "parallelism=single"]


def _rows(length: int) -> list[str]:
    return [f"packing.row_length={length}"]


_VARLEN = ["attention=varlen_attention"]
_COMPILED = [*_VARLEN, "model.compile_layers=true", "model.liger_kernel=false"]
_STORED = ["activation=stored"]
_AWAY = [*_STORED, "activation.offload=true"]
_FP8 = ["precision=fp8"]
_FLASH_4 = ["attention=varlen_attention_4"]
_TWO_PASS = ["model.one_pass_head=false"]  # TRL's output head as it is
_SELECTIVE = ["activation=selective"]
_BF16 = ["precision.master_weights=bf16"]
# As a V100 computes; a step of 4,096 tokens (8 documents of 482 in the mean) takes as long as one of 32,768 in bf16.
_VOLTA = ["precision=fp32", "precision.tf32=disabled", "training.global_tokens=4096"]
# As many layers as one GPU can train in fp32: what all 32 reach without another GPU, but for their larger share.
_TWELVE_LAYERS = [*_COMPILED, "model=llama3_8b", "model.facts.num_layers=12", "model.facts.num_parameters=3668021248",
                  *_STORED, *_rows(16384)]  # fmt: skip
_LORA = [*_VARLEN, "model=llama3_8b", "peft=lora", "precision.master_weights=fp32", "model.liger_kernel=false",
         *_STORED, *_rows(8192)]  # fmt: skip
# fmt: off
VARIANTS: dict[str, list[str]] = {
    "sdpa": ["attention=sdpa", *_rows(4096)],
    "varlen_8192": [*_VARLEN, *_STORED, *_rows(8192)],
    "varlen_16384": [*_VARLEN, *_STORED, *_rows(16384)],
    "flash_attention_4_8192": ["attention=flash_attention_4", *_STORED, *_rows(8192)],
    "compiled_8192": [*_COMPILED, *_STORED, *_rows(8192)],
    "compiled_16384": [*_COMPILED, *_STORED, *_rows(16384)],
    "compiled_8192_two_pass": [*_COMPILED, *_STORED, *_rows(8192), *_TWO_PASS],
    "compiled_16384_two_pass": [*_COMPILED, *_STORED, *_rows(16384), *_TWO_PASS],
    "compiled_8192_flash_4": [*_COMPILED, *_STORED, *_rows(8192), *_FLASH_4],
    "compiled_16384_flash_4": [*_COMPILED, *_STORED, *_rows(16384), *_FLASH_4],
    "compiled_32768": [*_COMPILED, *_STORED, *_rows(32768)],
    "compiled_8192_selective": [*_COMPILED, *_SELECTIVE, *_rows(8192)],
    "compiled_16384_selective": [*_COMPILED, *_SELECTIVE, *_rows(16384)],
    "compiled_32768_selective": [*_COMPILED, *_SELECTIVE, *_rows(32768)],
    "compiled_32768_selective_flash_4": [*_COMPILED, *_SELECTIVE, *_rows(32768), *_FLASH_4],
    "compiled_checkpointing_16384": [*_COMPILED, "activation=checkpointing", *_rows(16384)],
    "compiled_16384_fp8_selective": [*_COMPILED, *_SELECTIVE, *_rows(16384), *_FP8],
    "varlen_bf16_16384": [*_VARLEN, *_BF16, *_STORED, *_rows(16384)],
    "compiled_bf16_16384": [*_COMPILED, *_BF16, *_STORED, *_rows(16384)],
    "compiled_checkpointing_32768": [*_COMPILED, "activation=checkpointing", *_rows(32768)],
    "compiled_16384_fp8": [*_COMPILED, *_STORED, *_rows(16384), *_FP8],
    "compiled_16384_fp8_rowwise": [*_COMPILED, *_STORED, *_rows(16384), *_FP8, "precision.fp8_scaling=rowwise"],
    "volta_padded": [*_VOLTA, "attention=sdpa", "packing=padded", "activation=checkpointing",
                     "training.global_tokens=null", "training.global_samples=8"],
    "volta_sdpa": [*_VOLTA, "attention=sdpa", *_rows(4096)],
    "volta_by_document": [*_VOLTA, "attention=sdpa_by_document", *_rows(4096)],
    "llama8b_12_layers": _TWELVE_LAYERS,
    "llama8b_12_layers_fp8": [*_TWELVE_LAYERS, *_FP8],
    "llama8b_12_layers_flash_4": [*_TWELVE_LAYERS, *_FLASH_4],
    "llama8b_12_layers_fp8_flash_4": [*_TWELVE_LAYERS, *_FP8, *_FLASH_4],
    "lora_8b": _LORA,
    "lora_8b_compiled": [*_LORA, "model.compile_layers=true"],
    "lora_8b_compiled_selective": [*_LORA, "model.compile_layers=true", *_SELECTIVE],
    "lora_8b_compiled_selective_16384": [*_LORA, "model.compile_layers=true", *_SELECTIVE, *_rows(16384)],
    "lora_8b_compiled_bf16": [*_LORA, *_BF16, "model.compile_layers=true"],
    "lora_8b_compiled_bf16_16384": [*_LORA, *_BF16, "model.compile_layers=true", *_rows(16384)],
    "lora_8b_compiled_bf16_16384_two_pass":
        [*_LORA, *_BF16, "model.compile_layers=true", *_rows(16384), *_TWO_PASS],
    "lora_8b_compiled_bf16_16384_flash_4": [*_LORA, *_BF16, "model.compile_layers=true", *_rows(16384), *_FLASH_4],
}
# fmt: on
_LLAMA = ["model=llama3_8b", "parallelism=fsdp", *_COMPILED, *_rows(8192)]
_SPREAD = [*_COMPILED, *_STORED, *_rows(8192)]
_LONG = [*_COMPILED, *_STORED, *_rows(16384)]
_BUCKETS = ["parallelism.reduce_bucket_size=200000000"]  # elements; hidden_size squared, by the Trainer, is 4 million
_OVERLAPPED = [*_BUCKETS, "parallelism.allgather_bucket_size=200000000", "parallelism.overlap_comm=true"]
_PREFETCHED = [
    *_BUCKETS,
    "parallelism.prefetch_bucket_size=200000000",  # the next two blocks of a 3B model
    "parallelism.param_persistence_threshold=100000",
    "parallelism.max_live_parameters=2000000000",
]
SPREAD: dict[str, list[str]] = {  # over all GPUs of the machine
    "ddp": ["parallelism=ddp", *_SPREAD],
    "zero2": ["parallelism=zero2", *_SPREAD],
    "zero2_cast": ["parallelism=zero2", "parallelism.mixed_precision=cast", *_SPREAD],
    "zero2_overlapped": ["parallelism=zero2", *_OVERLAPPED, *_SPREAD],
    "zero3": ["parallelism=zero3", *_SPREAD],
    "zero3_prefetched": ["parallelism=zero3", *_PREFETCHED, *_SPREAD],
    "zero3_prefetched_not_compiled": ["parallelism=zero3", *_PREFETCHED, *_VARLEN, *_STORED, *_rows(8192)],
    "fsdp": ["parallelism=fsdp", *_SPREAD],
    "fsdp_grad_op": ["parallelism=fsdp_grad_op", *_SPREAD],
    "ddp_16384": ["parallelism=ddp", *_LONG],
    "zero2_16384": ["parallelism=zero2", *_LONG],
    "zero3_16384": ["parallelism=zero3", *_LONG],
    "fsdp_16384": ["parallelism=fsdp", *_LONG],
    "fsdp_grad_op_16384": ["parallelism=fsdp_grad_op", *_LONG],
    "ddp_away": ["parallelism=ddp", *_COMPILED, *_AWAY, *_rows(8192)],
    "zero2_away": ["parallelism=zero2", *_COMPILED, *_AWAY, *_rows(8192)],
    "fsdp_away": ["parallelism=fsdp", *_COMPILED, *_AWAY, *_rows(8192)],
    "fsdp_grad_op_away": ["parallelism=fsdp_grad_op", *_COMPILED, *_AWAY, *_rows(8192)],
    "fsdp_away_not_compiled": ["parallelism=fsdp", *_VARLEN, *_AWAY, *_rows(8192)],
    "llama8b_fsdp_bf16": [*_LLAMA, *_STORED],
    "llama8b_fsdp_few_channels": [*_LLAMA, *_STORED],
    "llama8b_fsdp_16384": [*_LLAMA, *_STORED, *_rows(16384)],
    "llama8b_fsdp_16384_two_pass": [*_LLAMA, *_STORED, *_rows(16384), *_TWO_PASS],
    "llama8b_fsdp_16384_flash_4": [*_LLAMA, *_STORED, *_rows(16384), *_FLASH_4],
    "llama8b_fsdp_fp8_16384_flash_4": [*_LLAMA, *_STORED, *_rows(16384), *_FP8, *_FLASH_4],
    "llama8b_fsdp_16384_expandable": [*_LLAMA, *_STORED, *_rows(16384)],
    "llama8b_fsdp_bf16_selective": [*_LLAMA, *_SELECTIVE],
    "llama8b_fsdp_16384_selective": [*_LLAMA, *_SELECTIVE, *_rows(16384)],
    "llama8b_fsdp_16384_selective_flash_4": [*_LLAMA, *_SELECTIVE, *_rows(16384), *_FLASH_4],
    "llama8b_fsdp_16384_checkpointing": [*_LLAMA, "activation=checkpointing", *_rows(16384)],
    "llama8b_fsdp_fp8_16384_selective": [*_LLAMA, *_SELECTIVE, *_rows(16384), *_FP8],
    "llama8b_fsdp_cast_16384": [*_LLAMA, *_STORED, *_rows(16384), "parallelism.mixed_precision=cast"],
    "llama8b_fsdp_fp8_16384": [*_LLAMA, *_STORED, *_rows(16384), *_FP8],
    "llama8b_grad_op": [*_LLAMA, *_STORED, "parallelism=fsdp_grad_op"],
    "llama8b_grad_op_16384": [*_LLAMA, *_STORED, *_rows(16384), "parallelism=fsdp_grad_op"],
    "llama8b_grad_op_fp8": [*_LLAMA, *_STORED, *_FP8, "parallelism=fsdp_grad_op"],
    "llama8b_grad_op_fp8_16384": [*_LLAMA, *_STORED, *_rows(16384), *_FP8, "parallelism=fsdp_grad_op"],
    "llama8b_fsdp_fp8": [*_LLAMA, *_STORED, *_FP8],
    "llama8b_fsdp_fp8_rowwise": [*_LLAMA, *_STORED, *_FP8, "precision.fp8_scaling=rowwise"],
}
KNOWN = VARIANTS | SPREAD
ENVIRONMENTS = {
    # NCCL takes up to 32 of an H200's 132 multiprocessors for its messages, which a product beside them then lacks.
    "llama8b_fsdp_few_channels": {"NCCL_MAX_CTAS": "8"},
    # One range of addresses that grows: rows of many lengths leave no holes that the next does not fit into.
    "llama8b_fsdp_16384_expandable": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
}


def jobs_of(names: list[str], arguments: argparse.Namespace) -> list[Job]:
    """A run of each variant, on the GPUs in turn."""
    places = cycle((gpu,) for gpu in range(arguments.gpus))
    jobs: list[Job] = []
    for name in names:
        gpus = tuple(range(arguments.gpus)) if name in SPREAD else next(places)
        words = ["qwen3b_zero2", "model=qwen25_3b", "model.liger_kernel=true", "model.compile_layers=false"]
        words += [*DATA, *QUIET, *SHORT]
        words += [f"training.global_tokens={TOKENS_PER_STEP * len(gpus)}", f"training.max_steps={arguments.steps}"]
        words += [f"dataset.synthetic.num_documents={DOCUMENTS_PER_GPU * len(gpus)}"]
        words += [f"hardware.gpus_per_node={len(gpus)}", *KNOWN[name], *arguments.more]
        words = without_repeats(words)
        model = next(word.removeprefix("model=") for word in words if word.startswith("model="))
        more = ENVIRONMENTS.get(name, {})
        if name in arguments.profile:
            more = more | {"TUNEBOOK_BENCH_PROFILE": str(arguments.runs / f"{name}.json")}
        jobs.append(
            Job(
                name=name,
                gpus=gpus,
                words=words,
                priority=len(jobs),
                host_gib=len(gpus) * 4 * facts_of(model)["num_parameters"] / 2**30,
                turn_timeout_s=arguments.timeout_s,
                environment={"OMP_NUM_THREADS": "8"} | more,
                line={"variant": KNOWN[name], "environment": ENVIRONMENTS.get(name, {}), "model": model,
                      "weights": "random", "data": "generated documents, every token counts"},
            )
        )  # fmt: skip
    return jobs


def without_repeats(words: list[str]) -> list[str]:
    """Of two words for one key the later: Hydra takes a key only once."""
    last = {word.split("=")[0]: word for word in words}
    return list(last.values())


def speed(metrics: Path) -> dict[str, Any]:
    """Of a run's records: medians after the warm-up."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    timed = [line for line in lines if "loss" in line][WARM_UP_STEPS:]
    if not timed:
        return {}
    found: dict[str, Any] = {"timed_steps": len(timed)}
    for key in ("tokens_per_second_per_gpu", "mfu", "padding_share", "seconds"):
        values = [line[key] for line in timed if line.get(key) is not None]
        name = "seconds_per_step" if key == "seconds" else key
        found[name] = round(statistics.median(values), 4) if values else None
    return found


def decided(plan: Path) -> list[str]:
    """What was left open and changes a step's kernels, as the run decided it: by its plan.json."""
    choices = json.loads(plan.read_text())["choices"] if plan.exists() else []
    return [
        f"{choice['key']}={json.dumps(choice['value'])}"
        for choice in choices
        if choice["key"] in DECIDED and choice["why"] != AS_ASKED
    ]


def main() -> None:
    """Parse the arguments, run the queue, and write what the variants have reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, deadline_s=400)
    parser.add_argument("--gpus", type=int, default=1, help="of the machine")
    parser.add_argument("--only", nargs="*", choices=KNOWN, default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--timeout-s", type=float, default=150, help="of one variant on its GPU")
    parser.add_argument("--more", nargs="*", default=[], help="overrides for every variant")
    parser.add_argument("--profile", nargs="*", choices=KNOWN, default=[], help="look at the kernels of these")
    arguments = parser.parse_args()
    arguments.max_ranks = min(arguments.max_ranks, 2 * arguments.gpus)
    lines = run_jobs(jobs_of(arguments.only, arguments), arguments)
    logs = arguments.logs or arguments.output / "logs"
    for line in lines:
        kept = ("name", "gpus", "variant", "environment", "model", "weights", "data", "exit_code", "steps",
                "first_loss", "last_loss", "memory_gib", "memory_reserved_gib", "machine")  # fmt: skip
        short = {key: line[key] for key in kept if key in line} | speed(logs / line["name"] / "metrics.jsonl")
        short |= {"resolved": decided(logs / line["name"] / "plan.json")}
        if (profile := arguments.runs / f"{line['name']}.json").exists():
            short |= {"profile": json.loads(profile.read_text())}
        with (arguments.output / "speed.jsonl").open("a") as file:
            file.write(json.dumps(short) + "\n")


if __name__ == "__main__":
    main()
