"""The memory plan of QLoRA against the runs on an H200 that were recorded."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
from gpu_quantised import ATTENTION, CASES, WORDS, planned_gib, recorded, write_model


@pytest.mark.filterwarnings("ignore")
def test_qlora_is_planned_within_the_bounds_of_every_peak() -> None:
    lines = recorded()
    assert len(lines) >= 8
    errors = {line["name"]: line["planned_gib"] / max(line["memory_gib"]) - 1 for line in lines}
    assert not {name: f"{error:+.1%}" for name, error in errors.items() if not -0.05 <= error <= 0.10}
    assert any(line["planned_then_gib"] < 0.7 * max(line["memory_gib"]) for line in lines), "what was wrong before"


@pytest.mark.filterwarnings("ignore")
def test_weights_in_bf16_keep_less_of_a_pass(tmp_path: Path) -> None:
    """What products of 4-bit weights give back is then in bf16, as what they are given."""
    model = write_model("qwen25_7b", tmp_path, has_weights=False)
    stored = [*WORDS, f"model.path={model}", "parallelism=single", "activation=stored", "peft.dropout=0.0", *ATTENTION]
    tokens, inner, layers = 16384, 18944, 5
    less = planned_gib([*stored, "precision.master_weights=fp32"]) - planned_gib(stored)
    assert less > 6 * tokens * inner * layers / 2**30


def test_every_case_may_be_run(tmp_path: Path) -> None:
    for width, more in CASES.values():
        model = write_model(width, tmp_path, has_weights=False)
        assert planned_gib([*WORDS, f"model.path={model}", *more]) > 1
    with pytest.raises(ValueError, match="no-such"):
        planned_gib([*WORDS, f"model.path={tmp_path}", "parallelism=no-such"])
