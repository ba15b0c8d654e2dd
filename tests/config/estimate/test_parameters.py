"""How many parameters are trained, by what is typed for an adapter."""

from __future__ import annotations

import pytest

from tunebook.config.choices import PeftMethod
from tunebook.config.estimate import estimate_memory
from tunebook.config.estimate.activations import head_gradient_bytes
from tunebook.config.estimate.parameters import count_parameters

HIDDEN, INNER, WORDS, LAYERS, RANK = 896, 4864, 151_936, 24, 8
KEYS = 128  # 2 of 14 heads
ALL = 4 * HIDDEN + 2 * (HIDDEN + KEYS) + 3 * (HIDDEN + INNER)


@pytest.fixture
def adapted(sound):
    sound.peft.method, sound.peft.rank = PeftMethod.lora, RANK
    return sound


@pytest.mark.parametrize(
    ("targets", "of_a_layer"),
    [
        ([], ALL),
        (["q_proj"], 2 * HIDDEN),
        (["self_attn.q_proj", "v_proj"], 2 * HIDDEN + HIDDEN + KEYS),
        (["down_proj"], HIDDEN + INNER),
        (["q_proj", "of_another_model"], ALL),  # rather too many than too few
    ],
)
def test_an_adapter_is_counted_where_it_is_put(adapted, targets, of_a_layer):
    adapted.peft.target_modules = targets
    assert count_parameters(adapted, adapted.model.facts).trained == RANK * of_a_layer * LAYERS


def test_what_is_saved_whole_is_trained_whole(adapted):
    facts, before = adapted.model.facts, estimate_memory(adapted, adapted.model.facts)
    assert head_gradient_bytes(adapted, facts) == 0
    adapted.peft.modules_to_save = ["lm_head", "model.embed_tokens"]
    parameters = count_parameters(adapted, facts)
    assert parameters.trained == RANK * ALL * LAYERS + 2 * WORDS * HIDDEN
    assert (parameters.trained_embeddings, parameters.trained_head) == (WORDS * HIDDEN, WORDS * HIDDEN)
    assert head_gradient_bytes(adapted, facts) == 4 * WORDS * HIDDEN
    after = estimate_memory(adapted, facts)
    assert after.optimizer_gib - before.optimizer_gib == pytest.approx(8 * 2 * WORDS * HIDDEN / 2**30)
    assert after.weights_gib - before.weights_gib == pytest.approx(4 * 2 * WORDS * HIDDEN / 2**30)  # PEFT's copies


def test_the_embeddings_alone_leave_the_head_frozen(adapted):
    adapted.peft.modules_to_save = ["embed_tokens"]
    parameters = count_parameters(adapted, adapted.model.facts)
    assert (parameters.trained_embeddings, parameters.trained_head) == (WORDS * HIDDEN, 0)
