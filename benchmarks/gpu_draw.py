"""Draw configurations at random and plan them, before `gpu_runs.py` measures their peaks on a GPU machine.

    python benchmarks/gpu_draw.py --seed 1 --count 40 --cases CASES.jsonl [--models known]
        [--edge GIB] [--memory-gib GIB]

Model, strategy, lengths, passes, adapter, precision, optimizer and what a forward pass keeps are random, so nobody
chose them for being easy. A configuration that the plan allows is appended to CASES with what the plan says of it.
`--models known` takes models of the book in fewer layers and published ones; `architectures` other kinds of models,
`targets` all of them, with adapters on random linear layers, `book` the book's other models. `--edge` adds rows to a
pass until a GPU of that size is as full as the plan allows, on a host of 120 GiB. Documents have 256 tokens: every row
is exactly full.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from bisect import bisect_right
from pathlib import Path
from typing import Any

from gpu_models import OTHER_KINDS, PUBLISHED
from gpu_runs import planned, words_of
from lines import add_line

from tunebook.plan.draft import draft_run

# The peak comes with the second step, when the optimizer has its state. ZeRO-3 keeps more and more parameters whole
# until it knows their order.
STEPS, ZERO3_STEPS = 3, 8
DOCUMENT_TOKENS = 256
_OF_ROWS = ("training.micro_batch_size=", "training.global_samples=", "hardware.memory_gib=")
_EDGE_HOST = "hardware.host_memory_gib=120"
_MOST_ROWS, _FILLED = 64, 0.94  # rows per pass; share of the usable memory at the edge
LARGEST_GIB = 110.0  # of a plan
LARGEST_PARAMETERS = 4.2e9  # which the ranks of one GPU draw on the host
_USABLE_SHARE = 0.83  # of a GPU, that tensors fill at the edge
_H200 = "hardware.memory_gib=140.4"
BASE = [
    "model.weights=random", "hardware=hopper", _H200, "dataset=synthetic",
    "dataset.synthetic.num_documents=2048", f"dataset.synthetic.min_tokens={DOCUMENT_TOKENS}",
    f"dataset.synthetic.max_tokens={DOCUMENT_TOKENS}", "schedule=constant", "training.save_every_steps=null",
    "training.log_every_steps=1", "evaluation=none", "launcher=local",
]  # fmt: skip
LAYERS = {"qwen25_05b": (24,), "qwen25_3b": (9, 15, 21, 36), "qwen25_7b": (3, 5, 8), "llama3_8b": (2, 5, 9)}
# In whole periods of the layers of models that alternate kinds.
BOOK_LAYERS = {
    "qwen3_06b": (28,), "qwen3_1_7b": (12, 28), "qwen3_4b": (8, 18, 36), "qwen3_8b": (4, 8), "qwen3_14b": (3, 6),
    "qwen3_32b": (2,), "llama32_1b": (8, 16), "llama32_3b": (7, 14, 28), "llama31_8b": (3, 6), "llama31_70b": (1, 2),
    "gemma3_1b": (12, 24), "gemma3_4b": (6, 12), "gemma3_12b": (6,), "mistral_7b": (3, 6), "mistral_small_24b": (2, 4),
    "phi4": (2, 5), "olmo3_7b": (4, 8), "smollm3_3b": (8, 16), "smollm2_360m": (32,), "smollm2_1_7b": (12, 24),
    "glm4_9b": (3, 6), "qwen3_30b_a3b": (2, 4), "gpt_oss_20b": (2,), "olmoe_1b_7b": (3, 6),
}  # fmt: skip
SPREAD = ("ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp_grad_op", "zero2_offload", "zero3_offload", "fsdp_offload")
LENGTHS = (1024, 1536, 2560, 3072, 5120, 7168, 9216, 12288, 15360, 20480)
KEEPS = {
    "as auto decides": [],
    "stored": ["activation=stored"],
    "checkpointing": ["activation=checkpointing"],
    "cheap budget": ["activation=stored", "activation.memory_budget=0.6"],
    "low budget": ["activation=stored", "activation.memory_budget=0.2"],
    "offload": ["activation=stored", "activation.offload=true"],
}
ADAPTERS = [
    [], [], [], ["peft=lora"], ["peft=lora", "peft.rank=64"],
    ["peft=lora", "peft.target_modules=[q_proj,k_proj,v_proj,o_proj]"],
]  # fmt: skip
PRECISIONS = [
    [], [], [], ["precision.master_weights=bf16"], ["parallelism.mixed_precision=cast"],
    ["precision=fp32", "precision.tf32=disabled"],
]  # fmt: skip
OPTIMIZERS = [[], [], [], ["optimizer=adamw_8bit"]]
_VARLEN = "attention=varlen_attention"
BLOCKS = [[_VARLEN], [_VARLEN], [_VARLEN, "model.compile_layers=false"], ["attention=sdpa"]]
OTHER_BLOCKS = [*BLOCKS, ["attention=flex_attention"]]  # what caps its logits or keeps a sink has no other


def drawn(
    chance: random.Random, names: list[str], blocks: list[list[str]], *, most_gpus: int = 2, has_targets: bool = False
) -> dict[str, Any]:  # fmt: skip
    """One random configuration of one of the named models, whether or not it can run.

    `has_targets`: without an adapter, which `with_targets` adds.
    """
    gpus = chance.choice((1, 2, 2)) if most_gpus == 2 else 1
    strategy = chance.choice(SPREAD) if gpus == 2 else chance.choice(("single", "single", "single", "fsdp_offload"))
    length, micro, accumulation = chance.choice(LENGTHS), chance.choice((1, 1, 1, 2, 3)), chance.choice((1, 1, 2, 3))
    name = chance.choice(names)
    known = LAYERS | BOOK_LAYERS
    layers = chance.choice(known[name]) if name in known else None
    samples = gpus * micro * accumulation * length // DOCUMENT_TOKENS
    words = [
        *BASE, f"training.max_steps={ZERO3_STEPS if 'zero3' in strategy else STEPS}", f"parallelism={strategy}",
        f"hardware.gpus_per_node={gpus}", f"training.max_length={length}", f"packing.row_length={length}",
        f"training.global_samples={samples}", f"training.micro_batch_size={micro}",
        *KEEPS[chance.choice(list(KEEPS))], *chance.choice(blocks), *([] if has_targets else chance.choice(ADAPTERS)),
        *chance.choice(PRECISIONS), *chance.choice(OPTIMIZERS),
    ]  # fmt: skip
    return {"model": name, "layers": layers, "gpus": gpus, "accumulation": accumulation, "overrides": words}


def with_targets(chance: random.Random, case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The case with LoRA on one to four linear layers or experts of its model, by name."""
    draft = draft_run(None, [*words_of(case, folder), "peft=lora"], [])
    if draft.resolution is None:
        return case
    facts = draft.resolution.config.model.facts
    found = {*facts.measured.adapters, *facts.measured.expert_adapters}
    names = chance.sample(sorted(found), k=min(len(found), chance.randint(1, 4)))
    words = ["peft=lora", f"peft.rank={chance.choice((16, 64))}", f"peft.dropout={chance.choice((0.0, 0.05))}"]
    return case | {"overrides": [*case["overrides"], *words, f"peft.target_modules=[{','.join(names)}]"]}


