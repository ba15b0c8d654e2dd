"""The stored measurements of doctor and the warnings of later plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tunebook.data.batch import solve_batch
from tunebook.errors import Problem
from tunebook.files import CACHE_VARIABLE
from tunebook.hardware.bandwidth import recall, remember
from tunebook.hardware.detect import Machine
from tunebook.plan.advice.links import slow_links

from ..doctor.conftest import h200, machine_with, measured, resolved

FOUR = machine_with(*(h200(index) for index in range(4)))
SLOW, FAST = measured(12.0), measured(360.0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    return tmp_path


def warnings(*words: str, machine: Machine = FOUR) -> list[Problem]:
    config = resolved(*words, machine=FOUR)
    return slow_links(config, solve_batch(config, None), machine)


def test_stored_measurement_is_read_back() -> None:
    remember(SLOW, FOUR)
    assert recall(FOUR, 4) == SLOW


@pytest.mark.parametrize(
    "changes",
    [{"problem": "rank 1 died"}, {"wrong": ["rank 1: sums"]}, {"backend": "gloo"}],
    ids=["ended", "wrong", "cpu"],
)
def test_failed_and_cpu_measurements_are_not_stored(changes: dict[str, Any]) -> None:
    remember(replace(SLOW, **changes), FOUR)
    assert recall(FOUR, 4) is None


def test_another_card_driver_or_number_of_gpus_was_not_measured() -> None:
    remember(SLOW, FOUR)
    exchanged = replace(FOUR, gpus=[h200(0, uuid="GPU-new"), *FOUR.gpus[1:]])
    assert recall(exchanged, 4) is None
    assert recall(replace(FOUR, driver="590.1"), 4) is None
    assert recall(FOUR, 2) is None


def test_measurement_belongs_to_its_nccl_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    remember(SLOW, FOUR)
    assert recall(FOUR, 4) == SLOW
    monkeypatch.delenv("NCCL_P2P_DISABLE")
    assert recall(FOUR, 4) is None
    remember(FAST, FOUR)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")  # takes the same way
    assert recall(FOUR, 4) == FAST


@pytest.mark.parametrize("content", ["", "[]", "{", '{"measurements": [{"bytes": 1}]}'])
def test_a_damaged_file_counts_as_nothing(content: str, cache: Path) -> None:
    remember(SLOW, FOUR)
    (file,) = (cache / "links").iterdir()
    file.write_text(content)
    assert recall(FOUR, 4) is None


def test_unwritable_cache_is_ignored(cache: Path) -> None:
    (cache / "links").write_text("a file where the folder should be")
    remember(SLOW, FOUR)
    assert recall(FOUR, 4) is None


@pytest.mark.parametrize(
    ("strategy", "fix"), [("zero3", "parallelism=zero2"), ("fsdp", "parallelism=fsdp_grad_op"), ("zero2", None)]
)
def test_only_a_strategy_that_gathers_weights_is_warned_of_slow_links(strategy: str, fix: str | None) -> None:
    remember(SLOW, FOUR)
    found = warnings("qwen3b_zero2", f"parallelism={strategy}")
    assert [(problem.id, problem.fix, problem.is_error) for problem in found] == (
        [("slow-links", fix, False)] if fix else []
    )
    assert all("at the measured 12 GB/s" in problem.message for problem in found)


def test_fast_links_or_none_measured_give_no_warning() -> None:
    assert warnings("qwen3b_zero2", "parallelism=zero3") == []
    remember(FAST, FOUR)
    assert warnings("qwen3b_zero2", "parallelism=zero3") == []


@pytest.mark.parametrize("words", [("launcher=slurm",), ("hardware.num_nodes=2", "launcher.master_address=127.0.0.1")])
def test_the_links_of_other_machines_were_not_measured_here(words: tuple[str, ...]) -> None:
    remember(SLOW, FOUR)
    assert warnings("qwen3b_zero2", "parallelism=zero3", *words) == []
