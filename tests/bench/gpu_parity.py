"""The same loss on every strategy: run one recipe in many configurations on a GPU machine, one JSON line for each.

    python tests/bench/gpu_parity.py --output DIR --series fp32 [--gpus 4] [--only NAME ...] [--deadline-s 500]

Each series names a recipe, settings that all its runs share, and a reference on one GPU. Runs share the GPUs, but for
the series `speed`: good for losses, not for speed. Random weights, and said so in each line. `tunebook parity` does the
same for one recipe, one run after the other.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from itertools import cycle
from pathlib import Path
from typing import Any

from gpu_models import write_model
from gpu_queue import Job, add_arguments, require_gpus, run_jobs

from tunebook.record.losses import compare_losses

NVME = Path("/tmp/nvme")
SHARDED = ("zero1", "zero2", "zero3", "fsdp", "fsdp_grad_op")
OFFLOADED = ("zero2_offload", "zero3_offload", "fsdp_offload")
SUFFIXES = {1: "_alone", 2: "_2"}  # of names of runs on fewer GPUs than the series' own number

Runs = dict[str, tuple[int, list[str]]]  # name -> GPUs, overrides; the first is the reference


def _strategies(gpus: int) -> Runs:
    """Every strategy on some GPUs."""
    by_size = ["parallelism=fsdp", "parallelism.wrap_policy=size", "parallelism.wrap_min_num_parameters=100000"]
    runs: Runs = {"single": (1, ["parallelism=single"])}
    runs |= {name: (gpus, [f"parallelism={name}"]) for name in ("ddp", *SHARDED, *OFFLOADED)}
    runs["zero3_nvme"] = (gpus, ["parallelism=zero3_nvme", f"parallelism.nvme_path={NVME}"])
    runs["fsdp_by_size"] = (gpus, by_size)
    if gpus >= 4:  # two groups of two
        runs["hsdp"] = (gpus, ["parallelism=hsdp", "parallelism.shard_group_size=2"])
    return runs


def _on_fewer() -> Runs:
    """The same on two GPUs and on one: what divides the model there, or moves it to the host."""
    runs: Runs = {f"{name}_2": (2, [f"parallelism={name}"]) for name in ("ddp", *SHARDED, *OFFLOADED)}
    alone = ("zero2", "zero3", "fsdp", *OFFLOADED)
    return runs | {f"{name}_alone": (1, [f"parallelism={name}"]) for name in alone}


def _casting(gpus: int) -> Runs:
    """The strategies whose library may cast the whole model to bf16, both ways."""
    runs: Runs = {}
    for name in ("zero1", "zero2", "zero3", "zero2_offload", "fsdp", *(["hsdp"] if gpus >= 4 else [])):
        group = ["parallelism.shard_group_size=2"] if name == "hsdp" else []
        runs[f"{name}_cast"] = (gpus, [f"parallelism={name}", *group, "parallelism.mixed_precision=cast"])
    return runs


def _in_fp16(gpus: int) -> Runs:
    """What fits fp16 or does not is each library's own: autocast alone, DeepSpeed's cast, and FSDP's of both kinds."""
    half = "precision=fp16"
    names = ("ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp_grad_op", "zero2_offload", "fsdp_offload")
    runs: Runs = {"single": (1, ["parallelism=single", half]), "fp32": (1, ["parallelism=single", "precision=fp32"])}
    runs |= {name: (gpus, [f"parallelism={name}", half]) for name in names}
    return runs | {"fsdp_cast": (gpus, ["parallelism=fsdp", "parallelism.mixed_precision=cast", half])}


