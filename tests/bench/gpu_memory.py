"""Measure the peak memory of many configurations on a GPU machine: what the memory plan is held against.

    python tests/bench/gpu_memory.py --output DIR [--only NAME ...] [--deadline-s 500] [--list]

Random weights of the real architectures, some cut to whole layers (`layers` in each line), on generated documents of
256 tokens each, so that every packed row is exactly full. Three optimizer steps: the peak comes with the second, when
the optimizer has its state; eight with ZeRO-3, which keeps more and more parameters whole until it knows their order.
Nothing of a size depends on the numbers that weights and tokens have.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field

from gpu_queue import Job, add_arguments, run_jobs
from gpu_recipes import facts_of, slice_words

STEPS = 3
ZERO3_STEPS = 8
DOCUMENT_TOKENS = 256
BASE = [
    "model.weights=random", "model.facts.dtype=bfloat16", "hardware=hopper", "dataset=synthetic",
    "dataset.synthetic.num_documents=1024", f"dataset.synthetic.min_tokens={DOCUMENT_TOKENS}",
    f"dataset.synthetic.max_tokens={DOCUMENT_TOKENS}", f"training.max_steps={STEPS}", "schedule=constant",
    "training.save_every_steps=null", "training.log_every_steps=1", "evaluation=none", "launcher=local",
    "attention=sdpa", "model.liger_kernel=false", "model.compile_layers=false",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration."""

    model: str  # its group
    gpus: int = 1
    layers: int | None = None  # None: all
    length: int = 4096  # tokens of a row
    micro: int = 1  # rows of a pass
    accumulation: int = 1
    words: list[str] = field(default_factory=list)

    def overrides(self) -> tuple[list[str], int]:
        """After `tunebook train`, and the number of parameters."""
        facts = facts_of(self.model)
        sliced, total = slice_words(self.model, self.layers) if self.layers else ([], facts["num_parameters"])
        is_padded = "packing=padded" in self.words
        rows = self.gpus * self.micro * self.accumulation
        batch = f"training.global_samples={rows if is_padded else rows * self.length // DOCUMENT_TOKENS}"
        lengths = [f"training.max_length={self.length if not is_padded else DOCUMENT_TOKENS}"]
        lengths += [] if is_padded else [f"packing.row_length={self.length}"]
        words = [f"model={self.model}", *BASE, *sliced, f"hardware.gpus_per_node={self.gpus}", batch, *lengths]
        is_zero3 = any(word.startswith("parallelism=zero3") for word in self.words)
        steps = [f"training.max_steps={ZERO3_STEPS}"] if is_zero3 else []
        return [*words, f"training.micro_batch_size={self.micro}", *steps, *self.words], total


STORED, RECOMPUTED = ["activation=stored"], ["activation=checkpointing"]
LORA, FP32 = ["peft=lora"], ["precision=fp32", "precision.tf32=disabled"]
COMPILED = ["attention=varlen_attention", "model.compile_layers=true"]
LIGER, ALL_BF16 = ["model.liger_kernel=true"], ["precision.master_weights=bf16"]


def _spread(name: str, *more: str) -> list[str]:
    activation = [] if RECOMPUTED[0] in more else STORED
    return [f"parallelism={name}", *activation, *more]


