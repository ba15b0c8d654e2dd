"""Where blocks are compiled by themselves, why not elsewhere, and what that makes of the attention."""

from __future__ import annotations

import re
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
    WrapPolicy,
)
from tunebook.config.schema import DatasetConfig, FsdpConfig, ParallelismConfig, ZeroConfig
from tunebook.facts.architectures import COMPILED_ARCHITECTURES, SINK_ARCHITECTURES, VARLEN_ARCHITECTURES
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.plan.rules import check

from ..memory.layers import measured as traced
from ..plans import A100, H200, V100


@pytest.fixture(autouse=True)
def has_flash_attn(monkeypatch):
    """flash-attn 2 is installed."""
    monkeypatch.setattr("tunebook.plan.auto.kernels.installed_version", lambda package: "2.8.3")


def decided(config, machine):
    """The value and the reason, as they are listed among the choices."""
    resolution = resolve_auto(config, machine)
    choice = resolution.choice("model.compile_layers")
    assert choice.value is resolution.config.model.compile_layers
    return resolution.config, choice.why


def parallel(strategy, **settings):
    if strategy.name.startswith("zero"):
        return ZeroConfig(strategy=strategy, **settings)
    if strategy.name in ("fsdp", "fsdp_grad_op", "hsdp"):
        return FsdpConfig(strategy=strategy, **settings)
    return ParallelismConfig(strategy=strategy, **settings)


ON_THE_HOST = {"offload_optimizer": Offload.cpu}
COMPILED = {
    "as it is": {},
    "llama": {"model.facts.architecture": "LlamaForCausalLM"},
    "bf16": {"precision.compute": Compute.bf16},
    "fp8": {"precision.compute": Compute.fp8},
    "its attention": {"attention.implementation": Attention.varlen_attention},
    "packed": {"packing.mode": PackingMode.isolated},
    "recomputed": {"activation.checkpointing": Checkpointing.enabled},
    "stored": {"activation.checkpointing": Checkpointing.disabled},
    "lora": {"peft.method": PeftMethod.lora},
    "cast": {"parallelism": ZeroConfig(strategy=Strategy.zero2, mixed_precision=MixedPrecision.cast)},
    **{name: {"parallelism": parallel(Strategy[name])}
       for name in ("single", "ddp", "zero1", "zero2", "fsdp", "fsdp_grad_op", "hsdp")},
}  # fmt: skip


@pytest.mark.parametrize("values", COMPILED.values(), ids=COMPILED.keys())
@pytest.mark.parametrize("flash_attn", ["2.8.3", None])
def test_blocks_are_compiled_where_that_was_seen_working(undecided, changed, machine, monkeypatch, values, flash_attn):
    monkeypatch.setattr("tunebook.plan.auto.kernels.installed_version", lambda package: flash_attn)
    config, why = decided(changed(undecided, values), machine(H200, H200))
    assert config.model.compile_layers is True
    assert config.attention.implementation is Attention.varlen_attention
    assert config.packing.mode is PackingMode.isolated
    assert "8% faster so than with Liger's kernels" in why
    assert [problem for problem in check(config) if problem.is_error and "compile" in problem.id] == []


def test_a_beta_is_taken_only_where_it_is_asked_for(undecided, machine):
    def attention(*found):
        resolution = resolve_auto(undecided, machine(*found))
        return resolution.config, resolution.choice("attention.implementation")

    config, choice = attention(H200)
    assert choice.value == "varlen_attention"
    assert choice.why.endswith("varlen_attention, torch's own, does")
    undecided.packing.mode, undecided.model.compile_layers = PackingMode.padded, True
    assert attention(H200)[1].why.endswith("sdpa, torch's own, does")  # for packed rows only
    undecided.packing.mode, undecided.model.compile_layers = PackingMode.auto, None
    undecided.attention.implementation = Attention.varlen_attention_4
    config, choice = attention(H200)
    assert (choice.value, choice.why) == ("varlen_attention_4", "as asked")
    assert (config.model.compile_layers, config.packing.row_length) == (True, 32768)
    assert [problem.id for problem in check(config) if problem.is_error] == []


