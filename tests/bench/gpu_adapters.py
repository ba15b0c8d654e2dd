"""LoRA and QLoRA with every strategy, on GPUs: ten training steps of each pair that the rules allow, a JSON line each.

    python tests/bench/gpu_adapters.py --output DIR [--gpus 4] [--timeout-s 60] [--deadline-s 500] [--only NAME ...]
    python tests/bench/gpu_adapters.py --list [--generation hopper]

The cases are each file of hydra_configs/parallelism with peft=lora and peft=qlora, and MORE: activation checkpointing,
DeepSpeed's casting, bf16 weights, fp32 products (what GPUs without bf16 compute) and bitsandbytes' optimizers. The
model is four layers of Qwen2.5-0.5B's width with random bf16 weights, written to DIR/model and read as pretrained ones,
because a 4-bit base is quantised while it is read; the data is the quickstart's. All runs start at once and take turns
on the GPUs (`gpu_queue`). In DIR/adapters.jsonl a line says `ok` where the run ended well and its losses are finite and
fell, `refused` with the rules' words where it may not start, else `failed` and why, with the end of what it printed.
`--list` only says which cases would run and which are refused, on any machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle
from pathlib import Path
from typing import Any

from gpu_models import write_model
from gpu_parity import start_building
from gpu_queue import GpuQueue, Job, require_gpus

from tunebook.config.book import book_root
from tunebook.plan.draft import draft_run

Line = dict[str, Any]

STEPS = 10
CHECKPOINTING = ["activation=checkpointing"]
CASTING = ["parallelism.mixed_precision=cast"]
BF16_WEIGHTS, FP32_WEIGHTS = ["precision.master_weights=bf16"], ["precision.master_weights=fp32"]
WHOLE_HEAD = ["peft.modules_to_save=[lm_head]"]
EACH_LOADS = ["parallelism.cpu_ram_efficient_loading=false"]
_BOTH = ("lora", "qlora")
_EACH = ("ddp", "zero2", "zero3", "fsdp")
# What the names of cases end in: the strategies, the adapters, and what is typed beside them.
_BESIDE: dict[str, tuple[Sequence[str], Sequence[str], list[str]]] = {
    "checkpointed": (_EACH, _BOTH, CHECKPOINTING),
    "cast": (("zero2", "zero3", "fsdp"), _BOTH, CASTING),
    "bf16_weights": (_EACH, _BOTH, BF16_WEIGHTS),
    "fp32_weights": (("single", "ddp", "fsdp"), _BOTH, FP32_WEIGHTS),
    "whole_head": (("single", "ddp", "fsdp", "fsdp_offload"), _BOTH, WHOLE_HEAD),
    "whole_head_each_loads": (("fsdp", "fsdp_offload"), ("lora",), [*WHOLE_HEAD, *EACH_LOADS]),
    "fp32": (("single", "ddp", "zero3", "fsdp"), ("qlora",), ["precision=fp32"]),
    "adamw_8bit": (_EACH, ("lora",), ["optimizer=adamw_8bit"]),
    "paged_adamw_8bit": (_EACH, ("lora",), ["optimizer=paged_adamw_8bit"]),
}
# (strategy, adapter, further words), beside every strategy with every adapter
MORE: dict[str, tuple[str, str, list[str]]] = {
    f"{strategy}_{adapter}_{name}": (strategy, adapter, words)
    for name, (strategies, adapters, words) in _BESIDE.items()
    for strategy in strategies
    for adapter in adapters
}


def all_cases(gpus: int) -> dict[str, tuple[int, list[str]]]:
    """GPUs and words of each case, by name."""
    group = book_root() / "hydra_configs" / "parallelism"
    strategies = sorted({file.stem for file in group.glob("*.yaml")} - {"auto"})  # which becomes one of the others
    pairs = {f"{name}_{adapter}": (name, adapter, []) for name in strategies for adapter in _BOTH}
    cases = {}
    for case, (strategy, adapter, more) in (pairs | MORE).items():
        words = [f"parallelism={strategy}", f"peft={adapter}", *more]
        if strategy == "hsdp":
            words.append("parallelism.shard_group_size=2")
        if strategy == "zero3_nvme":
            words.append("parallelism.nvme_path=/tmp/nvme")
        cases[case] = (1 if strategy == "single" else gpus, words)
    return cases


def shared_words(model: Path) -> list[str]:
    """What all cases have in common."""
    return [
        *["quickstart", "evaluation=none", f"model.path={model}", "model.weights=pretrained", "model.facts=null"],
        *["attention=sdpa", "model.compile_layers=false", "activation=stored", "training.global_samples=32"],
        *[f"training.max_steps={STEPS}"],
        *["training.save_every_steps=null", "schedule=constant", "optimizer.learning_rate=5e-3", "peft.dropout=0"],
    ]


def refusals(words: list[str]) -> list[dict[str, str]]:
    """The rules that a case breaks; empty where it may start."""
    recipe, *overrides = words
    draft = draft_run(recipe, overrides, [])
    if draft.error is not None:
        return [{"id": draft.error.problem_id or "", "message": draft.error.message, "fix": ""}]
    return [{"id": each.id, "message": each.message, "fix": each.fix} for each in draft.problems if each.is_error]


def verdict(line: dict[str, Any]) -> str:
    """`ok` for a run that ended well, took every step, and whose losses are finite and fell; else what was wrong."""
    losses = line.get("losses") or []
    if line["exit_code"] != 0:
        return f"failed: exit code {line['exit_code']}"
    if len(losses) != STEPS or not all(map(math.isfinite, losses)):
        return f"failed: {len(losses)} losses of {STEPS}, {sum(map(math.isfinite, losses))} of them finite"
    first, last = sum(losses[:3]) / 3, sum(losses[-3:]) / 3
    return "ok" if last < first else f"failed: the loss did not fall ({first:.4f} to {last:.4f})"


def bitsandbytes_version() -> str | None:
    """Which the queue's own list of versions leaves out; None where it is not installed."""
    try:
        return version("bitsandbytes")
    except PackageNotFoundError:
        return None


