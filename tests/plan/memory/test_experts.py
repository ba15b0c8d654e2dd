"""What layers with experts need at work, against the tensors that live in both of their passes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from tunebook.config.choices import Checkpointing, PeftMethod
from tunebook.config.compose import compose
from tunebook.hardware.detect import Machine
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.plan.memory.kept import kept_by_one_layer, tokens_per_pass
from tunebook.plan.memory.work import (
    backward_work,
    experts_backward_bytes,
    experts_forward_bytes,
    forward_work,
    routes_tokens,
)

from .layers import measured
from .live_experts import CHOSEN, HIDDEN, experts_at_work
from .live_tensors import Way, set_formats

BF16 = torch.bfloat16
NARROW, AS_WIDE, WIDE = HIDDEN // 2, HIDDEN, 4 * HIDDEN
FULL, LORA = Way(), Way(is_adapter=True)
WAYS = {
    "full": FULL,
    "full in fp32": replace(FULL, is_mixed=False),
    "full, bf16": replace(FULL, weights=BF16),
    "adapter": LORA,
    "adapter, bf16": replace(LORA, weights=BF16),
}


NO_GPU = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=120.0)


def set_to(config, way, kind, inner):
    """The configuration of the layers that are followed."""
    set_formats(config, way)
    config.peft.target_modules = ["q_proj"] if way.is_adapter else []
    layers = measured(
        experts_per_token=CHOSEN, expert_size=inner, has_expert_biases=kind == "gpt_oss",
        adapters={"q_proj": [HIDDEN, HIDDEN]}, expert_adapters={"down_proj": [HIDDEN, HIDDEN]},
    )  # fmt: skip
    config.model.facts = replace(config.model.facts, hidden_size=HIDDEN, measured=layers)
    return config.model.facts


NIGHTLY = pytest.mark.nightly
KINDS = [("qwen3_moe", NARROW), ("qwen3_moe", WIDE), ("gpt_oss", AS_WIDE), ("gpt_oss", NARROW), ("gpt_oss", WIDE)]
# Of the first three kinds half of the cases each time: each kind in each way, recomputed or not; all at night.
CASES = [
    pytest.param(*kind, name, is_recomputed, marks=[] if kind in KINDS[:3] and (place + place // 2) % 2 else NIGHTLY)
    for place, (kind, name, is_recomputed) in enumerate(product(KINDS, WAYS, [False, True]))
]


@pytest.mark.filterwarnings("ignore")  # of transformers, about gpt-oss's positions
@pytest.mark.parametrize(("kind", "inner", "name", "is_recomputed"), CASES)
def test_experts_have_at_work_what_was_followed(sound, kind, inner, name, is_recomputed):
    """Up to a few hidden states of a token, of which each of its experts has some: those of norms and of the sum."""
    way = replace(WAYS[name], is_recomputed=is_recomputed)
    facts = set_to(sound, way, kind, inner)
    forward, backward = experts_at_work(kind, inner, way)
    state = HIDDEN * way.weights.itemsize
    planned = experts_backward_bytes(sound, facts, is_recomputed=is_recomputed)
    assert -2.1 * state < planned - backward < 2.1 * state
    if not is_recomputed and inner <= HIDDEN:
        assert -6.2 * state < experts_forward_bytes(sound, facts) - forward < 0.1 * state


def test_layers_count_the_work_of_their_experts(sound):
    """The experts of a token have 3 hidden states each; offloading leaves what they save on its way."""
    sound.peft.method, facts = PeftMethod.full, set_to(sound, FULL, "qwen3_moe", NARROW)
    tokens, state = tokens_per_pass(sound), 4 * CHOSEN * HIDDEN
    assert backward_work(sound, facts) == tokens * 3 * state
    assert forward_work(sound, facts) == tokens * 2 * state
    sound.activation.checkpointing = Checkpointing.enabled
    assert backward_work(sound, facts) == kept_by_one_layer(sound, facts) + tokens * 3 * state
    sound.activation.checkpointing, sound.activation.offload = Checkpointing.disabled, True
    facts.measured.saved = {"autocast/full/flash": [0, 10**6, 0, 0, 10**6, 0]}
    experts = 4 * CHOSEN * (2 * HIDDEN + 4 * NARROW)
    assert forward_work(sound, facts) == tokens * (2 * state + 8 * HIDDEN + experts)
    assert backward_work(sound, facts) == tokens * (3 * state + experts)  # it has come back


@pytest.mark.parametrize("is_compiled", [False, True])
def test_experts_that_fsdp_gathers_in_16_bits_keep_half_as_much(is_compiled):
    """Numbers between the layers stay fp32: what dense layers keep more because of them, experts' layers keep too."""
    words = ["hardware=hopper", "dataset=synthetic", "training.global_samples=16", "training.max_length=2048",
             "packing.row_length=2048", "optimizer.learning_rate=1e-4", f"model.compile_layers={is_compiled}",
             "activation=stored", "attention=varlen_attention", "precision.compute=bf16",
             "precision.master_weights=fp32", "training.micro_batch_size=1", "packing=isolated"]  # fmt: skip
    kept = {}
    for strategy in ("ddp", "fsdp"):
        run = ["hardware.gpus_per_node=2", f"parallelism={strategy}"]
        for model in ("qwen3_30b_a3b", "qwen3_4b"):
            config = resolve_auto(compose(None, [*words, *run, f"model={model}"], []).config, NO_GPU).config
            kept[strategy, model] = kept_by_one_layer(config, config.model.facts)
    assert kept["ddp", "qwen3_4b"] == kept["fsdp", "qwen3_4b"]
    saved = {mode: numbers[4] for mode, numbers in config_facts("qwen3_30b_a3b").measured.saved.items()}
    kind = "compiled" if is_compiled else "flash"
    wide, narrow = saved[f"autocast/full/{kind}"], saved[f"bf16/full/{kind}"]
    of_stream = (2 if is_compiled else 10) * 2048  # hidden numbers of a token
    difference = (kept["ddp", "qwen3_30b_a3b"] - kept["fsdp", "qwen3_30b_a3b"]) / 2048  # tokens
    assert difference == wide - narrow - of_stream > 90_000


