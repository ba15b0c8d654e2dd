"""A made-up run folder, whole or with parts left out, for the tests of records and reports; nothing was measured."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tunebook.config.choices import Generation, Weights
from tunebook.config.frozen import plain_config
from tunebook.config.schema import (
    DatasetConfig,
    HardwareConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TrainingConfig,
)

NUM_STEPS = 240
MakeRun = Callable[..., Path]


def metrics_line(step: int, ranks: int, rate: float) -> dict[str, Any]:
    """One smooth training step with a reproducible ripple, so that the curves look like curves."""
    ripple = math.sin(step * 12.9898) * 43758.5453 % 1 - 0.5
    decay = math.exp(-step / 45)
    warm_up, progress = min(1.0, step / 12), step / NUM_STEPS
    return {
        "step": step,
        "num_steps": 1,
        "epoch": round(3 * step / NUM_STEPS, 4),
        "loss": 0.09 + 6.8 * decay * (1 + 0.12 * ripple) + 0.05 * abs(ripple),
        "grad_norm": 0.4 + 5 * decay + 0.5 * abs(ripple),
        "learning_rate": rate * warm_up * (0.5 + 0.5 * math.cos(math.pi * progress)),
        "tokens_seen": step * 3_412,
        "documents_seen": step * 64,
        "tokens_per_second_per_gpu": (5_200 if step == 1 else 12_100) * (1 + 0.05 * ripple),
        "padding_share": 0.031 + 0.01 * ripple,
        "mfu": 0.42 * (1 + 0.05 * ripple) if ranks > 1 else None,
        "peak_tflops": 989.0 if ranks > 1 else None,
        "memory_gib": [round(1.1 + 0.07 * rank + min(0.4, step / 200), 3) for rank in range(ranks)],
        "seconds": 0.28,
    }


def evaluation(when: str, scores: dict[str, float], answers: list[tuple[str, bool]]) -> dict[str, Any]:
    groups = {name: {"value": value, "num_items": 50} for name, value in scores.items()}
    mean = sum(scores.values()) / len(scores)
    prompts = ["rain road house", "coin bread ring", "mouse leaf glass", "key chair flag", "leaf bread lemon"]
    return {
        "when": when,
        "model": "book:recipes/example/model",
        "tasks": {
            "example": {
                "metric": "exact_match",
                "value": mean,
                "stderr": math.sqrt(mean * (1 - mean) / (50 * len(scores) - 1)),
                "num_items": 50 * len(scores),
                "groups": groups,
            }
        },
        "samples": [
            {
                "task": "example",
                "group": "reverse",
                "prompt": f"<|im_start|>user\nReverse the order: {words}<|im_end|>\n<|im_start|>assistant\n",
                "answer": answer,
                "expected": " ".join(reversed(words.split())),
                "correct": is_right,
            }
            for words, (answer, is_right) in zip(prompts, answers, strict=False)
        ],
        "seconds": 11.0,
    }


def plan(ranks: int) -> dict[str, Any]:
    return {
        "recipe": "example",
        "hardware": {"generation": "cpu" if ranks == 1 else "hopper", "num_nodes": 1, "gpus_per_node": ranks,
                     "memory_gib": None if ranks == 1 else 139.8},
        "precision": "fp32",
        "attention": "sdpa",
        "packing": "isolated",
        "batch": {"global_samples": 64, "global_tokens": None, "micro": 2, "accumulation": 4, "world_size": ranks,
                  "rows_per_step": 8 * ranks, "row_length": 512, "is_packed": True, "is_estimate": False,
                  "documents_per_step": 63.9, "tokens_per_step": 3_412.0, "num_documents": 5_120, "steps_per_epoch": 80,
                  "total_steps": NUM_STEPS},
        "choices": [
            {"key": "precision.compute", "value": "fp32", "why": "a CPU has no fast half-precision arithmetic"},
            {"key": "attention.implementation", "value": "sdpa", "why": "flash attention needs a GPU"},
            {"key": "packing.mode", "value": "isolated", "why": "several documents share a row"},
        ],
        "problems": [],
    }  # fmt: skip


def manifest(state: str, exit_code: int | None, reason: str | None, ranks: int) -> dict[str, Any]:
    gpus = [{"name": "NVIDIA H200", "memory_gib": 139.8, "generation": "hopper"}] * ranks if ranks > 1 else []
    return {
        "format": 1,
        "recipe": "example",
        "title": "",
        "status": {"state": state, "exit_code": exit_code, "reason": reason, "started": "2026-11-21T07:18:05+00:00",
                   "ended": "2026-11-21T07:19:47+00:00", "seconds": None if state == "running" else 102.0},
        "earlier_attempts": [],
        "code": {"git_commit": "0" * 40, "git_diff_sha256": None, "is_clean": True, "reason": None},
        "environment": {"image_digest": None, "image": None, "lock_sha256": "1" * 64,
                        "lock": {"name": "cpu", "sha256": "1" * 64, "differences": {}, "reason": None},
                        "installed_sha256": "5" * 64, "python": "3.11.2",
                        "packages": {"torch": "2.13.0", "transformers": "5.23.0"}, "variables": {}},
        "config_sha256": "2" * 64,
        "model": {"name": "book:recipes/example/model", "revision": None, "config_sha256": "3" * 64,
                  "weights": "random", "weights_fingerprint": None},
        "tokenizer_sha256": "6" * 64,
        "chat_template_sha256": "7" * 64,
        "system_prompt_sha256": "8" * 64,
        "dataset": {
            "records": [{"location": "book:recipes/example/data/train.jsonl", "revision": None, "format": "sharegpt",
                         "num_documents": 5_120}],
            "fingerprint": "4" * 64,
            "counts": {"train": {"num_documents": 5_120, "num_tokens": 272_960, "num_trained_tokens": 61_230,
                                 "num_cut": 3, "num_dropped": 2, "dropped": {"no assistant turn": 2}}},
        },
        "hardware": {"gpus": gpus, "driver": None, "nccl": None, "topology": None, "cpus": 2, "memory_gib": 3.0,
                     "host": "abcdef0123456789"},
        "world_size": ranks,
        "seed": 42,
        "command": ["tunebook", "train", "example"],
    }  # fmt: skip


def config(rate: float) -> str:
    return (
        f"recipe: example\ntitle: Three small tasks, learnt on a CPU\nparallelism:\n  strategy: ddp\n"
        f"peft:\n  method: full\noptimizer:\n  learning_rate: {rate}\ntraining:\n  seed: 42\n  log_every_steps: 1\n"
    )


def write_lines(folder: Path, lines: list[dict[str, Any]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Writes a run folder and returns it; keywords change how it ended and how large it is."""
    return lambda time="2026-11-21T07-18-05Z", **changes: write_run(tmp_path / "outputs" / "example" / time, **changes)


