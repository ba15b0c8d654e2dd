"""The relative difference of losses, and the allowed one."""

import math

import pytest

from tunebook.config.compose import compose
from tunebook.errors import RequestError
from tunebook.hardware.detect import Machine
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.record.losses import check_tolerance, compare_losses, tolerance_of

NO_GPU = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0)


def test_the_largest_relative_difference_and_its_step():
    difference = compare_losses([2.0, 1.01, 0.5], [2.0, 1.0, 0.5])
    assert difference.per_step == pytest.approx([0.0, 0.01, 0.0])
    assert (difference.largest, difference.at_step) == (pytest.approx(0.01), 2)


@pytest.mark.parametrize(
    ("losses", "reference", "at_step"),
    [
        ([2.0], [2.0, 1.0], 2),
        ([2.0, 1.0], [2.0], 2),
        ([2.0, None], [2.0, 1.0], 2),
        ([2.0, math.nan], [2.0, 1.0], 2),
        ([2.0, 1.0], [2.0, math.inf], 2),
    ],
)
def test_unmatched_steps_are_infinitely_different(losses, reference, at_step):
    difference = compare_losses(losses, reference)
    assert (difference.largest, difference.at_step) == (math.inf, at_step)


def test_missing_losses_do_not_agree():
    assert compare_losses([], []).largest == math.inf


@pytest.mark.parametrize(
    ("words", "tolerance"),
    [
        (["quickstart"], 1e-5),
        (["quickstart", "hardware=hopper", "precision=fp32"], 1e-4),
        (["quickstart", "hardware=hopper", "precision=bf16"], 2e-3),
        (["quickstart", "hardware=cpu", "precision=bf16"], 2e-3),
        (["quickstart", "hardware=hopper", "precision=fp8"], 1e-2),
    ],
)
def test_the_tolerance_follows_the_number_format(words, tolerance):
    assert tolerance_of(resolve_auto(compose(words[0], words[1:]).config, NO_GPU).config) == tolerance


@pytest.mark.parametrize("tolerance", [math.nan, math.inf, -math.inf, -1e-5])
def test_invalid_tolerance_is_refused(tolerance):
    with pytest.raises(RequestError, match=rf"--tolerance {tolerance:g}: .*type --tolerance 0.002, --tolerance 0 "):
        check_tolerance(tolerance)


@pytest.mark.parametrize("tolerance", [None, 0.0, 1e-5, 2.0])
def test_a_tolerance_from_0_is_one(tolerance):
    check_tolerance(tolerance)