def at_the_edge(case: dict[str, Any], folder: Path, memory_gib: float) -> dict[str, Any] | None:
    """The case with as many rows per pass as fit into a GPU of that size; None if they fill too little of it.

    Also None for a kernel with a mask of all tokens of a pass, which takes minutes for more than a few rows.
    """
    if "attention=sdpa" in case["overrides"]:
        return None
    words = [word for word in case["overrides"] if not word.startswith(_OF_ROWS)]
    length = next(int(word.partition("=")[2]) for word in words if word.startswith("packing.row_length="))
    usable = memory_gib * _USABLE_SHARE

    def with_rows(micro: int) -> dict[str, Any]:
        samples = case["gpus"] * micro * case["accumulation"] * length // DOCUMENT_TOKENS
        rows = [f"training.micro_batch_size={micro}", f"training.global_samples={samples}", _EDGE_HOST]
        return case | {"overrides": [*words, f"hardware.memory_gib={memory_gib}", *rows]}

    def filled(micro: int) -> float:
        return plan_of(with_rows(micro), folder).get("planned_gib", math.inf)

    most = bisect_right(range(1, _MOST_ROWS), usable, key=filled)
    return with_rows(most) if most and filled(most) > _FILLED * usable else None


def plan_of(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the plan says of a case; empty if it is refused, or its model is too large to draw."""
    found = planned(words_of(case, folder))
    return {} if "refused" in found or found["num_parameters"] > LARGEST_PARAMETERS else found


def draw(asked: argparse.Namespace) -> None:
    """Write as many cases as were asked for, with what the plan says of each."""
    chance = random.Random(asked.seed)
    names, blocks = {
        "book": ([*BOOK_LAYERS], BLOCKS),
        "architectures": ([*OTHER_KINDS], OTHER_BLOCKS),
        "targets": ([*PUBLISHED, *LAYERS, *OTHER_KINDS], BLOCKS),
        "known": ([*PUBLISHED, *LAYERS], BLOCKS),
    }[asked.models]
    series = "edge" if asked.edge else "drawn" if asked.models == "known" else asked.models
    most_gib = LARGEST_GIB if asked.memory_gib is None else asked.memory_gib * _USABLE_SHARE
    seen: set[str] = set()
    while len(seen) < asked.count:
        case: dict[str, Any] | None = drawn(
            chance, names, blocks, most_gpus=asked.most_gpus, has_targets=asked.models == "targets",
        )  # fmt: skip
        if asked.memory_gib is not None:
            case["overrides"].append(f"hardware.memory_gib={asked.memory_gib}")
            case["overrides"].remove(_H200)
        if asked.models == "targets":
            case = with_targets(chance, case, asked.configs)
        if asked.edge is not None:
            case = at_the_edge(case, asked.configs, asked.edge)
        if case is None or json.dumps(case) in seen:
            continue
        found = plan_of(case, asked.configs)
        if found.get("planned_gib", math.inf) <= most_gib:
            seen.add(json.dumps(case))
            name = {"name": f"{series}_{asked.seed}_{len(seen)}", "series": series, "weights": "random"}
            add_line(name | case | found | {"unsaved": True}, asked.cases)


def main(words: list[str] | None = None) -> int:
    """Parse the arguments and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=Path, default=Path("/tmp/configs"), help="where config.json are written")
    parser.add_argument("--cases", type=Path, required=True, help="the file that they are appended to")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--models", choices=("known", "architectures", "targets", "book"), default="known")
    parser.add_argument("--most-gpus", type=int, choices=(1, 2), default=2, help="of a case")
    parser.add_argument("--edge", type=float, metavar="GIB", help="fill GPUs of this size")
    parser.add_argument("--memory-gib", type=float, metavar="GIB", help="of a GPU; that of an H200 if not given")
    draw(parser.parse_args(words))
    return 0


if __name__ == "__main__":
    sys.exit(main())
