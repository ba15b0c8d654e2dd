"""What `auto` becomes on each machine."""

from __future__ import annotations

import copy
import json

import pytest

from tunebook.config.choices import (
    Attention,
    Checkpointing,
    Compute,
    Generation,
    LauncherName,
    MasterWeights,
    PackingMode,
    PeftMethod,
    Strategy,
)
from tunebook.config.compose import compose
from tunebook.config.launchers import SlurmConfig
from tunebook.config.schema import FsdpConfig, ZeroConfig
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.plan.rules import check

from ..memory.layers import measured as traced
from ..plans import A100, H200, V100, resolved


def values(resolution):
    return {choice.key: choice.value for choice in resolution.choices}


@pytest.fixture(autouse=True)
def has_no_flash(monkeypatch):
    """flash-attn 2 is not installed in this environment."""
    monkeypatch.setattr("tunebook.plan.auto.kernels.installed_version", lambda package: None)


def test_two_h200(undecided, machine):
    undecided.parallelism.strategy = Strategy.ddp
    before = copy.deepcopy(undecided)
    resolution = resolve_auto(undecided, machine(H200, H200))
    assert values(resolution) == {
        "hardware.generation": "hopper",
        "hardware.gpus_per_node": 2,
        "hardware.memory_gib": 140.4,
        "precision.compute": "bf16",
        "precision.master_weights": "fp32",
        "precision.tf32": "enabled",
        "model.compile_layers": True,
        "model.one_pass_head": True,
        "attention.implementation": "varlen_attention",
        "packing.mode": "isolated",
        "parallelism.strategy": "ddp",
        "packing.row_length": 32768,  # 16 x max_length
        "training.micro_batch_size": 1,
        "activation.offload": False,
        "activation.checkpointing": "disabled",
        "activation.memory_budget": 1.0,
    }
    assert (resolution.problem, resolution.not_runnable_reason) == (None, "")
    assert all(choice.why for choice in resolution.choices)
    assert undecided == before


LAYERS = {"num_layers": 36, "parameters": 1000}
AMPERE = {"hardware.reference.generation": Generation.ampere}
ON_SLURM = {"launcher": SlurmConfig(name=LauncherName.slurm)}
NOT_COMPILED, COMPILED = {"model.compile_layers": False}, {"model.compile_layers": True}
PADDED = {"packing.mode": PackingMode.padded}
LEAKING = {
    "model.facts.architecture": "BloomForCausalLM",
    "model.facts.measured": traced(**LAYERS, isolates={"mask": False, "lengths": False}),
}
GATED = {
    "model.facts.architecture": "Qwen3_5ForCausalLM",
    "model.facts.measured": traced(**LAYERS, isolates={"mask": True, "lengths": True}, packing_packages=["fla-core"]),
}
HOPPER, VOLTA = {"hardware.generation": Generation.hopper}, {"hardware.generation": Generation.volta}
FOUR_VOLTA = {"hardware.generation": Generation.volta, "hardware.gpus_per_node": 4}
IN_DDP = {"parallelism.strategy": Strategy.ddp}
EIGHT = {
    "hardware.reference.generation": Generation.hopper,
    "hardware.reference.gpus_per_node": 8,
    "hardware.reference.memory_gib": 80.0,
}
HSDP = ON_SLURM | {"parallelism": FsdpConfig(strategy=Strategy.hsdp), "hardware.num_nodes": 2}
BF16_WEIGHTS = {"precision.master_weights": MasterWeights.bf16, "model.facts.dtype": "float32"}
ROW, KERNEL, PACKING = "packing.row_length", "attention.implementation", "packing.mode"
# Decisions by the memory, which takes seconds to estimate.
SETTLED = {ROW: 2048, "activation.checkpointing": Checkpointing.disabled}