def _with_activations_away(gpus: int) -> Runs:
    """With and without activation offloading: where weights are gathered or moved it takes views of them, too."""
    runs: Runs = {"single": (1, ["parallelism=single"]), "single_away": (1, ["parallelism=single", *_AWAY])}
    for name in ("ddp", *SHARDED, *OFFLOADED):
        runs[name] = (gpus, [f"parallelism={name}"])
        runs[f"{name}_away"] = (gpus, [f"parallelism={name}", *_AWAY])
    lora = ["parallelism=fsdp", "peft=lora", "peft.dropout=0"]
    return runs | {"fsdp_lora": (gpus, lora), "fsdp_lora_away": (gpus, [*lora, *_AWAY])}


def _in_fp8(gpus: int) -> Runs:
    """bf16 twice, since two runs of it differ too, and fp8 both ways, alone and spread."""
    runs: Runs = {"single": (1, ["parallelism=single", "precision=bf16"])}
    runs |= {"fsdp_bf16": (gpus, ["parallelism=fsdp", "precision=bf16"])} if gpus > 1 else {}
    for scaling in ("tensorwise", "rowwise"):
        words = ["precision=fp8", f"precision.fp8_scaling={scaling}"]
        runs[f"fp8_{scaling}"] = (1, ["parallelism=single", *words])
        runs |= {f"fsdp_fp8_{scaling}": (gpus, ["parallelism=fsdp", *words])} if gpus > 1 else {}
    return runs


def _in_compiled_blocks(gpus: int) -> Runs:
    """sdpa's mask of a whole row is the slower way; torch's kernel for packed rows, and blocks compiled around it."""
    slower = ["attention=sdpa", "model.compile_layers=false", "model.one_pass_head=false"]
    runs: Runs = {"single": (1, ["parallelism=single", *slower])}
    runs["varlen"] = (1, ["parallelism=single", "attention=varlen_attention", "model.compile_layers=false"])
    runs["compiled"] = (1, ["parallelism=single", *_COMPILED])
    spread = ("ddp", "zero2", "fsdp") if gpus > 1 else ()
    return runs | {f"{name}_compiled": (gpus, [f"parallelism={name}", *_COMPILED]) for name in spread}


def _in_one_pass(gpus: int) -> Runs:
    """TRL's output head twice, since two runs of it may differ too, and its gradients made in the forward pass."""
    upstreams = ["parallelism=single", "model.one_pass_head=false"]
    runs: Runs = {"single": (1, upstreams), "again": (1, upstreams)}
    runs["one_pass"] = (1, ["parallelism=single", *_ONE_PASS])
    spread = ("ddp", "zero2", "zero3", "fsdp", "fsdp_grad_op", "zero3_offload") if gpus > 1 else ()
    return runs | {f"{name}_one_pass": (gpus, [f"parallelism={name}", *_ONE_PASS]) for name in spread}


def _over_a_frozen_base(adapter: str) -> Runs:
    """A base that is stored in bf16, kept in fp32 and as it is, against fp32 throughout; compiled and not."""
    exact = ["precision=fp32", "precision.tf32=disabled"]
    runs: Runs = {"single": (1, [f"peft={adapter}", *exact])}
    for weights in ("fp32", "bf16"):
        words = [f"peft={adapter}", f"precision.master_weights={weights}"]
        runs[weights] = (1, words)
        runs[f"{weights}_not_compiled"] = (1, [*words, "model.compile_layers=false"])
        runs[f"{weights}_checkpointed"] = (1, [*words, "model.compile_layers=false", "activation=checkpointing"])
    return runs


def _without(words: list[str], replaced: list[str]) -> list[str]:
    keys = {word.partition("=")[0] for word in replaced}
    return [word for word in words if word.partition("=")[0] not in keys]


