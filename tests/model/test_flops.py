"""The floating-point operations per token, compared with numbers computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tunebook.config.model_facts import ModelFacts
from tunebook.model.flops import attended_length_tokens, flops_per_token, model_flops_utilization

from ..plan.memory.layers import measured as traced


def qwen_3b() -> ModelFacts:
    return ModelFacts(
        architecture="Qwen2ForCausalLM", num_parameters=3_085_938_688, num_layers=36, hidden_size=2048,
        intermediate_size=11008, num_attention_heads=16, num_key_value_heads=2, vocab_size=151_936,
        max_position_embeddings=32_768, tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip


def test_the_attended_length_weighs_long_documents_by_their_tokens() -> None:
    assert attended_length_tokens([10, 10, 10]) == 10
    assert attended_length_tokens([100, 300]) == (10_000 + 90_000) / 400  # 250, though the mean is 200
    assert attended_length_tokens([]) == 0


def test_flops_of_a_token_and_their_share_of_the_peak_by_hand() -> None:
    # 6 x 3,085,938,688 = 18,515,632,128 and 12 x 36 x 2048 x 1000 / 2 = 442,368,000.
    assert flops_per_token(qwen_3b(), attended_length=1000) == 18_515_632_128 + 442_368_000
    # Frozen weights count four: 4 x 3,085,938,688 + 2 x 1,000,000 = 12,345,754,752.
    assert flops_per_token(qwen_3b(), attended_length=0, num_trained_parameters=1_000_000) == 12_345_754_752
    untied = replace(qwen_3b(), tie_word_embeddings=False)
    assert flops_per_token(untied, attended_length=0) == 6 * (3_085_938_688 - 151_936 * 2048)  # a look-up is no product
    # 26,000 tokens/s x 19 GFLOP = 494 TFLOP/s of 988.
    assert model_flops_utilization(26_000, 19e9, peak_tflops=988) == pytest.approx(0.5)


def test_attention_flops_equal_the_sum_over_every_pair_of_tokens() -> None:
    facts = qwen_3b()
    length = 2000
    pairs = sum(range(1, length + 1))  # the i-th token sees i tokens
    # Forward 2 products of 2 x hidden operations per pair and layer, backward twice that.
    exact = 3 * 2 * 2 * facts.hidden_size * facts.num_layers * pairs / length
    formula = flops_per_token(facts, attended_length=length) - 6 * facts.num_parameters
    assert formula == pytest.approx(exact, rel=1e-3)  # the formula leaves out the half pair of the diagonal


def test_only_active_experts_count() -> None:
    facts = qwen_3b()
    facts.measured = traced(num_layers=36, parameters=2_000_000_000, active_parameters=500_000_000)
    active = 3_085_938_688 - 1_500_000_000
    assert flops_per_token(facts, attended_length=0) == 6 * active
    assert flops_per_token(facts, attended_length=0, num_trained_parameters=10) == 4 * active + 20
    facts.num_layers = 18  # half of what was measured
    assert flops_per_token(facts, attended_length=0) == 6 * (3_085_938_688 - 750_000_000)


def test_a_window_bounds_what_a_token_is_compared_with() -> None:
    """Of 2,000 tokens the i-th sees the last 128 at most; heads are twice as wide as the hidden numbers."""
    facts, length, window = qwen_3b(), 2000, 128
    facts.measured = traced(
        num_layers=36, parameters=1, active_parameters=1, attention_width=6 * 4096, sliding_width=30 * 4096,
        sliding_window=window,
    )  # fmt: skip
    whole = sum(range(1, length + 1))
    within = sum(min(number, window) for number in range(1, length + 1))
    exact = 3 * 2 * 2 * 4096 * (6 * whole + 30 * within) / length
    formula = flops_per_token(facts, attended_length=length) - 6 * facts.num_parameters
    assert formula == pytest.approx(exact, rel=3e-3)
    shorter = flops_per_token(facts, attended_length=100) - 6 * facts.num_parameters
    assert shorter == 12 * 36 * 4096 * 100 / 2