@pytest.mark.parametrize(
    ("changes", "gpus", "expected"),
    [
        # Rows: half as long where the kernel computes the whole square, a multiple that deals a budget evenly, and four
        # times as long where blocks are compiled.
        ({KERNEL: Attention.sdpa}, [H200], {ROW: 4096}),
        (NOT_COMPILED | {"training.global_samples": None, "training.global_tokens": 12_288}, [H200], {ROW: 6144}),
        (NOT_COMPILED, [H200], {ROW: 8192}),
        ({"hardware.memory_gib": 8.0}, [V100], {ROW: 2048}),
        ({ROW: 2100}, [H200], {ROW: 2100}),
        # The kernel: what the GPU, the number format, the rows and the architecture allow, and what is installed.
        ({}, [V100], {KERNEL: "sdpa_by_document", "precision.tf32": "disabled", "precision.compute": "fp32"}),
        (COMPILED | PADDED, [H200], {KERNEL: "sdpa"}),
        (NOT_COMPILED, [A100], {KERNEL: "varlen_attention"}),
        (NOT_COMPILED | {"hardware.generation": Generation.ampere}, [], {KERNEL: "flash_attention_2"}),  # in the image
        ({"model.facts.architecture": "Gemma2ForCausalLM"}, [A100], {KERNEL: "sdpa"}),  # caps its attention logits
        (LEAKING, [H200], {PACKING: "padded"}),
        (GATED, [], {PACKING: "isolated"}),
        (GATED, [H200], {PACKING: "padded"}),  # fla-core is not installed
        (GATED | HOPPER, [], {PACKING: "isolated"}),  # planned for its image
        (GATED | VOLTA, [], {PACKING: "padded"}),
        (PADDED, [H200], {"training.micro_batch_size": None}),
        (BF16_WEIGHTS, [H200], {"precision.compute": "bf16"}),
        # The machine: as found, else the recipe's, else as named.
        ({}, [], {"hardware.generation": "cpu", "precision.compute": "fp32", "hardware.memory_gib": 32.0, ROW: 2048}),
        (IN_DDP | FOUR_VOLTA, [H200], {"hardware.memory_gib": 32.0, "hardware.generation": "volta"}),
        (IN_DDP | HOPPER, [], {"hardware.gpus_per_node": 1, "hardware.memory_gib": 79.6}),
        (IN_DDP | EIGHT, [], {"hardware.gpus_per_node": 8, "hardware.memory_gib": 80.0}),
        (ON_SLURM | AMPERE, [], {"hardware.generation": "ampere"}),
        (IN_DDP, [H200, V100], {"hardware.generation": "volta"}),
        ({}, [H200, V100], {"hardware.gpus_per_node": 1, "hardware.generation": "hopper"}),
        (HSDP, 8 * [H200], {"parallelism.shard_group_size": 8}),
    ],
)
def test_what_is_decided_breaks_no_rule(undecided, changed, machine, changes, gpus, expected):
    settled = {} if ROW in expected else SETTLED
    resolution = resolve_auto(changed(undecided, settled | changes), machine(*gpus))
    assert {key: values(resolution)[key] for key in expected} == expected
    assert not [problem for problem in check(resolution.config) if problem.is_error]


@pytest.mark.parametrize(
    ("dtype", "gpu", "compute"),
    [
        ("bfloat16", A100, Compute.bf16),
        ("float16", A100, Compute.bf16),
        ("float32", A100, Compute.bf16),
        ("bfloat16", V100, Compute.fp32),
        ("float16", V100, Compute.fp16),
        ("float32", V100, Compute.fp32),
        ("float16", None, Compute.fp32),
    ],
)
def test_the_base_models_dtype_is_matched(undecided, changed, machine, dtype, gpu, compute):
    undecided.model.facts.dtype = dtype
    resolution = resolve_auto(changed(undecided, SETTLED), machine(*([gpu] if gpu else [])))
    assert resolution.config.precision.compute is compute
    assert dtype in resolution.choice("precision.compute").why
    assert not [problem for problem in check(resolution.config) if problem.key == "precision.compute"]


