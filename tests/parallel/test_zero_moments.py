"""What a rank holds at once in a step of real DeepSpeed, against the plan's numbers for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tunebook.config.choices import MixedPrecision
from tunebook.plan.memory.ledger import Moment
from tunebook.plan.memory.rows import step_ledger
from tunebook.plan.memory.states import state_bytes, step_gradient_bytes

from ..plan.memory.layers import llama_layers

pytestmark = pytest.mark.nightly  # a process with DeepSpeed takes half a minute
RANKS = 4
# Of stages 1 and 2 rank 0, which has a piece of nothing but the embeddings, holds most in the step, and rank 1, which
# has the rest of them and of layers, between passes. One process each: nothing can be measured after stage 3.
AT_ONCE = ((0, ("1-autocast", "1-cast", "2-autocast", "2-cast", "3-autocast")), (0, ("3-cast",)),
           (1, ("2-autocast", "2-cast")))  # fmt: skip
CASES = [case for _, cases in AT_ONCE[:2] for case in cases]
SIZES = ("num_layers", "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads",
         "num_parameters")  # fmt: skip
NEAR = {"rel": 0.01}  # norms, and a buffer of 256 x 256 gradients


@pytest.fixture(scope="module")
def followed():
    """What `zero_steps.py` found, by case, of the rank that holds most."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"LOCAL_RANK": "0", "WORLD_SIZE": str(RANKS), "PATH": path}
    script = Path(__file__).with_name("zero_steps.py")
    words = [
        sys.executable,
        "-W",
        "ignore",
        str(script),
        str(RANKS),
        *(f"{rank}:{','.join(of)}" for rank, of in AT_ONCE),
    ]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, dict[str, Any]] = {}
    for line in [line for line in ended.stdout.splitlines() if line.startswith("{")]:
        for case, one in json.loads(line).items():
            found[case] = {key: max(value, one[key]) for key, value in found.get(case, one).items()}
    return found


@pytest.fixture
def planned(config_on, followed):
    """A case as it is planned: configuration and facts."""

    def plan(case):
        stage, number_format = case.split("-")
        config = config_on(f"zero{stage}", RANKS, mixed_precision=MixedPrecision[number_format])
        sizes = {name: followed[case][name] for name in SIZES}
        facts = replace(config.model.facts, **sizes, tie_word_embeddings=False)
        facts.measured = llama_layers(facts)
        return config, facts

    return plan


@pytest.mark.parametrize("case", CASES)
def test_a_step_takes_what_is_planned_for_it(planned, followed, case):
    """On top of the model at rest and Adam's moments; stage 3 has a buffer for gradients at rest, too."""
    (config, facts), found = planned(case), followed[case]
    before = found["rest"] + 8 * found["num_parameters"] / RANKS
    if case.startswith("3"):
        before -= state_bytes(config, facts).gradients
    assert before + step_gradient_bytes(config, facts) == pytest.approx(found["step"], **NEAR)


@pytest.mark.parametrize("case", CASES)
def test_a_later_pass_finds_what_is_planned_of_earlier_ones(planned, followed, case):
    (config, facts), found = planned(case), followed[case]
    first, later = (
        sum(row.num_bytes for row in step_ledger(config, facts, accumulates=accumulates).at(Moment.forward))
        for accumulates in (False, True)
    )
    assert found["earlier"] == pytest.approx(later - first, abs=0.02 * found["rest"])


@pytest.mark.parametrize("case", ["3-autocast", "3-cast"])
def test_stage_3_has_a_master_copy_of_its_share_also_of_fp32_weights(planned, followed, case):
    (config, facts), found = planned(case), followed[case]
    states = state_bytes(config, facts)
    moments = 8 * found["num_parameters"] / RANKS
    assert states.weights + states.gradients + states.optimizer - moments == pytest.approx(found["rest"], **NEAR)


@pytest.mark.parametrize("case", CASES)
def test_the_master_copy_of_a_cast_model_is_of_weights_that_were_rounded(followed, case):
    """DeepSpeed makes it of the weights as it has cast them."""
    share = followed[case]["beyond_bf16"]
    if case.endswith("-cast"):
        assert share == 0
    else:
        assert share > 0.9
