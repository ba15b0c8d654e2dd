"""Where blocks are compiled, and which attention and packing go with it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tunebook.config.choices import (
    Attention,
    Checkpointing,
    Compute,
    Generation,
    MixedPrecision,
    Offload,
    PackingMode,
    PeftMethod,
    Source,
    Strategy,
)
from tunebook.config.schema import DpoConfig, FsdpConfig, ParallelismConfig, ZeroConfig
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.plan.rules import check

from ..memory.layers import measured as traced
from ..plans import H200, V100

PAIRS = DpoConfig(name="dpo")
INSTALLED = "tunebook.plan.auto.kernels.installed_version"


@pytest.fixture(autouse=True)
def has_flash_attn(monkeypatch):
    """flash-attn 2 is installed."""
    monkeypatch.setattr(INSTALLED, lambda package: "2.8.3")


@pytest.fixture
def settled(undecided):
    """Everything open but what depends on the memory, which takes seconds to estimate."""
    undecided.parallelism.strategy = Strategy.ddp
    undecided.packing.row_length, undecided.activation.checkpointing = 8192, Checkpointing.disabled
    return undecided


def parallel(strategy, **settings):
    if strategy.name.startswith("zero"):
        return ZeroConfig(strategy=strategy, **settings)
    if strategy.name in ("fsdp", "fsdp_grad_op", "hsdp"):
        return FsdpConfig(strategy=strategy, **settings)
    return ParallelismConfig(strategy=strategy, **settings)


COMPILED = {
    "as it is": {},
    "llama": {"model.facts.architecture": "LlamaForCausalLM"},
    "fp8": {"precision.compute": Compute.fp8},
    "its attention": {"attention.implementation": Attention.varlen_attention},
    "recomputed": {"activation.checkpointing": Checkpointing.enabled},
    "lora": {"peft.method": PeftMethod.lora},
    "cast": {"parallelism": ZeroConfig(strategy=Strategy.zero2, mixed_precision=MixedPrecision.cast)},
    **{name: {"parallelism": parallel(Strategy[name])}
       for name in ("single", "ddp", "zero1", "zero2", "fsdp", "fsdp_grad_op", "hsdp")},
    "activation_offload": {"activation.offload": True},
    "qlora": {"peft.method": PeftMethod.qlora, "parallelism": parallel(Strategy.ddp)},
    "pairs": {"method": PAIRS, "parallelism": parallel(Strategy.single)},
    "pairs_with_lora": {"method": PAIRS, "peft.method": PeftMethod.lora, "parallelism": parallel(Strategy.single)},
}  # fmt: skip


@pytest.mark.parametrize("values", COMPILED.values(), ids=COMPILED.keys())
def test_blocks_are_compiled_where_that_was_seen_working(settled, changed, machine, values):
    config = resolve_auto(changed(settled, values), machine(H200, H200)).config
    assert config.model.compile_layers is True
    assert config.attention.implementation is Attention.varlen_attention
    assert config.packing.mode is PackingMode.isolated
    assert [problem for problem in check(config) if problem.is_error and "compile" in problem.id] == []


NOT_COMPILED = {
    "fp32": {"precision.compute": Compute.fp32},
    "fp16": {"precision.compute": Compute.fp16},
    "liger": {"model.liger_kernel": True},
    "unknown": {"model.facts": None, "model.name": "organization/never-downloaded"},
    "architecture": {"model.facts.architecture": "FalconForCausalLM"},
    "padded": {"packing.mode": PackingMode.padded},
    "sdpa": {"attention.implementation": Attention.sdpa},
    "flash": {"attention.implementation": Attention.flash_attention_2},
    "deterministic": {"training.deterministic": True},
    "small": {"model.facts.num_parameters": 1_000_000},
    "tiles": {"activation.mlp_tile_tokens": 4096},
    "zero3": {"parallelism": parallel(Strategy.zero3)},
    "other_units": {"parallelism": parallel(Strategy.fsdp, wrap_classes=["Block"])},
    "by_class": {"parallelism": parallel(Strategy.hsdp, wrap_classes=["Qwen2MLP"])},
    "zero2_offload": {"parallelism": parallel(Strategy.zero2, offload_optimizer=Offload.cpu)},
    "dora": {"peft.method": PeftMethod.lora, "peft.use_dora": True},
    "shared_rows": {"parallelism": parallel(Strategy.ddp, sequence_group_size=2)},
    "pairs_with_qlora": {"method": PAIRS, "peft.method": PeftMethod.qlora, "parallelism": parallel(Strategy.single)},
    "divided_pairs": {"method": PAIRS, "peft.method": PeftMethod.lora, "parallelism": parallel(Strategy.fsdp)},
    "divided_qlora": {"peft.method": PeftMethod.qlora, "parallelism": parallel(Strategy.fsdp)},
    "qlora_cast_by_deepspeed": {"peft.method": PeftMethod.qlora, "parallelism": parallel(Strategy.zero2)},
}


@pytest.mark.parametrize("values", NOT_COMPILED.values(), ids=NOT_COMPILED.keys())
def test_blocks_are_left_as_they_are_elsewhere(settled, changed, machine, values):
    assert resolve_auto(changed(settled, values), machine(H200, H200)).config.model.compile_layers is False


def test_missing_parts_of_triton_count_only_where_the_run_starts(settled, machine):
    lacking = replace(machine(H200), missing_for_triton="no C compiler is found here (apt install gcc)")
    choice = resolve_auto(settled, lacking).choice("model.compile_layers")
    assert choice.value is False and "no C compiler is found here" in choice.why
    settled.hardware.generation = Generation.ampere  # planned for elsewhere, where the image has all of it
    assert resolve_auto(settled, lacking).config.model.compile_layers is True


SINKS = ("GptOssForCausalLM", ["eager", "flex_attention", "flash_attention_4", "varlen_attention"], False)
CAPPED = ("Gemma2ForCausalLM", ["eager", "flex_attention", "flash_attention_2"], True)
FALCON = {"model.facts.architecture": "FalconForCausalLM"}


@pytest.mark.parametrize(
    ("gpu", "values", "model", "kernel", "packing"),
    [
        (None, {"precision.compute": Compute.bf16}, None, "sdpa", "isolated"),
        (V100, {"precision.compute": Compute.bf16}, None, "sdpa", "isolated"),
        (V100, {}, None, "sdpa_by_document", "isolated"),
        (V100, {"packing.mode": PackingMode.padded}, None, "sdpa", "padded"),  # there is one document to a row
        (V100, {"training.deterministic": True}, None, "sdpa", "isolated"),
        (V100, FALCON, None, "sdpa", "isolated"),  # not compared with sdpa
        (H200, {"parallelism": parallel(Strategy.fsdp, sequence_group_size=2)}, None, "varlen_attention", "isolated"),
        # Attention sinks are packed by the varlen kernel where it runs.
        (H200, {}, SINKS, "varlen_attention", "isolated"),
        (V100, {}, SINKS, "eager", "padded"),
        (H200, {"precision.compute": Compute.fp32}, SINKS, "eager", "padded"),
        (H200, {"packing.mode": PackingMode.padded}, SINKS, "eager", "padded"),
        (None, {}, CAPPED, "eager", "isolated"),
        (None, {}, ("GraniteForCausalLM", ["eager", "sdpa"], True), "sdpa", "isolated"),
        (None, {}, ("GraniteForCausalLM", ["eager", "sdpa"], None), "sdpa", "padded"),  # no small model showed it
    ],
)
def test_attention_and_packing(settled, changed, machine, gpu, values, model, kernel, packing):
    facts = settled.model.facts
    if model is not None:
        facts.architecture, attention, isolates = model
        facts.measured = traced(
            num_layers=facts.num_layers, parameters=1000, attention=attention, isolates={"mask": isolates}
        )
    config = resolve_auto(changed(settled, values), machine(*[gpu] * 2 if gpu else [])).config
    assert (config.attention.implementation.name, config.packing.mode.name) == (kernel, packing)
    assert config.model.one_pass_head is (gpu is not None and config.precision.compute is Compute.bf16)
    assert config.model.compile_layers is (kernel == "varlen_attention" and model is None)


def test_images_whose_tokens_see_each_other_get_a_mask(settled, changed, machine, tmp_path):
    turns = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "A cat."}]
    (tmp_path / "images.jsonl").write_text(json.dumps({"messages": turns, "images": ["a.png"]}))
    values = {
        "model.facts.architecture": "Gemma3ForConditionalGeneration", "model.compile_layers": False,
        "dataset.source": Source.files, "dataset.name": None, "dataset.path": str(tmp_path / "images.jsonl"),
    }  # fmt: skip
    config = resolve_auto(changed(settled, values), machine(H200)).config
    assert (config.attention.implementation, config.packing.mode) == (Attention.sdpa, PackingMode.padded)
