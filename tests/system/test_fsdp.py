"""FSDP on two CPU ranks: losses, checkpoints and the best model are those of one rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.system.conftest import ON_TWO_RANKS, Run
from tests.system.forked import FSDP_ON_A_CPU
from tunebook.record.manifest import read_manifest

STEPS = 6
PAIRS = ("method=dpo", "dataset=synthetic", "dataset.synthetic.pairs=true", "dataset.synthetic.max_tokens=64")
SAVED = ("training.save_every_steps=2", "training.evaluate_every_steps=2", "dataset.validation_share=0.02")
LORA = ("peft=lora", "peft.dropout=0")
COMMON = ("evaluation=none", "hardware=cpu", f"training.max_steps={STEPS}", "dataset.max_documents=600")


@pytest.fixture(scope="module")
def train(run_forked: Callable[..., Any], read_run: Callable[[Path], Run], tmp_path_factory: pytest.TempPathFactory):
    """Train the quickstart's first steps, by `fsdp` or another strategy on two ranks, or on one."""

    def to_its_end(strategy: str, *overrides: str) -> Run:
        outputs = tmp_path_factory.mktemp("outputs")
        ranks = () if strategy == "single" else ON_TWO_RANKS
        words = [*COMMON, *ranks, f"parallelism={strategy}", f"outputs={outputs}", *overrides]
        ended = run_forked(["tunebook", "train", "quickstart", *words], **{FSDP_ON_A_CPU: "1"})
        assert ended.exit_code == 0, ended.output
        assert "Traceback" not in ended.output
        return read_run(outputs / "quickstart" / "latest")

    return to_its_end


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp_grad_op"])
@pytest.mark.parametrize("words", [(), LORA, (*PAIRS, *LORA)], ids=["full", "lora", "dpo"])
def test_two_ranks_train_as_one(train: Callable[..., Run], strategy: str, words: tuple[str, ...]) -> None:
    passes = ("packing=padded", "training.micro_batch_size=4")  # two for each rank
    alone, together = train("single", *words), train(strategy, *words, *passes)
    assert together.losses == pytest.approx(alone.losses, rel=1e-5)
    found = json.loads((together.folder / "manifest.json").read_text())["parallelism_found"]
    assert (found["strategy"], found["ranks"]) == (strategy, 2)


def test_the_best_checkpoint_is_loaded_and_another_is_resumed(train: Callable[..., Run]) -> None:
    """Upstream looked for the best step's folder before it was there: rank 0 then waited for the others forever."""
    rising = ("optimizer.learning_rate=0.3", "schedule.warmup_steps=0")  # so that the first is the best
    words = (*SAVED, *rising, "training.load_best_at_end=true", "training.keep_checkpoints=3")
    run = train("fsdp", *words)
    assert read_manifest(run.folder)["status"]["best_step"] == 2
    again = train("fsdp", *words, f"training.resume={run.folder / 'checkpoints' / 'checkpoint-4'}")
    assert again.losses == run.losses[4:]
    best, same = (load_file(each.folder / "model" / "model.safetensors") for each in (run, again))
    assert best.keys() == same.keys() and all(torch.equal(best[name], same[name]) for name in best)
