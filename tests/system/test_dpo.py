"""Preference training gives one loss everywhere: on two ranks of any strategy, with passes that have no pair.

An epoch's last step has fewer pairs than the ranks have rows.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tunebook.record.metrics import read_metrics

NUM_PAIRS, A_STEP, NUM_STEPS = 19, 8, 6  # the third step has three pairs
MEANS = ("loss", "reward_accuracy", "reward_margin", "chosen_log_probability", "reference_accuracy")
ON_TWO = ("hardware.gpus_per_node=2", "training.micro_batch_size=2")
FULL, LORA = ("optimizer.learning_rate=1e-3",), ("peft=lora", "optimizer.learning_rate=1e-2")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of conversations."""
    draw = random.Random(0)
    words = ["red", "blue", "one", "two", "cat", "dog", "sun", "moon"]
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    with file.open("w") as lines:
        for _ in range(NUM_PAIRS):
            asked = draw.choices(words, k=draw.randint(2, 6))
            prompt = [{"role": "user", "content": " ".join(asked)}]
            worse = " ".join(draw.choices(words, k=draw.randint(1, 8)))
            lines.write(json.dumps({"prompt": prompt, "chosen": " ".join(sorted(asked)), "rejected": worse}) + "\n")
    return file


@pytest.fixture(scope="module")
def lines_of(run_forked: Callable, pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """Train on the pairs, once with each setting; returns the lines of metrics.jsonl."""

    @cache
    def train(*overrides: str) -> list[dict]:
        outputs = tmp_path_factory.mktemp("outputs")
        words = ["tunebook", "train", "quickstart", "dataset=file", f"dataset.path={pairs}", "method=dpo",
                 "evaluation=none", "hardware=cpu", "packing.row_length=null", "schedule=constant",
                 "dataset.validation_share=0.2", "method.rpo_alpha=0.5", f"training.max_steps={NUM_STEPS}",
                 f"training.global_samples={A_STEP}", f"outputs={outputs}", *overrides]  # fmt: skip
        ended = run_forked(words)
        assert ended.exit_code == 0, ended.output
        assert "Traceback" not in ended.output
        return read_metrics(outputs / "quickstart" / "latest")

    return train


@pytest.mark.parametrize("peft", [FULL, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("strategy", ["ddp", "zero3", pytest.param("zero2", marks=pytest.mark.slow)])
def test_two_ranks_train_as_one(lines_of: Callable, strategy: str, peft: tuple[str, ...]) -> None:
    *alone, held_out = lines_of("parallelism=single", *peft)
    *together, held_out_together = lines_of(f"parallelism={strategy}", *ON_TWO, *peft)
    assert len(together) == NUM_STEPS
    for name in MEANS:
        assert [line[name] for line in together] == pytest.approx([line[name] for line in alone], rel=2e-5, abs=2e-5)
        key = f"validation_{name}"
        assert held_out_together[key] == pytest.approx(held_out[key], rel=2e-5, abs=2e-5)
    # Before the first update, sums in another order are all that differs.
    assert together[0]["loss"] == pytest.approx(alone[0]["loss"], rel=1e-6)