_PLAIN = ["attention=sdpa", "model.compile_layers=false"]  # with every strategy the same kernels
_GENERATED = ["model.weights=random", "dataset=synthetic", "dataset.synthetic.num_documents=4000", *_PLAIN]
QUICKSTART = [
    "quickstart",
    "evaluation=none",
    *_PLAIN,
    "training.global_samples=32",
    "schedule.warmup_steps=2",
]
QWEN_05B = ["qwen05b_single", *_GENERATED, "training.global_samples=32", "packing.row_length=2048"]
_QWEN_3B = ["qwen3b_zero2", *_GENERATED, "activation=stored", "model.liger_kernel=false"]
QWEN_3B_SLICE = [
    *[*_QWEN_3B, "training.global_samples=64", "packing.row_length=4096"],
    *["model.facts.num_layers=12", "model.facts.num_parameters=1236090880"],
]
QWEN_3B_TWO_LAYERS = [  # of 36, in full width
    *[*_QWEN_3B, "training.global_samples=16", "packing.row_length=2048", "schedule.warmup_steps=2"],
    *["model.facts.num_layers=2", "model.facts.num_parameters=465320960"],
]
_ONE_PASS = ["model.one_pass_head=true"]
_COMPILED = ["attention=varlen_attention", "model.compile_layers=true"]
_AWAY = ["activation=stored", "activation.offload=true"]
_FROZEN = Path("/tmp/frozen")
FROZEN_BASE = [  # five layers of Qwen2.5-7B's width with the quickstart's tokenizer, written there
    *_without(QUICKSTART, _PLAIN), f"model.path={_FROZEN / 'qwen25_7b'}", "model.weights=pretrained",
    "model.facts=null", "parallelism=single", "schedule=constant", "optimizer.learning_rate=2e-4",
    "peft.dropout=0",
]  # fmt: skip
SERIES = ("fp32", "fp32_fewer", "fp16", "bf16", "bf16_quickstart", "bf16_quickstart_fewer", "bf16_3b", "lora",
          "compiled", "one_pass", "offloaded", "frozen_lora", "frozen_qlora", "fp8", "fp8_3b", "speed")  # fmt: skip


def series(name: str, gpus: int) -> tuple[list[str], Runs]:
    """The words that all runs of a series share, and its runs."""
    if name.startswith("fp32"):
        shared = [*QUICKSTART, "precision=fp32", "precision.tf32=disabled"]
        return shared, _on_fewer() if name.endswith("fewer") else _strategies(gpus)
    if name.startswith("bf16_quickstart"):
        return [*QUICKSTART, "precision=bf16"], _on_fewer() if name.endswith("fewer") else _strategies(gpus)
    if name == "bf16_3b":
        runs = _strategies(gpus)
        return QWEN_3B_TWO_LAYERS, {key: run for key, run in runs.items() if key not in ("zero3_nvme", "fsdp_by_size")}
    if name == "bf16":
        fp32: Runs = {"fp32": (1, ["parallelism=single", "precision=fp32"])}  # on tf32: 10 bits of mantissa, bf16 has 7
        return [*QWEN_05B], _strategies(gpus) | _casting(gpus) | fp32
    if name == "fp16":
        return QWEN_05B, _in_fp16(gpus)
    if name == "lora":
        runs = {key: (gpus, [f"parallelism={key}"]) for key in ("ddp", "zero2", "zero3", "fsdp", "fsdp_offload")}
        return [*QUICKSTART, "peft=lora", "optimizer.learning_rate=1e-2", "precision=bf16"], runs
    if name == "compiled":
        return _without(QWEN_05B, _PLAIN), _in_compiled_blocks(gpus)
    if name == "one_pass":
        return QWEN_05B, _in_one_pass(gpus)
    if name == "offloaded":
        return QWEN_05B, _with_activations_away(gpus)
    if name.startswith("frozen_"):
        return FROZEN_BASE, _over_a_frozen_base(name.removeprefix("frozen_"))
    if name in ("fp8", "fp8_3b"):
        return _without(QWEN_3B_SLICE if name == "fp8_3b" else QWEN_05B, _PLAIN) + _COMPILED, _in_fp8(gpus)
    runs = {}
    for strategy in ("zero2", "fsdp", "zero3"):
        runs[strategy] = (gpus, [f"parallelism={strategy}"])
        runs[f"{strategy}_cast"] = (gpus, [f"parallelism={strategy}", "parallelism.mixed_precision=cast"])
    return [*QWEN_3B_SLICE], runs


