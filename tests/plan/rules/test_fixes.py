"""A fix that is pasted alone ends at a sound configuration, and not at another rule."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tunebook.config.choices import (
    Attention,
    Compute,
    Generation,
    MasterWeights,
    PackingMode,
    PeftMethod,
    Source,
    Strategy,
    Switch,
    Weights,
)
from tunebook.config.schema import FsdpConfig, ZeroConfig
from tunebook.plan.rules import check

from ..memory.layers import measured as traced
from .rule_cases import typed

QUANTIZED = ("gptq", "awq", "eight_bit", "four_bit")
FP8 = {"precision.compute": Compute.fp8}
LORA, QLORA = ({"peft.method": method} for method in (PeftMethod.lora, PeftMethod.qlora))
OLD = {"hardware.generation": Generation.volta, "precision.tf32": Switch.disabled}
ON_CPU = OLD | {"hardware.generation": Generation.cpu}
FP32_ON_CPU = ON_CPU | {"precision.compute": Compute.fp32, "attention.implementation": Attention.sdpa}


def errors(config) -> dict[str, str]:
    return {problem.id: problem.fix for problem in check(config) if problem.is_error}


def base(name: str) -> dict[str, Any]:
    return {"model.name": None, "model.path": name}


@pytest.mark.parametrize("place", [{}, FP32_ON_CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize("method", list(PeftMethod), ids=lambda method: method.name)
@pytest.mark.parametrize("name", QUANTIZED)
def test_over_a_quantized_base_every_fix_ends_the_matter(name, method, place, sound, changed):
    config = changed(sound, base(name) | {"peft.method": method} | place)
    is_qlora = method is PeftMethod.qlora
    if name == "four_bit" and is_qlora and not place:
        assert errors(config) == {}
        return
    for fix in errors(config).values():
        rest = errors(changed(config, typed(fix)))
        assert rest == {} or (is_qlora and bool(place)), rest  # two keys are wrong there: the device, and the base
    assert errors(config)


@pytest.mark.parametrize(
    ("name", "values", "fix"),
    [
        ("gptq", LORA, "model.path=FOLDER peft=qlora"),
        ("awq", LORA, "model.path=FOLDER peft=qlora"),
        ("eight_bit", LORA, "model.path=FOLDER peft=qlora"),
        ("four_bit", LORA, "peft=qlora"),
        ("gptq", LORA | FP32_ON_CPU, "model.path=FOLDER"),
        ("four_bit", LORA | FP32_ON_CPU, "model.path=FOLDER"),
        ("gptq", {}, "model.path=FOLDER"),
        ("four_bit", FP8, "peft=qlora precision.compute=bf16"),
        ("eight_bit", QLORA, "model.path=FOLDER"),
        ("four_bit", QLORA | FP32_ON_CPU, "peft.method=lora model.path=FOLDER"),
    ],
    ids=str,
)
def test_what_to_type_over_a_quantized_base(name, values, fix, sound, changed):
    assert list(errors(changed(sound, base(name) | values)).values()) == [fix]


def test_random_weights_are_not_quantized(sound, changed):
    config = changed(sound, base("gptq") | LORA | {"model.weights": Weights.random})
    assert errors(config) == {}


@pytest.mark.parametrize(
    ("values", "rule", "fix"),
    [
        (OLD, "bf16-on-volta", "precision.compute=fp32"),
        (OLD | FP8, "fp8-without-hardware", "precision.compute=fp32"),
        (OLD | {"precision.compute": Compute.fp16}, "fp16-with-bf16-base", "precision.compute=fp32"),
        (
            ON_CPU | {"precision.compute": Compute.fp16, "model.facts.dtype": "float16"},
            "fp16-on-cpu",
            "precision.compute=fp32",
        ),
        (
            {"hardware.generation": Generation.ampere, "precision.compute": Compute.fp8},
            "fp8-without-hardware",
            "precision.compute=bf16",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("kernel", [Attention.flash_attention_2, Attention.varlen_attention_4, Attention.sdpa])
def test_another_number_format_comes_with_an_attention_that_computes_in_it(values, rule, fix, kernel, sound, changed):
    config = changed(sound, values | {"attention.implementation": kernel})
    is_flash = fix.endswith("fp32") and kernel is not Attention.sdpa
    assert errors(config)[rule] == fix + (" attention.implementation=sdpa" if is_flash else "")
    left = errors(changed(config, typed(errors(config)[rule]))).keys()
    assert left <= {"flash-attention-below-ampere"} and not (is_flash and left)


def test_fp32_comes_with_weights_in_fp32(sound, changed):
    config = changed(sound, OLD | {"precision.master_weights": MasterWeights.bf16})
    fix = errors(config)["bf16-on-volta"]
    assert fix == "precision.compute=fp32 attention.implementation=sdpa precision.master_weights=fp32"
    assert errors(changed(config, typed(fix))) == {}


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        ({}, False),
        ({"hardware.generation": Generation.turing}, True),
        (LORA, True),
        ({"parallelism": ZeroConfig(strategy=Strategy.zero2), "hardware.gpus_per_node": 8}, True),
        ({"parallelism": FsdpConfig(strategy=Strategy.fsdp), "hardware.gpus_per_node": 8}, False),
    ],
    ids=["hopper", "turing", "lora", "zero2", "fsdp"],
)
def test_nobody_is_told_to_compile_for_an_fp8_that_is_refused(values, refused, sound, changed):
    found = {problem.id for problem in check(changed(sound, FP8 | values))}
    assert ("fp8-not-compiled" in found) is not refused
    assert bool(found & {"fp8-without-hardware", "fp8-with-adapters", "fp8-with-deepspeed"}) is refused


IN_TOKENS = {
    "training.global_samples": None,
    "training.global_tokens": 500_000,
    "packing.mode": PackingMode.padded,
    "training.micro_batch_size": None,
    "parallelism": ZeroConfig(strategy=Strategy.zero2),
    "hardware.gpus_per_node": 8,
}
GENERATED = {"dataset.source": Source.synthetic, "dataset.name": None}


@pytest.mark.parametrize(
    ("data", "mean"),
    [
        ({}, 2048),  # nothing is known: as long as may be
        ({"dataset.mean_tokens": 475.0}, 475),
        ({"dataset.mean_tokens": 9000.0}, 2048),
        (GENERATED, int(math.exp(5.8 + 0.9**2 / 2))),
        (GENERATED | {"dataset.synthetic.max_tokens": 300}, 300),
        (GENERATED | {"dataset.synthetic.min_tokens": 600}, 600),
        (GENERATED | {"dataset.synthetic.log_mean_tokens": 15.0}, 2048),
    ],
    ids=str,
)
def test_a_batch_in_tokens_is_as_many_documents_as_have_them(data, mean, sound, changed):
    config = changed(sound, IN_TOKENS | data)
    (fix,) = errors(config).values()
    assert fix == f"training.global_tokens=null training.global_samples={500_000 // mean // 8 * 8}"
    assert errors(changed(config, typed(fix))) == {}


def test_the_lengths_of_generated_documents_are_about_those_of_the_plan(sound, changed):
    from tunebook.data.mean_length import mean_tokens

    config = changed(sound, IN_TOKENS | GENERATED)
    (fix,) = errors(config).values()
    planned = mean_tokens(config)
    assert planned is not None
    assert typed(fix)["training.global_samples"] == pytest.approx(500_000 / planned, rel=0.06)


UNKNOWN = traced(num_layers=2, parameters=1, linear_inputs=1, adapter_parameters=1)


@pytest.mark.parametrize(
    ("targets", "saved", "fix"),
    [
        ([], ["self_attn", "mlp"], "peft.modules_to_save=[]"),
        ([], ["self_attn", "mlp", "embed_tokens"], "peft.modules_to_save=[embed_tokens]"),
        (["q_proj"], ["q_proj"], "peft.modules_to_save=[]"),
        (["q_proj", "k_proj"], ["lm_head", "self_attn"], "peft.modules_to_save=[lm_head]"),
        (["embed_tokens"], ["embed_tokens"], "peft.modules_to_save=[]"),
        (["model.layers.0.mlp.up_proj"], ["mlp"], "peft.modules_to_save=[]"),
        ([], ["self_attn"], None),
        (["q_proj", "up_proj"], ["self_attn"], None),
        ([], ["model.layers.0.self_attn", "mlp"], None),
        ([], ["embed_tokens", "lm_head"], None),
    ],
    ids=str,
)
def test_an_adapter_needs_a_module_that_is_not_trained_whole(targets, saved, fix, sound, changed):
    lists = {"peft.target_modules": targets, "peft.modules_to_save": saved}
    config = changed(sound, LORA | lists)
    assert errors(config) == ({} if fix is None else {"adapter-without-targets": f"{fix} or peft=full"})
    if fix is not None:
        assert errors(changed(config, typed(fix))) == {}


def test_of_other_architectures_only_what_is_named_twice_is_known(sound, changed):
    measured = {"model.facts.measured": UNKNOWN} | LORA
    twice = {"peft.target_modules": ["c_attn"], "peft.modules_to_save": ["c_attn"]}
    assert errors(changed(sound, measured | twice)).keys() == {"adapter-without-targets"}
    assert errors(changed(sound, measured | {"peft.modules_to_save": ["self_attn", "mlp"]})) == {}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("targets", "saved", "is_refused"),
    [
        ([], ["self_attn", "mlp"], True),
        (["q_proj"], ["self_attn"], True),
        ([], ["self_attn"], False),
        ([], ["model.layers.0.self_attn", "mlp"], False),
    ],
    ids=str,
)
def test_peft_says_the_same(targets, saved, is_refused, sound, changed):
    from peft import get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from tunebook.model.adapters import adapter_config

    config = changed(sound, LORA | {"peft.target_modules": targets, "peft.modules_to_save": saved})
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 32}
    model: Any = Qwen2ForCausalLM(Qwen2Config(**small, num_attention_heads=2, num_key_value_heads=2))
    assert ("adapter-without-targets" in errors(config)) is is_refused
    if is_refused:
        with pytest.raises(ValueError, match="No modules were targeted for adaptation"):
            get_peft_model(model, adapter_config(config))
        return
    adapted = get_peft_model(model, adapter_config(config))
    assert any("lora_A" in name for name, _ in adapted.named_parameters())
