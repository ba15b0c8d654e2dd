"""pass@k worked out by hand, and by the formula of code_eval."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tunebook.errors import RequestError
from tunebook.evaluate.sandbox.pass_at_k import estimate_pass_at_k, pass_at_k


@pytest.mark.parametrize(
    ("num_samples", "num_right", "k", "by_hand"),
    [
        (1, 0, 1, 0.0),
        (1, 1, 1, 1.0),
        (2, 1, 1, 1 / 2),
        (5, 2, 1, 2 / 5),
        (5, 2, 2, 1 - (3 * 2) / (5 * 4)),  # no right one among two: C(3,2)/C(5,2) = 3/10
        (5, 2, 3, 1 - 1 / 10),  # C(3,3)/C(5,3)
        (5, 2, 4, 1.0),  # four of five cannot all be among the three wrong ones
        (10, 1, 5, 1 / 2),
    ],
)
def test_one_problem(num_samples, num_right, k, by_hand):
    assert estimate_pass_at_k(num_samples, num_right, k) == pytest.approx(by_hand, abs=1e-15)


def code_evals_formula(n: int, c: int, k: int) -> float:
    """As in code_eval at evaluate 0.4: `estimate_pass_at_k.estimator`."""
    return 1.0 if n - c < k else 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def test_it_is_code_evals_for_every_small_case():
    for n in range(1, 21):
        for c in range(n + 1):
            for k in range(1, n + 1):
                assert estimate_pass_at_k(n, c, k) == pytest.approx(code_evals_formula(n, c, k), rel=1e-12, abs=1e-15)
                exact = 1 - math.comb(n - c, k) / math.comb(n, k)
                assert estimate_pass_at_k(n, c, k) == pytest.approx(exact, rel=1e-12, abs=1e-15)


def test_the_score_is_the_mean_over_problems():
    # code_eval's own example: add(a, b) once wrong and once right
    assert pass_at_k({"add": [False, True]}, [1, 2]) == {"pass@1": 0.5, "pass@2": 1.0}
    passed = {"a": [True, False, False, False], "b": [True] * 4, "c": [False] * 4}
    assert pass_at_k(passed, [1, 2]) == {"pass@1": pytest.approx(5 / 12), "pass@2": pytest.approx(1 / 2)}


@pytest.mark.parametrize(
    ("passed", "k", "message"),
    [
        ({"a": [True] * 5, "b": [True] * 3}, 4, "pass@4 needs at least 4 .* there are 3 of b; ask for k from 1 to 3"),
        ({"a": [True]}, 0, "pass@0 needs at least 1"),
        ({}, 1, "there are 0 of none; generate samples first"),
    ],
)  # fmt: skip
def test_too_few_samples(passed, k, message):
    with pytest.raises(RequestError, match=message) as caught:
        pass_at_k(passed, [k])
    assert caught.value.problem_id == "too-few-samples"