def test_explicit_choices_are_kept_even_when_they_cannot_work(undecided, machine):
    undecided.precision.compute = Compute.bf16
    undecided.attention.implementation = Attention.flash_attention_2
    undecided.packing.mode = PackingMode.padded
    undecided.training.micro_batch_size = 4
    undecided.activation.checkpointing = Checkpointing.enabled
    resolution = resolve_auto(undecided, machine(V100))
    asked = {choice.key: choice.value for choice in resolution.choices if choice.why == "as asked"}
    assert asked == {
        "precision.compute": "bf16",
        "attention.implementation": "flash_attention_2",
        "packing.mode": "padded",
        "parallelism.strategy": "single",
        "training.micro_batch_size": 4,
        "activation.checkpointing": "enabled",
    }
    assert {problem.id for problem in check(resolution.config)} >= {"bf16-on-volta", "flash-attention-below-ampere"}


@pytest.mark.parametrize(
    ("auto_map", "mode"),
    [
        ({"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}, PackingMode.padded),
        ({"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}, PackingMode.isolated),
    ],
)
def test_a_model_of_code_of_its_own_is_padded(undecided, machine, tmp_path, auto_map, mode):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "auto_map": auto_map}))
    undecided.model.name, undecided.model.path = None, str(tmp_path)
    undecided.model.trust_remote_code, undecided.packing.row_length = True, 2048
    undecided.activation.checkpointing = Checkpointing.disabled
    assert resolve_auto(undecided, machine()).config.packing.mode is mode
    undecided.packing.mode = PackingMode.isolated  # asked for: the leak probe decides
    assert resolve_auto(undecided, machine()).config.packing.mode is PackingMode.isolated


LORA, FULL, DTYPE = {"peft.method": PeftMethod.lora}, {"peft.method": PeftMethod.full}, "model.facts.dtype"


@pytest.mark.parametrize(
    ("changes", "gpu", "weights"),
    [
        (LORA, H200, "bf16"),
        ({"peft.method": PeftMethod.qlora}, H200, "bf16"),
        (FULL, H200, "fp32"),
        (LORA | {DTYPE: "float16"}, H200, "bf16"),
        (LORA | {DTYPE: "float16"}, V100, "fp32"),
        (LORA | {DTYPE: "float32"}, H200, "fp32"),
        (LORA | {"precision.compute": Compute.fp32}, H200, "fp32"),
        (LORA | {"precision.compute": Compute.fp8}, H200, "bf16"),
        (FULL | {"precision.compute": Compute.fp8}, H200, "fp32"),
        (LORA, None, "fp32"),
        (LORA | {"parallelism": ZeroConfig(strategy=Strategy.zero2)}, H200, "fp32"),  # adapters would be bf16, too
        (LORA | {"precision.master_weights": MasterWeights.fp32}, H200, "fp32"),
        (FULL | {"precision.master_weights": MasterWeights.bf16}, H200, "bf16"),
    ],
)
def test_a_frozen_base_of_16_bits_is_kept_in_bf16(undecided, changed, machine, changes, gpu, weights):
    resolution = resolve_auto(changed(undecided, SETTLED | changes), machine(*([gpu] if gpu else [])))
    assert resolution.config.precision.master_weights is MasterWeights[weights]


@pytest.mark.parametrize(
    ("memory", "is_compiled", "budget"),
    [(24.0, None, 1), (19.0, None, 0.8), (15.5, None, 0.2), (13.0, None, None), (19.0, False, None)],
)
def test_parts_of_blocks_are_recomputed_before_whole_ones(undecided, machine, memory, is_compiled, budget):
    """7.4 GiB of states and 10.4 of activations; `budget`: None for whole layers."""
    undecided.hardware.memory_gib, undecided.model.compile_layers = memory, is_compiled
    undecided.packing.row_length = 8192
    activation = resolve_auto(undecided, machine(H200)).config.activation
    assert activation.checkpointing is (Checkpointing.enabled if budget is None else Checkpointing.disabled)
    assert budget is None or activation.memory_budget == budget


@pytest.mark.parametrize(
    ("changes", "gpus", "offload", "budget"),
    [
        ({}, [H200], True, 0.2),
        (FULL, [H200], False, 1),
        (IN_DDP, [H200, H200], False, 1),
        ({"activation.checkpointing": Checkpointing.enabled}, [H200], False, 1),
        ({"activation.memory_budget": 0.4}, [H200], False, 0.4),
        ({"activation.offload": False}, [H200], False, 1),
        ({"activation.offload": True, "hardware.memory_gib": 20.0}, [H200], True, 0.2),
    ],
)
def test_adapters_on_one_gpu_keep_a_part_on_the_host_before_layers_are_recomputed(
    undecided, changed, machine, changes, gpus, offload, budget
):
    undecided.hardware.memory_gib, undecided.packing.row_length = 4.5, 8192
    activation = resolve_auto(changed(undecided, LORA | changes), machine(*gpus)).config.activation
    is_whole = budget == 1
    assert (activation.offload, activation.memory_budget) == (offload, budget)
    assert activation.checkpointing is (Checkpointing.enabled if is_whole else Checkpointing.disabled)


def test_a_budget_that_is_typed_decides_about_checkpointing(undecided, machine):
    undecided.hardware.memory_gib, undecided.packing.row_length = 10.5, 8192
    undecided.activation.memory_budget = 0.3
    activation = resolve_auto(undecided, machine(H200)).config.activation
    assert (activation.checkpointing, activation.memory_budget) == (Checkpointing.disabled, 0.3)


LORA_IN_FP32 = ("model=llama3_8b", "peft=lora", "precision.master_weights=fp32")
QWEN_3B = ("qwen3b_zero2", "parallelism=single", "hardware=hopper", "hardware.gpus_per_node=1",
           "hardware.memory_gib=140.4")  # fmt: skip
ROWS_4096 = ("training.global_samples=null", "training.max_length=4096")


@pytest.mark.parametrize(
    ("words", "row", "budget"),
    [
        # One pass is all of a step, so no gradients of an earlier one are there: 110.5 of 112.3 GiB.
        ((*ROWS_4096, "training.global_tokens=32768"), 32_768, 0.8),
        ((*ROWS_4096, "training.global_tokens=65536"), 32_768, 0.6),
        ((*ROWS_4096, "training.global_tokens=32768", "activation=stored"), 16_384, 1),
        ((*ROWS_4096, "training.global_tokens=32768", "activation.memory_budget=0.3"), 16_384, 0.3),
        # LoRA was not seen to gain by longer rows, and recomputing cost it twice as much.
        pytest.param(
            (*ROWS_4096, "training.global_tokens=49152", *LORA_IN_FP32), 8192, 1, marks=pytest.mark.nightly
        ),
        # Eight documents are one pass of 8,192 tokens at most, however long a row may be.
        (("training.global_samples=8", "training.max_length=1024"), 8192, 1),
    ],
)  # fmt: skip
def test_a_longer_row_is_worth_computing_parts_of_blocks_again(words, row, budget):
    config = resolved(*QWEN_3B, *words)
    assert (config.packing.row_length, config.activation.memory_budget) == (row, budget)


@pytest.mark.parametrize(
    ("words", "row"),
    [
        (("training.global_samples=8", "training.max_length=512"), 512),  # a document for each GPU
        (("training.global_samples=640", "training.max_length=1024", "dataset.mean_tokens=100"), 16_384),
    ],
)
def test_a_row_is_no_longer_than_a_step_can_fill(words, row):
    """640 documents of 100 tokens are 80 for each GPU, taken for twice as long, and one of the longest."""
    eight = ("model=qwen25_05b", "dataset=synthetic", "hardware=hopper", "hardware.gpus_per_node=8")
    assert resolved(None, *eight, "parallelism=ddp", *words).packing.row_length == row


HUB = ["dataset=synthetic", "training.global_samples=16", "training.max_length=2048", "optimizer.learning_rate=1e-4",
       "hardware=hopper", "hardware.gpus_per_node=1", "hardware.memory_gib=140.4", "activation=stored",
       "packing.row_length=2048"]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["model=Qwen/Qwen3-4B"], True),
        (["model=Qwen/Qwen3-4B-Base"], False),  # with the same sizes
        (["model=Qwen/Qwen3-4B", "model.revision=main"], False),
        (["model=Qwen/Qwen3-4B", "model.trust_remote_code=true"], False),
    ],
)
def test_a_hub_name_of_the_book_has_the_books_facts(machine, monkeypatch, words, found):
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: None)
    config = resolve_auto(compose(None, [*HUB, *words]).config, machine()).config
    assert (config.model.facts is not None) is found