CASES: dict[str, Case] = {
    "05b_2048": Case(model="qwen25_05b", length=2048, words=STORED),
    "05b_1024": Case(model="qwen25_05b", length=1024, words=STORED),
    "05b_8192": Case(model="qwen25_05b", length=8192, words=STORED),
    "05b_8192_checkpointing": Case(model="qwen25_05b", length=8192, words=RECOMPUTED),
    "05b_16384_checkpointing": Case(model="qwen25_05b", length=16384, words=RECOMPUTED),
    "05b_2048_fp32": Case(model="qwen25_05b", length=2048, words=[*STORED, *FP32]),
    "05b_4096_bf16_weights": Case(model="qwen25_05b", words=[*STORED, *ALL_BF16]),
    "05b_4096_liger": Case(model="qwen25_05b", words=[*STORED, *LIGER]),
    "05b_2048_micro_2": Case(model="qwen25_05b", length=2048, micro=2, words=STORED),
    "05b_2048_accumulated": Case(model="qwen25_05b", length=2048, accumulation=4, words=STORED),
    "05b_padded_16": Case(model="qwen25_05b", length=4096, micro=16, words=["packing=padded", *STORED]),
    "05b_lora": Case(model="qwen25_05b", words=[*STORED, *LORA]),
    "3b_2048_checkpointing": Case(model="qwen25_3b", length=2048, words=RECOMPUTED),
    "3b_12_layers": Case(model="qwen25_3b", layers=12, words=STORED),
    "3b_12_layers_liger": Case(model="qwen25_3b", layers=12, words=[*STORED, *LIGER]),
    "3b_12_layers_lora": Case(model="qwen25_3b", layers=12, words=[*STORED, *LORA]),
    "3b_lora_checkpointing": Case(model="qwen25_3b", layers=24, words=[*RECOMPUTED, *LORA]),
    "8b_6_layers": Case(model="llama3_8b", layers=6, length=2048, words=STORED),
    "8b_6_layers_checkpointing": Case(model="llama3_8b", layers=6, length=8192, words=RECOMPUTED),
    "7b_6_layers_fp32": Case(model="qwen25_7b", layers=6, length=1024, words=[*STORED, *FP32]),
    "05b_ddp_2": Case(model="qwen25_05b", gpus=2, words=_spread("ddp")),
    "3b_ddp_2": Case(model="qwen25_3b", layers=12, gpus=2, words=_spread("ddp")),
    "3b_zero1_2": Case(model="qwen25_3b", layers=12, gpus=2, words=_spread("zero1")),
    "3b_zero2_2": Case(model="qwen25_3b", layers=12, gpus=2, words=_spread("zero2")),
    "3b_zero2_2_cast": Case(
        model="qwen25_3b", layers=12, gpus=2, words=_spread("zero2", "parallelism.mixed_precision=cast")
    ),
    "3b_zero3_2": Case(model="qwen25_3b", layers=12, gpus=2, words=_spread("zero3")),
    "3b_fsdp_2": Case(model="qwen25_3b", layers=12, gpus=2, words=_spread("fsdp")),
    "3b_fsdp_grad_op_2": Case(model="qwen25_3b", layers=12, gpus=2, words=_spread("fsdp_grad_op")),
    "3b_zero2_offload_2": Case(model="qwen25_3b", layers=12, gpus=2, words=_spread("zero2_offload")),
    "3b_zero3_offload_2": Case(model="qwen25_3b", layers=12, gpus=2, words=_spread("zero3_offload")),
    "3b_fsdp_offload_2": Case(model="qwen25_3b", layers=12, gpus=2, words=_spread("fsdp_offload")),
    "3b_zero2_lora_2": Case(model="qwen25_3b", layers=12, gpus=2, words=_spread("zero2", *LORA)),
    "3b_zero3_lora_2": Case(model="qwen25_3b", layers=12, gpus=2, words=_spread("zero3", *LORA)),
    "3b_fsdp_lora_2": Case(model="qwen25_3b", layers=12, gpus=2, words=_spread("fsdp", *LORA)),
    # Planned before they were run: other models, lengths and strategies than the estimate was fitted to.
    "held_7b_4_layers": Case(model="qwen25_7b", layers=4, length=6144, words=STORED),
    "held_3b_18_layers_checkpointing_accumulated": Case(
        model="qwen25_3b", layers=18, length=3072, accumulation=2, words=RECOMPUTED
    ),
    "held_3b_18_layers_lora_8192": Case(model="qwen25_3b", layers=18, length=8192, words=[*STORED, *LORA]),
    "held_8b_3_layers_zero1_2": Case(model="llama3_8b", layers=3, gpus=2, accumulation=2, words=_spread("zero1")),
    "held_3b_18_layers_zero2_2": Case(
        model="qwen25_3b", layers=18, gpus=2, length=2048, accumulation=3, words=_spread("zero2")
    ),
    "held_3b_18_layers_zero2_offload_2": Case(
        model="qwen25_3b", layers=18, gpus=2, length=2048, words=_spread("zero2_offload")
    ),
    "held_3b_18_layers_zero3_2": Case(model="qwen25_3b", layers=18, gpus=2, length=2048, words=_spread("zero3")),
    "held_7b_4_layers_zero3_offload_2": Case(
        model="qwen25_7b", layers=4, gpus=2, length=2048, words=_spread("zero3_offload")
    ),
    "held_3b_18_layers_fsdp_accumulated_2": Case(
        model="qwen25_3b", layers=18, gpus=2, length=6144, accumulation=2, words=_spread("fsdp", *RECOMPUTED)
    ),
    "held_05b_zero2_offload_accumulated_2": Case(
        model="qwen25_05b", gpus=2, length=2048, accumulation=2, words=_spread("zero2_offload")
    ),
    "8b_6_layers_lora_compiled": Case(model="llama3_8b", layers=6, words=[*STORED, *LORA, *COMPILED]),
    "8b_12_layers_lora_compiled": Case(model="llama3_8b", layers=12, words=[*STORED, *LORA, *COMPILED]),
    "8b_6_layers_lora_compiled_no_dropout": Case(
        model="llama3_8b", layers=6, words=[*STORED, *LORA, *COMPILED, "peft.dropout=0"]
    ),
    "8b_6_layers_lora_varlen": Case(model="llama3_8b", layers=6, words=[*STORED, *LORA, "attention=varlen_attention"]),
    "3b_12_layers_compiled_ddp_2": Case(
        model="qwen25_3b", layers=12, gpus=2, accumulation=2, words=_spread("ddp", *COMPILED)
    ),
    "8b_ddp_4": Case(model="llama3_8b", layers=4, gpus=4, length=2048, words=_spread("ddp")),
    "8b_zero2_4": Case(model="llama3_8b", layers=8, gpus=4, length=8192, words=_spread("zero2", *RECOMPUTED)),
    "8b_zero3_4": Case(model="llama3_8b", layers=8, gpus=4, length=4096, words=_spread("zero3")),
    "8b_fsdp_4": Case(model="llama3_8b", layers=8, gpus=4, length=8192, words=_spread("fsdp", *RECOMPUTED)),
    "8b_hsdp_4": Case(
        model="llama3_8b", layers=4, gpus=4, length=2048, words=_spread("hsdp", "parallelism.shard_group_size=2")
    ),
    "3b_fsdp_4_fp32": Case(model="qwen25_3b", layers=12, gpus=4, length=2048, words=_spread("fsdp", *FP32)),
}