def write_run(
    folder: Path,
    *,
    state: str = "finished",
    exit_code: int | None = 0,
    reason: str | None = None,
    ranks: int = 1,
    num_steps: int = NUM_STEPS,
    rate: float = 2e-3,
    without: tuple[str, ...] = (),
    extra_lines: tuple[dict[str, Any], ...] = (),
    after: dict[str, Any] | None = None,
) -> Path:
    (folder / "evaluation").mkdir(parents=True)
    lines: list[dict[str, Any]] = []
    for step in range(1, num_steps + 1):
        lines.append(metrics_line(step, ranks, rate))
        if step % 40 == 0:
            lines.append(
                {"step": step, "validation_loss": 0.13 + 6.8 * math.exp(-step / 45), "validation_tokens": 9_000}
            )
    write_lines(folder, [*lines, *extra_lines])
    scores = {"reverse": 0.98, "sort": 0.94, "count": 1.0}
    right = [("house road rain", True), ("ring bread coin", True), ("glass leaf mouse", True), 
             ("flag chair flag", False), ("lemon bread leaf", True)]  # fmt: skip
    wrong = [("lamp lamp", False), ("", False), ("xq rain", False), ("o o o o", False), ("the", False)]
    files = {
        "plan.json": plan(ranks),
        "manifest.json": manifest(state, exit_code, reason, ranks),
        "evaluation/before.json": evaluation("before", dict.fromkeys(scores, 0.0), wrong),
        "evaluation/after.json": after or evaluation("after", scores, right),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "run.yaml").write_text(config(rate))
    for name in without:
        (folder / name).unlink()
    return folder


@pytest.fixture
def run_config() -> RunConfig:
    """A resolved configuration of the quickstart's model and data."""
    return plain_config(
        recipe="example",
        title="An example",
        model=ModelConfig(path="book:recipes/quickstart/model", weights=Weights.random),
        dataset=DatasetConfig(path="book:recipes/quickstart/data/train.jsonl"),
        hardware=HardwareConfig(generation=Generation.cpu, gpus_per_node=1),
        optimizer=OptimizerConfig(learning_rate=2e-3),
        training=TrainingConfig(max_length=512, global_samples=64),
    )