def adapter_jobs(model: Path, gpus: int, timeout_s: float, only: list[str] | None) -> tuple[list[Job], list[Line]]:
    """The cases that may start, as jobs of the queue, and a line for each that may not."""
    alone = cycle((number,) for number in range(gpus))
    jobs, refused = [], []
    for name, (count, more) in all_cases(gpus).items():
        if only and name not in only:
            continue
        words = [*shared_words(model), *more, f"hardware.gpus_per_node={count}"]
        line: Line = {"series": "adapters", "name": name, "overrides": words[1:], "weights": "random"}
        if found := refusals(words):
            refused.append(line | {"gpus": count, "verdict": "refused", "refused": found})
            continue
        chosen = next(alone) if count == 1 else tuple(range(count))
        needs = "async_io" if name.startswith("zero3_nvme") else None
        environment = {"OMP_NUM_THREADS": "4"}
        jobs.append(
            Job(
                name=f"adapters-{name}", gpus=chosen, words=words, line=line, is_alone=False, needs=needs,
                turn_timeout_s=timeout_s, environment=environment,
            )
        )  # fmt: skip
    return jobs, refused


def judge(lines: list[Line], logs: Path) -> list[Line]:
    """Each line with its verdict, and for one that failed the end of what it printed."""
    for line in lines:
        line["verdict"] = verdict(line)
        line["bitsandbytes"] = bitsandbytes_version()
        terminal = logs / f"adapters-{line['name']}" / "terminal.txt"
        if line["verdict"] != "ok" and terminal.exists():
            line["output"] = terminal.read_text(errors="replace")[-3000:]
    return lines


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a folder that is not there yet")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--timeout-s", type=float, default=60, help="for one case, once it has its GPUs")
    parser.add_argument("--deadline-s", type=float, default=500, help="for all of them")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="as --list calls them")
    parser.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    parser.add_argument("--generation", default="hopper", help="of the GPUs that --list is about")
    arguments = parser.parse_args()
    unknown = set(arguments.only or ()) - set(all_cases(arguments.gpus))
    if unknown:
        parser.error(f"no case is called {', '.join(sorted(unknown))}; --list shows all")
    if not arguments.list and (arguments.output is None or arguments.output.exists()):
        parser.error("--output needs the name of a folder that is not there yet; or use --list")
    return arguments


def main() -> int:
    """Run the cases, and write and print a line for each. Exit code 1 where one failed or was cut short."""
    arguments = _arguments()
    if arguments.list:
        _list(arguments)
        return 0
    require_gpus(arguments.gpus)
    arguments.output.mkdir(parents=True)
    model = write_model("qwen25_05b", arguments.output.resolve())
    jobs, refused = adapter_jobs(model, arguments.gpus, arguments.timeout_s, arguments.only)
    runs = Path("/tmp/runs") / f"adapters-{os.getpid()}"
    queue = GpuQueue(jobs, arguments.output, runs=runs, deadline_s=arguments.deadline_s, before=start_building())
    lines = [*judge(queue.run(), queue.logs), *refused]
    named = {line["name"] for line in lines}
    lines += [job.line | {"verdict": "failed: the time was up"} for job in jobs if job.line["name"] not in named]
    with (arguments.output / "adapters.jsonl").open("w") as file:
        for line in sorted(lines, key=lambda line: str(line["name"])):
            print(f"{line['name']:36} {line['verdict']}")
            file.write(json.dumps(line) + "\n")
    counts = Counter(line["verdict"].split(":")[0] for line in lines)
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
    return 1 if counts["failed"] else 0


def _list(arguments: argparse.Namespace) -> None:
    """The weights are written by a real call only, so the model's folder stands for itself here."""
    model = book_root() / "recipes" / "quickstart" / "model"
    for name, (gpus, more) in all_cases(arguments.gpus).items():
        if arguments.only and name not in arguments.only:
            continue
        words = [*shared_words(model), *more, f"hardware={arguments.generation}", f"hardware.gpus_per_node={gpus}"]
        found = refusals(words)
        print(f"{name:36} {gpus} GPUs  " + (f"refused: {found[0]['id']}" if found else "runs"))


if __name__ == "__main__":
    sys.exit(main())