@pytest.mark.parametrize(
    ("gpu", "compute", "is_taken", "reason"),
    [
        (H200, Compute.auto, True, "computed once and not twice"),
        (H200, Compute.fp8, True, "computed once and not twice"),
        (H200, Compute.fp32, False, "in bf16 and fp8 only, not in fp32"),
        (V100, Compute.auto, False, "in bf16 and fp8 only, not in fp32"),
        (None, Compute.auto, False, "on GPUs only"),
    ],
)
def test_the_heads_gradients_are_made_in_the_forward_pass_where_that_was_seen(
    undecided, machine, gpu, compute, is_taken, reason
):
    undecided.precision.compute = compute
    resolution = resolve_auto(undecided, machine(*([gpu] if gpu else [])))
    choice = resolution.choice("model.one_pass_head")
    assert choice.value is resolution.config.model.one_pass_head is is_taken
    assert reason in choice.why
    undecided.model.one_pass_head = not is_taken  # as asked
    assert resolve_auto(undecided, machine(*([gpu] if gpu else []))).config.model.one_pass_head is not is_taken


NOT_COMPILED = {
    "fp32": ({"precision.compute": Compute.fp32}, "in bf16 and fp8 only, and precision.compute=fp32"),
    "fp16": ({"precision.compute": Compute.fp16}, "in bf16 and fp8 only, and precision.compute=fp16"),
    "liger": ({"model.liger_kernel": True}, "call Liger's kernels cannot be compiled (model.liger_kernel=true)"),
    "unknown": ({"model.facts": None, "model.name": "organization/never-downloaded"}, "architecture is not known"),
    "architecture": (
        {"model.facts.architecture": "FalconForCausalLM"},
        "FalconForCausalLM was not tested compiled; Cohere, GPTNeoX, ",
    ),
    "padded": ({"packing.mode": PackingMode.padded}, "packed rows only, and packing.mode=padded"),
    "sdpa": ({"attention.implementation": Attention.sdpa}, "varlen_attention_4 only, and sdpa is asked for"),
    "flash": ({"attention.implementation": Attention.flash_attention_2}, "only, and flash_attention_2 is asked for"),
    "deterministic": ({"training.deterministic": True}, "bitwise deterministic"),
    "tiles": ({"activation.mlp_tile_tokens": 4096}, "for each number of tiles (activation.mlp_tile_tokens)"),
    "zero3": ({"parallelism": parallel(Strategy.zero3)}, "under parallelism=zero3"),
    "by_size": ({"parallelism": parallel(Strategy.fsdp, wrap_policy=WrapPolicy.size)}, "other ones than the blocks"),
    "by_class": ({"parallelism": parallel(Strategy.hsdp, wrap_classes=["Qwen2MLP"])}, "other ones than the blocks"),
    "zero2_offload": ({"parallelism": parallel(Strategy.zero2, **ON_THE_HOST)}, "are in host memory"),
    "fsdp_offload": ({"parallelism": parallel(Strategy.fsdp, offload_parameters=Offload.cpu)}, "are in host memory"),
    "activation_offload": ({"activation.offload": True}, "are in host memory"),
    "dora": ({"peft.method": PeftMethod.lora, "peft.use_dora": True}, "several graphs with DoRA"),
    "shared_rows": ({"parallelism": parallel(Strategy.ddp, sequence_group_size=2)}, "compiled under FSDP only"),
    "qlora": ({"peft.method": PeftMethod.qlora}, "a quantized base yet (peft=qlora)"),
}


@pytest.mark.parametrize(("values", "reason"), NOT_COMPILED.values(), ids=NOT_COMPILED.keys())
def test_blocks_are_left_as_they_are_for_a_reason(undecided, changed, machine, values, reason):
    config, why = decided(changed(undecided, values), machine(H200, H200))
    assert config.model.compile_layers is False
    assert reason in why


def test_rows_that_gpus_share_are_compiled_under_fsdp(undecided, changed, machine):
    config, _ = decided(
        changed(undecided, {"parallelism": parallel(Strategy.fsdp, sequence_group_size=2)}), machine(H200, H200)
    )
    assert (config.model.compile_layers, config.attention.implementation) == (True, Attention.varlen_attention)


