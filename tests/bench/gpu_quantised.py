"""The memory of QLoRA on a GPU, beside what was planned: models of two widths, read from a folder and quantised.

    python tests/bench/gpu_quantised.py run --output DIR [--only NAME ...] [--list]
    python tests/bench/gpu_quantised.py table

`run` writes five layers as wide as Qwen2.5-7B's and Llama 3 8B's, with random bf16 weights and the quickstart's
tokenizer, and trains each case for three steps on rows of 16,384 tokens, a JSON line each. `table` plans the recorded
lines (results/h200_quantised.jsonl) by today's code and says how far off that is.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from gpu_held_out import BASE
from gpu_models import WIDTHS, write_model
from gpu_queue import Job, add_arguments, require_gpus, run_jobs

from tunebook.plan.draft import draft_run
from tunebook.plan.memory import estimate_memory

RESULTS = Path(__file__).parent / "results" / "h200_quantised.jsonl"
WORDS = [
    *(word for word in BASE if not word.startswith("model.weights")), "model.weights=pretrained", "model.facts=null",
    "hardware.gpus_per_node=1", "training.max_steps=3", "training.max_length=16384", "packing.row_length=16384",
    "training.global_samples=64", "training.micro_batch_size=1", "attention=varlen_attention", "peft=qlora",
    "peft.rank=16",
]  # fmt: skip
AGAIN, STORED, COMPILED = ["activation=checkpointing"], ["activation=stored"], ["model.compile_layers=true"]
ATTENTION = ["peft.target_modules=[q_proj,k_proj,v_proj,o_proj]"]
GATE_AND_UP = ["peft.target_modules=[gate_proj,up_proj]"]
DROPOUT, NO_DROPOUT = ["peft.dropout=0.05"], ["peft.dropout=0.0"]
SINGLE, OFFLOADED = ["parallelism=single"], ["parallelism=fsdp_offload"]
# What is not quantised: norms, embeddings and the head.
FP32, BF16 = ["precision.master_weights=fp32"], ["precision.master_weights=bf16"]
_EACH: dict[str, tuple[str, list[str]]] = {
    "q_ck_all": ("qwen25_7b", [*SINGLE, *NO_DROPOUT, *AGAIN]),
    "q_ck_att": ("qwen25_7b", [*SINGLE, *NO_DROPOUT, *AGAIN, *ATTENTION]),
    "q_ck_gu": ("qwen25_7b", [*SINGLE, *NO_DROPOUT, *AGAIN, *GATE_AND_UP]),
    "q_st_all": ("qwen25_7b", [*SINGLE, *NO_DROPOUT, *STORED]),
    "q_st_att": ("qwen25_7b", [*SINGLE, *NO_DROPOUT, *STORED, *ATTENTION]),
    "q_comp_all": ("qwen25_7b", [*SINGLE, *NO_DROPOUT, *AGAIN, *COMPILED]),
    "q_comp_att": ("qwen25_7b", [*SINGLE, *NO_DROPOUT, *AGAIN, *COMPILED, *ATTENTION]),
    "q_ck_all_d": ("qwen25_7b", [*SINGLE, *DROPOUT, *AGAIN]),
    "llama_ck_all": ("llama3_8b", [*SINGLE, *NO_DROPOUT, *AGAIN]),
    "llama_ck_att_d": ("llama3_8b", [*SINGLE, *DROPOUT, *AGAIN, *ATTENTION]),
    "llama_st_all_d": ("llama3_8b", [*SINGLE, *DROPOUT, *STORED]),
    "llama_comp_st_gu": ("llama3_8b", [*SINGLE, *NO_DROPOUT, *STORED, *COMPILED, *GATE_AND_UP]),
    "q_comp_st_all": ("qwen25_7b", [*SINGLE, *NO_DROPOUT, *STORED, *COMPILED]),
    "q_comp_st_att": ("qwen25_7b", [*SINGLE, *NO_DROPOUT, *STORED, *COMPILED, *ATTENTION]),
    "llama_comp_st_all_d": ("llama3_8b", [*SINGLE, *DROPOUT, *STORED, *COMPILED]),
    "q_fsdp_ck_all": ("qwen25_7b", [*OFFLOADED, *NO_DROPOUT, *AGAIN]),
}
CASES = {name: (model, [*words, *FP32]) for name, (model, words) in _EACH.items()}
CASES |= {f"{name}_bf16": (model, [*words, *BF16]) for name, (model, words) in _EACH.items()}


def planned_gib(words: list[str]) -> float:
    """What today's plan says of the peak. Raises: ValueError where it refuses the run."""
    draft = draft_run("quickstart", words, [])
    problems = [problem.id for problem in draft.problems if problem.is_error]
    if draft.resolution is None or problems:
        raise ValueError(f"{words}: {draft.error or problems}")
    config = draft.resolution.config
    assert config.model.facts is not None
    return estimate_memory(config, config.model.facts, accumulates=False).total_gib


def run(arguments: argparse.Namespace) -> None:
    """Train the cases that were asked for, and write their lines."""
    if not arguments.list:
        require_gpus(1)  # the models are written by one
    jobs = []
    for width in WIDTHS:
        chosen = {name: words for name, (model, words) in CASES.items() if model == width}
        chosen = {name: words for name, words in chosen.items() if not arguments.only or name in arguments.only}
        if not chosen:
            continue
        model = write_model(width, arguments.models, has_weights=not arguments.list)
        for name, more in chosen.items():
            words = [*WORDS, f"model.path={model}", *more]
            line = {"model": width, "overrides": [*WORDS, *more], "planned_then_gib": round(planned_gib(words), 3),
                    "weights": "random", "layers": WIDTHS[width]["num_hidden_layers"]}  # fmt: skip
            jobs.append(
                Job(
                    name=name, gpus=(0,), words=["quickstart", *words], line=line, is_alone=False, turn_timeout_s=120,
                    environment={"OMP_NUM_THREADS": "8"},
                )
            )  # fmt: skip
    run_jobs(jobs, arguments)


def recorded() -> list[dict[str, Any]]:
    """The lines of RESULTS, each with what today's plan says as `planned_gib`."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        models = {width: write_model(width, Path(folder), has_weights=False) for width in WIDTHS}
        for line in map(json.loads, RESULTS.read_text(encoding="utf-8").splitlines()):
            words = [*line["overrides"], *line.get("resolved", ()), f"model.path={models[line['model']]}"]
            found.append(line | {"planned_gib": planned_gib(words)})
    return found


def main() -> None:
    """Parse the arguments, and run the cases or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_subparsers(required=True, dest="way")
    running = ways.add_parser("run")
    add_arguments(running, deadline_s=230)
    running.add_argument("--only", nargs="*", metavar="NAME", choices=CASES)
    running.add_argument("--models", type=Path, default=Path("/tmp/quantised"), help="where the models are written")
    ways.add_parser("table")
    arguments = parser.parse_args()
    if arguments.way == "run":
        run(arguments)
        return
    for line in recorded():
        measured = max(line["memory_gib"])
        print(
            f"{line['name']:20} {line['planned_gib']:7.2f} {measured:7.2f} {line['planned_gib'] / measured - 1:+7.1%}"
        )


if __name__ == "__main__":
    main()