def parity_jobs(
    name: str, priority: int, *, gpus: int = 4, steps: int = 50, more: list[str] | None = None
) -> list[Job]:
    """The runs of a series as jobs of the queue; runs on fewer GPUs than there are take turns on different ones."""
    shared, runs = series(name, gpus)
    shared = [*shared, f"training.max_steps={steps}", "training.save_every_steps=null", *(more or [])]
    groups = {size: cycle([tuple(range(first, first + size)) for first in range(0, gpus - size + 1, size)])
              for size in range(1, gpus + 1)}  # fmt: skip
    jobs = []
    for number, (key, (count, overrides)) in enumerate(runs.items()):
        words = [*shared, *overrides, f"hardware.gpus_per_node={count}"]
        jobs.append(
            Job(
                name=f"{name}-{key}",
                gpus=next(groups[count]),
                words=words,
                priority=priority + number,
                is_alone=name == "speed",
                needs="async_io" if key.startswith("zero3_nvme") else None,
                turn_timeout_s=240
                if name in ("compiled", "frozen_lora", "fp8", "fp8_3b")
                else 60,  # more steps, and blocks are compiled
                environment={"OMP_NUM_THREADS": "4"},
                line={
                    "series": name,
                    "name": key,
                    "recipe": shared[0],
                    "overrides": words[1:],
                    "weights": "random",
                    "data": "the quickstart's conversations" if shared[0] == "quickstart" else "generated documents",
                },
            )
        )
    return jobs


def write_compared(lines: list[dict[str, Any]], output: Path) -> list[dict[str, Any]]:
    """Of the lines that belong to a series: how far their losses are from those of its `single`, as compared.jsonl.

    A series on fewer GPUs (`_fewer`) is compared with the reference of the one that it completes.
    """
    lines = [line for line in lines if "series" in line]
    references = {line["series"]: line.get("losses", []) for line in lines if line["name"] == "single"}
    for line in lines:
        reference = references.get(line["series"].removesuffix("_fewer"))
        if reference and line.get("losses"):
            difference = compare_losses(line["losses"], reference[: len(line["losses"])])
            line |= {"compared_with": "single", "largest_difference": difference.largest, "at_step": difference.at_step}
    (output / "compared.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for line in lines:
        ending, largest = line.get("exit_code"), line.get("largest_difference")
        print(f"{line['series']} {line['name']:24} {ending!s:10} {largest}", flush=True)
    return lines


def main() -> None:
    """Run some series and print a line for each run as it ends; their differences from the reference come last."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, deadline_s=500)
    parser.add_argument("--series", choices=SERIES, nargs="+", required=True)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--more", nargs="*", default=[], help="overrides for every run")
    arguments = parser.parse_args()
    if any(name.startswith("frozen_") for name in arguments.series):
        if not arguments.list:
            require_gpus(arguments.gpus)
        write_model("qwen25_7b", _FROZEN, has_weights=not arguments.list)
    jobs = [
        job
        for number, name in enumerate(arguments.series)
        for job in parity_jobs(name, 100 * number, gpus=arguments.gpus, steps=arguments.steps, more=arguments.more)
        if not arguments.only or job.line["name"] in arguments.only
    ]
    lines = run_jobs(jobs, arguments, start_building)
    if lines:
        write_compared(lines, arguments.output)


def start_building() -> dict[str, subprocess.Popen[bytes]]:
    """Compile DeepSpeed's reader of NVMe disks, which the first run that needs it would do in its turn."""
    NVME.mkdir(exist_ok=True)
    build = "from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load()"
    return {"async_io": subprocess.Popen([sys.executable, "-c", build], stdout=subprocess.DEVNULL)}


if __name__ == "__main__":
    main()