@pytest.mark.parametrize(
    ("gpu", "compute", "reason"),
    [
        (None, Compute.bf16, "on GPUs only"),
        (V100, Compute.bf16, "needs capability 8.0; volta is older"),
        (V100, Compute.auto, "needs capability 8.0; volta is older"),
    ],
    ids=["cpu", "volta_bf16", "volta"],
)
def test_older_gpus_and_cpus_are_left_as_they_are(undecided, machine, gpu, compute, reason):
    undecided.precision.compute = compute
    config, why = decided(undecided, machine(*([gpu] if gpu else [])))
    is_fp32_on_a_gpu = gpu is not None and compute is Compute.auto
    kernel = Attention.sdpa_by_document if is_fp32_on_a_gpu else Attention.sdpa
    assert (config.model.compile_layers, config.attention.implementation) == (False, kernel)
    assert reason in why


@pytest.mark.parametrize(
    "values",
    [
        {"packing.mode": PackingMode.padded},  # there is one document to a row
        {"training.deterministic": True},
        {"model.facts.architecture": "FalconForCausalLM"},  # not compared with sdpa
        {"precision.compute": Compute.fp16},  # not measured
    ],
    ids=str,
)
def test_fp32_goes_document_by_document_only_where_that_was_compared(undecided, changed, machine, values):
    assert decided(undecided, machine(V100))[0].attention.implementation is Attention.sdpa_by_document
    config, _ = decided(changed(undecided, values), machine(V100))
    assert config.attention.implementation is Attention.sdpa


@pytest.mark.parametrize(
    ("kernel", "way"),
    [
        (Attention.sdpa, "by a block mask"),
        (Attention.varlen_attention, "by their lengths (varlen)"),
        (Attention.flash_attention_2, "by their lengths (varlen)"),
        (Attention.sdpa_by_document, "by computing document by document"),
    ],
    ids=lambda value: value.name if isinstance(value, Attention) else "",
)
def test_how_documents_are_kept_apart_is_said(undecided, machine, kernel, way):
    undecided.attention.implementation = kernel
    choice = resolve_auto(undecided, machine(H200)).choice("packing.mode")
    assert (choice.value, choice.why) == (
        "isolated",
        f"rows without padding; {kernel.name} keeps documents apart {way}",
    )


def test_what_triton_lacks_decides_where_the_run_starts(undecided, machine):
    lacking = replace(machine(H200), missing_for_triton="no C compiler is found here (apt install gcc)")
    config, why = decided(undecided, lacking)
    assert config.model.compile_layers is False
    assert why == "Triton compiles a launcher for each kernel, and no C compiler is found here (apt install gcc)"
    undecided.hardware.generation = Generation.ampere  # planned for elsewhere, where the image has all of it
    assert decided(undecided, lacking)[0].model.compile_layers is True


@pytest.mark.parametrize("generation", [Generation.ampere, Generation.ada, Generation.hopper, Generation.blackwell])
def test_what_is_planned_for_an_image_compiles_from_ampere_on(undecided, machine, generation):
    undecided.hardware.generation = generation
    config, _ = decided(undecided, machine())
    assert (config.model.compile_layers, config.attention.implementation) == (True, Attention.varlen_attention)


def test_less_memory_is_planned_for_compiled_blocks(undecided, machine):
    """A row of 8,192 tokens takes 17.0 GiB with compiled blocks and 21.1 with others, and 83% of 24 GiB are 19.9.

    What compiled blocks compute again leaves room for half as much again.
    """
    undecided.training.max_length, undecided.hardware.memory_gib = 4096, 24.0
    rows = {}
    for asked, kept in ((None, "auto"), (None, "disabled"), (False, "auto")):
        undecided.model.compile_layers, undecided.activation.checkpointing = asked, Checkpointing[kept]
        resolved = resolve_auto(undecided, machine(H200)).config
        rows[asked, kept] = resolved.packing.row_length, resolved.activation.checkpointing.name
    assert rows == {
        (None, "auto"): (12288, "selective"),
        (None, "disabled"): (8192, "disabled"),
        (False, "auto"): (4096, "disabled"),
    }


def test_compiled_architectures_are_known_to_the_rest() -> None:
    """The kernel that compiles with the blocks must be one that `auto` may take for them."""
    assert COMPILED_ARCHITECTURES <= VARLEN_ARCHITECTURES
    assert not SINK_ARCHITECTURES & VARLEN_ARCHITECTURES


