from __future__ import annotations

import json
from pathlib import Path

import pytest

from tunebook.config.schema import ModelFacts
from tunebook.errors import DataError
from tunebook.record.metrics import (
    MetricsWriter,
    attended_length_tokens,
    flops_per_token,
    model_flops_utilisation,
    read_metrics,
)


def qwen_3b() -> ModelFacts:
    return ModelFacts(
        architecture="Qwen2ForCausalLM", num_parameters=3_085_938_688, num_layers=36, hidden_size=2048,
        intermediate_size=11008, num_attention_heads=16, num_key_value_heads=2, vocab_size=151_936,
        max_position_embeddings=32_768, tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip


def test_every_line_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write({"step": 1, "loss": 2.5})
        assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.5}]
        writer.write({"step": 1, "validation_loss": 2.0})
    assert len(read_metrics(tmp_path)) == 2


def test_numbers_that_are_not_finite_become_null_and_are_named(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write({"step": 3, "loss": float("nan"), "grad_norm": float("inf"), "memory_gib": [1.0, float("nan")]})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {  # strict JSON: no NaN, no Infinity
        "step": 3, "loss": None, "grad_norm": None, "memory_gib": [1.0, None],
        "not_finite": ["loss", "grad_norm", "memory_gib[1]"],
    }  # fmt: skip


def test_a_line_cut_off_by_a_kill_is_left_out_and_the_next_attempt_does_not_append_to_it(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]
    with MetricsWriter(tmp_path) as writer:
        writer.write({"step": 2, "loss": 1.5})
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}]


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl line 2 is not JSON"):
        read_metrics(tmp_path)


def test_steps_that_a_resumed_run_trained_again_are_counted_once(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for step in (1, 2, 3, 4):
            writer.write({"step": step, "loss": 10.0 + step})
            if step in (2, 4):
                writer.write({"step": step, "validation_loss": 10.0 + step})
    with MetricsWriter(tmp_path) as writer:  # resumed from the checkpoint of step 2
        writer.write({"step": 3, "loss": 23.0})
    assert read_metrics(tmp_path) == [
        {"step": 1, "loss": 11.0},
        {"step": 2, "loss": 12.0},
        {"step": 2, "validation_loss": 12.0},
        {"step": 3, "loss": 23.0},
    ]


def test_no_file_means_no_lines(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []


def test_the_attended_length_weighs_long_documents_by_their_tokens() -> None:
    assert attended_length_tokens([10, 10, 10]) == 10
    assert attended_length_tokens([100, 300]) == (10_000 + 90_000) / 400  # 250, though the mean is 200
    assert attended_length_tokens([]) == 0


def test_flops_of_a_token_by_hand() -> None:
    # 6 x 3,085,938,688 = 18,515,632,128 and 12 x 36 x 2048 x 1000 / 2 = 442,368,000.
    assert flops_per_token(qwen_3b(), attended_length=1000) == 18_515_632_128 + 442_368_000


def test_frozen_weights_count_four_and_trained_ones_six() -> None:
    # 4 x 3,085,938,688 + 2 x 1,000,000 = 12,345,754,752.
    assert flops_per_token(qwen_3b(), attended_length=0, num_trained_parameters=1_000_000) == 12_345_754_752


def test_attention_flops_equal_the_sum_over_every_pair_of_tokens() -> None:
    facts = qwen_3b()
    length = 2000
    pairs = sum(range(1, length + 1))  # the i-th token sees i tokens
    # Forward 2 products of 2 x hidden operations per pair and layer, backward twice that.
    exact = 3 * 2 * 2 * facts.hidden_size * facts.num_layers * pairs / length
    formula = flops_per_token(facts, attended_length=length) - 6 * facts.num_parameters
    assert formula == pytest.approx(exact, rel=1e-3)  # the formula leaves out the half pair of the diagonal


def test_utilisation_is_the_share_of_the_peak() -> None:
    # 26,000 tokens/s x 19 GFLOP = 494 TFLOP/s of 988.
    assert model_flops_utilisation(26_000, 19e9, peak_tflops=988) == pytest.approx(0.5)