def jobs_of(names: list[str], num_gpus: int) -> list[Job]:
    """The cases as jobs; those of one GPU are dealt out over all of the machine's, each alone on its own."""
    jobs: list[Job] = []
    loads = [0] * num_gpus
    for name in names:
        case = CASES[name]
        if case.gpus > num_gpus:
            print(json.dumps({"name": name, "left_out": f"{case.gpus} GPUs are needed"}), flush=True)
            continue
        start = min(range(0, num_gpus - case.gpus + 1, case.gpus), key=lambda first: sum(loads[first:][: case.gpus]))
        gpus = tuple(range(start, start + case.gpus))
        for gpu in gpus:
            loads[gpu] += 1
        overrides, total = case.overrides()
        facts = facts_of(case.model)
        line = {
            "overrides": overrides, "weights": "random", "data": "generated documents of 256 tokens",
            "layers": case.layers or facts["num_layers"], "layers_of_the_model": facts["num_layers"],
            "num_parameters": total,
        }  # fmt: skip
        host_gib = case.gpus * 4 * total / 2**30
        jobs.append(
            Job(
                name=name,
                gpus=gpus,
                words=overrides,
                line=line,
                turn_timeout_s=150 if COMPILED[-1] in case.words else 60,
                priority=len(jobs),
                host_gib=host_gib,
            )
        )
    return jobs


def main() -> None:
    """Parse the arguments and run the queue."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, deadline_s=500)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--gpus", type=int, default=4, help="of the machine")
    arguments = parser.parse_args()
    run_jobs(jobs_of(arguments.only, arguments.gpus), arguments)


if __name__ == "__main__":
    main()