@pytest.mark.parametrize(
    ("gpu", "values", "kernel"),
    [
        (H200, {}, "varlen_attention"),
        (A100, {}, "varlen_attention"),
        (V100, {}, "eager"),
        (None, {}, "eager"),
        (H200, {"precision.compute": Compute.fp32}, "eager"),
        (H200, {"packing.mode": PackingMode.padded}, "eager"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("flash_attn", ["2.8.3", None])
def test_attention_sinks_are_packed_by_the_varlen_kernel_where_it_runs(
    undecided, changed, machine, monkeypatch, gpu, values, kernel, flash_attn
):
    monkeypatch.setattr("tunebook.plan.auto.kernels.installed_version", lambda package: flash_attn)
    facts = undecided.model.facts
    facts.architecture = "GptOssForCausalLM"
    facts.measured = traced(
        num_layers=facts.num_layers, parameters=1000, linear_inputs=10, adapter_parameters=10,
        attention=["eager", "flex_attention", "flash_attention_4", "varlen_attention"], isolates={"mask": False},
    )  # fmt: skip
    config, why = decided(changed(undecided, values), machine(*([gpu] if gpu else [])))
    packing = PackingMode.padded if kernel == "eager" else PackingMode.isolated
    assert (config.attention.implementation.name, config.packing.mode) == (kernel, packing)
    assert config.model.compile_layers is False
    if packing is PackingMode.isolated:
        assert "GptOssForCausalLM was not tested compiled" in why


@pytest.mark.parametrize(
    ("attention", "architecture", "isolates", "expected", "packing"),
    [
        (
            ["eager", "flex_attention", "flash_attention_2"],
            "Gemma2ForCausalLM",
            {"mask": True},
            "eager",
            PackingMode.isolated,
        ),
        (["eager", "flash_attention_4"], "GptOssForCausalLM", {"mask": False}, "eager", PackingMode.padded),
        (["eager", "sdpa"], "GraniteForCausalLM", {"mask": True}, "sdpa", PackingMode.isolated),
        ([], "GraniteForCausalLM", {}, "sdpa", PackingMode.isolated),  # nobody has looked
    ],
    ids=["without_sdpa", "sinks", "with_sdpa", "unknown"],
)
def test_an_attention_that_the_architecture_lacks_is_not_taken(
    undecided, machine, attention, architecture, isolates, expected, packing
):
    facts = undecided.model.facts
    facts.architecture = architecture
    facts.measured = traced(
        num_layers=facts.num_layers,
        parameters=1000,
        linear_inputs=10,
        adapter_parameters=10,
        attention=attention,
        isolates=isolates,
    )
    resolution = resolve_auto(undecided, machine())
    choices = {choice.key: choice for choice in resolution.choices}
    assert (choices["attention.implementation"].value, resolution.config.packing.mode) == (expected, packing)
    if expected == "eager":
        assert choices["attention.implementation"].why == f"{architecture} cannot attend by sdpa, but by eager"


@pytest.mark.parametrize(("steps", "is_compiled"), [(30, False), (30_000, True)])
def test_blocks_are_compiled_where_a_run_on_files_can_gain_what_that_costs(
    undecided, machine, tmp_path, steps, is_compiled
):
    (tmp_path / "few.jsonl").write_text('{"text": "one two three"}\n' * 100)
    undecided.dataset = DatasetConfig(source=Source.files, path=str(tmp_path / "few.jsonl"))
    undecided.training.max_steps = steps
    config, why = decided(undecided, machine(H200))
    assert config.model.compile_layers is is_compiled
    if not is_compiled:
        assert config.attention.implementation is Attention.flash_attention_2
        saved = re.search(r"cost at least 20 s, and save at most about (\S+) s of the steps", why)
        assert 0 < float(saved.group(1)) < 20
    undecided.model.compile_layers = True
    config, why = decided(undecided, machine(H200))
    assert (config.model.compile_layers, why) == (True, "as asked")


def test_a_few_steps_on_generated_documents_are_compiled_as_the_run_that_they_measure(undecided, machine):
    undecided.dataset = DatasetConfig(source=Source.synthetic)
    undecided.training.max_steps = 3
    assert decided(undecided, machine(H200))[0].model.compile_layers is True