@pytest.mark.parametrize("model", ["qwen3_4b", "llama31_8b", "smollm2_135m", "mistral_7b", "smollm3_3b"])
def test_dense_layers_like_llamas_keep_the_same_more_in_fp32(model):
    assert more_in_fp32(model) == [10, 2, 2]


@pytest.mark.parametrize("model", ["gemma3_4b", "gemma4_12b", "glm4_9b", "olmo3_7b", "phi4"])
def test_dense_layers_of_other_builds_keep_no_more_than_that(model):
    assert all(more <= most for more, most in zip(more_in_fp32(model), [10, 2, 2], strict=True))


def more_in_fp32(model):
    """Bytes per hidden number that one layer keeps more under autocast than in bf16: plain, compiled, selective."""
    facts = config_facts(model)
    saved = {mode: numbers[4] for mode, numbers in facts.measured.saved.items()}
    kinds = ("flash", "compiled", "selective")
    return [(saved[f"autocast/full/{kind}"] - saved[f"bf16/full/{kind}"]) / facts.hidden_size for kind in kinds]


def config_facts(model):
    words = [f"model={model}", "dataset=synthetic", "training.global_samples=16", "training.max_length=2048"]
    return compose(None, [*words, "optimizer.learning_rate=1e-4"]).config.model.facts


@pytest.mark.parametrize(
    ("model", "experts"),
    [
        ("qwen3_30b_a3b", (8, 768, False)), ("olmoe_1b_7b", (8, 1024, False)), ("gpt_oss_20b", (4, 2880, True)),
        ("qwen3_4b", (0, 0, False)),
    ],
)  # fmt: skip
def test_the_books_models_have_their_experts(model, experts):
    words = [f"model={model}", "dataset=synthetic", "training.global_samples=16", "training.max_length=2048"]
    facts = compose(None, [*words, "optimizer.learning_rate=1e-4"]).config.model.facts
    layers = facts.measured
    assert (layers.experts_per_token, layers.expert_size, layers.has_expert_biases) == experts
    assert routes_tokens(facts) == (experts[0] > 0)
