"""What `auto` becomes on each machine, and why."""

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
    Strategy,
    Weights,
)
from tunebook.config.compose import compose
from tunebook.config.schema import FsdpConfig, ModelConfig, SlurmConfig
from tunebook.errors import RequestError
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.plan.memory.gpu import plan_memory
from tunebook.plan.rules import check
from tunebook.train import requirements as environment

from ..memory.layers import measured as traced
from ..plans import A100, H200, V100


def values(resolution):
    return {choice.key: choice.value for choice in resolution.choices}


@pytest.fixture
def has_flash(monkeypatch):
    """flash-attn 2 is installed in this environment."""
    monkeypatch.setattr("tunebook.plan.auto.kernels.installed_version", lambda package: "2.8.3")


@pytest.fixture
def has_no_flash(monkeypatch):
    monkeypatch.setattr("tunebook.plan.auto.kernels.installed_version", lambda package: None)


def test_one_h200(undecided, machine, has_flash):
    undecided.parallelism.strategy = Strategy.ddp
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
        "activation.checkpointing": "disabled",
    }
    assert resolution.problem is None
    assert resolution.why_not_runnable == ""
    assert resolution.choice("hardware.generation").why == "2 x NVIDIA H200 found here"
    assert resolution.choice("precision.compute").why == "the base model is bfloat16, and hopper computes bf16"


LAYERS = {"num_layers": 36, "parameters": 1000, "linear_inputs": 10, "adapter_parameters": 10}
AMPERE = {"hardware.reference.generation": Generation.ampere}
ON_SLURM = {"launcher": SlurmConfig(name=LauncherName.slurm)}
NOT_COMPILED, COMPILED = {"model.compile_layers": False}, {"model.compile_layers": True}
PADDED = {"packing.mode": PackingMode.padded}
LEAKING = {
    "model.facts.architecture": "BloomForCausalLM",
    "model.facts.measured": traced(**LAYERS, isolates={"mask": False}),
}
GATED = {
    "model.facts.architecture": "Qwen3_5ForCausalLM",
    "model.facts.measured": traced(**LAYERS, isolates={"mask": True}, packing_packages=["fla-core"]),
}
HOPPER, VOLTA = {"hardware.generation": Generation.hopper}, {"hardware.generation": Generation.volta}
FOUR_VOLTA = {"hardware.generation": Generation.volta, "hardware.gpus_per_node": 4}
IN_DDP = {"parallelism.strategy": Strategy.ddp}
HSDP = ON_SLURM | {"parallelism": FsdpConfig(strategy=Strategy.hsdp), "hardware.num_nodes": 2}
BF16_WEIGHTS = {"precision.master_weights": MasterWeights.bf16, "model.facts.dtype": "float32"}
BY_DOCUMENT = {"attention.implementation": "sdpa_by_document"}
ROW = "packing.row_length"
KERNEL = "attention.implementation"


@pytest.mark.parametrize(
    ("changes", "gpus", "expected", "why"),
    [
        # Rows: half as long where the kernel computes the whole square, a multiple that deals a budget evenly, and four
        # times as long where blocks are compiled.
        ({KERNEL: Attention.sdpa}, [H200], {ROW: 4096}, ""),
        (NOT_COMPILED | {"training.global_samples": None, "training.global_tokens": 12_288}, [H200], {ROW: 6144}, ""),
        ({}, [H200], {ROW: 32768}, ""),
        (NOT_COMPILED, [H200], {ROW: 8192}, ""),
        ({"hardware.memory_gib": 8.0}, [V100], {ROW: 2048}, ""),
        ({}, [], {ROW: 2048}, ""),
        ({ROW: 2100}, [H200], {ROW: 2100}, "as asked"),
        # The kernel: what the GPU, the number format, the rows and the architecture allow, and what is installed.
        ({}, [V100], {KERNEL: "sdpa_by_document", "precision.tf32": "disabled"}, "1.5 x as fast"),
        ({}, [V100], {"precision.compute": "fp32"}, "volta has no bf16; fp16 would overflow"),
        ({"precision.compute": Compute.fp32}, [H200], BY_DOCUMENT, ""),
        (COMPILED, [H200], {KERNEL: "varlen_attention"}, ""),
        (COMPILED | PADDED, [H200], {KERNEL: "sdpa"}, ""),
        (
            NOT_COMPILED,
            [A100],
            {KERNEL: "varlen_attention"},
            "torch brings it along; the package flash-attn is not installed here; the ampere image has it",
        ),
        (PADDED, [A100], {KERNEL: "sdpa"}, "the package flash-attn is not installed here"),
        ({"model.facts.architecture": "Gemma2ForCausalLM"}, [A100], {KERNEL: "sdpa"}, ""),  # caps its attention logits
        (LEAKING, [H200], {"packing.mode": "padded"}, "BloomForCausalLM cannot keep packed documents apart"),
        (GATED, [], {"packing.mode": "isolated"}, "by a block mask, and torch the states of its layers"),
        (
            GATED,
            [H200],
            {"packing.mode": "padded"},
            "Qwen3_5ForCausalLM keeps packed documents apart by fla-core on a GPU, which is not",
        ),
        (GATED | HOPPER, [], {"packing.mode": "isolated"}, ", and fla-core the states"),  # planned for its image
        (GATED | VOLTA, [], {"packing.mode": "padded"}, "on a GPU, which the volta image does not have"),
        (PADDED, [H200], {"training.micro_batch_size": None}, "the batch solver"),
        (BF16_WEIGHTS, [H200], {"precision.compute": "bf16"}, ""),
        # The machine: as found, else the recipe's, else as named.
        ({}, [], {"hardware.memory_gib": 32.0, "hardware.gpus_per_node": 1}, "32 GiB of host memory for 1 rank"),
        ({}, [], {"hardware.generation": "cpu", "precision.compute": "fp32", KERNEL: "sdpa"}, ""),
        (IN_DDP | FOUR_VOLTA, [H200], {"hardware.memory_gib": 32.0}, "of a V100-SXM2-32GB, the usual volta GPU"),
        (IN_DDP | FOUR_VOLTA, [H200], {"hardware.generation": "volta"}, "as asked"),
        (ON_SLURM | AMPERE, [], {"hardware.generation": "ampere"}, "launcher=slurm starts elsewhere"),
        (IN_DDP, [H200, V100], {"hardware.generation": "volta"}, "the oldest decides for all"),
        ({}, [H200, V100], {"hardware.gpus_per_node": 1, "hardware.generation": "hopper"}, ""),
        (HSDP, 8 * [H200], {"parallelism.shard_group_size": 8}, ""),
    ],
)
def test_what_is_decided_breaks_no_rule(undecided, changed, machine, has_no_flash, changes, gpus, expected, why):
    resolution = resolve_auto(changed(undecided, changes), machine(*gpus))
    assert {key: values(resolution)[key] for key in expected} == expected
    assert why in resolution.choice(next(iter(expected))).why
    assert not [problem for problem in check(resolution.config) if problem.is_error]


@pytest.mark.parametrize(
    ("changes", "gpus", "why_not"),
    [
        (IN_DDP | FOUR_VOLTA, [H200], "volta is set, and this machine has NVIDIA H200 (hopper)"),
        (ON_SLURM | AMPERE, [], None),
        (IN_DDP, [H200, V100], "the first 2 GPUs are of different generations: hopper, volta"),
        ({}, [H200, V100], None),
        ({}, [], None),
    ],
)
def test_whether_it_can_run_here(undecided, changed, machine, changes, gpus, why_not):
    problem = resolve_auto(changed(undecided, changes), machine(*gpus)).problem
    assert (problem and problem.message) == why_not


def test_no_gpu_and_a_gpu_recipe_is_planned_only(undecided, machine, has_no_flash):
    undecided.model.compile_layers = False
    undecided.hardware.reference.generation = Generation.ampere
    undecided.hardware.reference.gpus_per_node = 8
    undecided.hardware.reference.memory_gib = 40.0
    undecided.parallelism.strategy = Strategy.ddp
    resolution = resolve_auto(undecided, machine())
    hardware = resolution.config.hardware
    assert (hardware.generation, hardware.gpus_per_node, hardware.memory_gib) == (Generation.ampere, 8, 40.0)
    assert resolution.why_not_runnable == (
        "8 x ampere needed, and no GPU is found here: no NVIDIA driver answers here; try the same where the GPUs are "
        "(--dry-run shows here what it does there), or hardware.generation=cpu"
    )
    # not installed here, but what is planned for runs in its image, which has it
    assert resolution.config.attention.implementation is Attention.flash_attention_2
    assert "the ampere image has it" in resolution.choice("attention.implementation").why


def test_more_gpus_than_there_are(undecided, machine):
    undecided.parallelism.strategy = Strategy.ddp
    undecided.hardware.gpus_per_node = 8
    resolution = resolve_auto(undecided, machine(H200, H200))
    assert resolution.problem is not None
    assert (resolution.problem.id, resolution.problem.fix) == ("too-few-gpus-here", "hardware.gpus_per_node=2")


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
def test_the_base_models_dtype_is_matched(undecided, machine, dtype, gpu, compute):
    undecided.model.facts.dtype = dtype
    resolution = resolve_auto(undecided, machine(*([gpu] if gpu else [])))
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
    config = resolution.config
    assert config.precision.compute is Compute.bf16
    assert config.attention.implementation is Attention.flash_attention_2
    assert (config.packing.mode, config.training.micro_batch_size) == (PackingMode.padded, 4)
    asked = {choice.key for choice in resolution.choices if choice.why == "as asked"}
    assert asked == {
        "precision.compute",
        "attention.implementation",
        "packing.mode",
        "parallelism.strategy",
        "training.micro_batch_size",
        "activation.checkpointing",
    }
    assert {problem.id for problem in check(config)} >= {"bf16-on-volta", "flash-attention-below-ampere"}


def test_the_callers_configuration_is_not_changed(undecided, machine):
    before = copy.deepcopy(undecided)
    resolve_auto(undecided, machine(H200))
    assert undecided == before


@pytest.mark.parametrize(
    ("auto_map", "mode"),
    [
        ({"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}, PackingMode.padded),
        ({"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}, PackingMode.isolated),
        (None, PackingMode.isolated),
    ],
    ids=["model", "tokenizer", "none"],
)
def test_a_model_of_code_of_its_own_is_padded_whatever_its_class_is_called(
    undecided, machine, tmp_path, auto_map, mode
):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "auto_map": auto_map}))
    undecided.model.name, undecided.model.path = None, str(tmp_path)
    undecided.model.trust_remote_code = True
    resolution = resolve_auto(undecided, machine(H200))
    assert resolution.config.packing.mode is mode
    assert ("code of its own" in resolution.choice("packing.mode").why) is (mode is PackingMode.padded)
    undecided.packing.mode = PackingMode.isolated  # asked for: the leak probe decides
    assert resolve_auto(undecided, machine(H200)).config.packing.mode is PackingMode.isolated


ON_HOPPER = ("hardware=hopper", "hardware.gpus_per_node=1", "dataset=synthetic")


@pytest.mark.parametrize(
    ("words", "weights", "why"),
    [
        (["peft=lora"], "bf16", "as it is published"),
        (["peft=qlora", "model.weights=pretrained"], "bf16", "as it is published"),
        (["peft=lora", "parallelism=fsdp"], "bf16", "adapters are fp32"),
        (["peft=full"], "fp32", "lose updates"),
        (["peft=lora", "model.facts.dtype=float16"], "bf16", "float16, which products in bf16 round in any case"),
        (["peft=lora", "model.facts.dtype=float16", "parallelism=zero3"], "fp32", "DeepSpeed would compute"),
        (["peft=lora", "model.facts.dtype=float16", "hardware=volta"], "fp32", "these are in fp16"),
        (["peft=lora", "model.facts.dtype=float32"], "fp32", "the base model is float32"),
        (["peft=lora", "precision=fp32"], "fp32", "these are in fp32"),
        (["peft=lora", "hardware=volta"], "fp32", "these are in fp32"),
        (["peft=lora", "hardware=cpu"], "fp32", "these are in fp32"),
        (["peft=lora", "parallelism=zero2"], "fp32", "DeepSpeed would compute with adapters in bf16"),
        (["peft=lora", "precision.master_weights=fp32"], "fp32", "as asked"),
        (["peft=full", "precision.master_weights=bf16"], "bf16", "as asked"),
    ],
    ids=str,
)
def test_a_frozen_base_of_16_bits_is_kept_in_bf16(machine, words: list[str], weights: str, why: str) -> None:
    config = compose(None, ["model=qwen25_05b", *ON_HOPPER, *words]).config
    resolution = resolve_auto(config, machine())
    assert resolution.choice("precision.master_weights").value == weights
    assert why in resolution.choice("precision.master_weights").why


def test_a_base_in_bf16_takes_half_of_the_memory(machine) -> None:
    """An 8B model under LoRA fits a card of 24 GiB so, and its adapters still have all of fp32's optimizer states."""
    words = ["model=llama3_8b", "dataset=synthetic", "hardware=ampere", "hardware.gpus_per_node=1", "peft=lora",
             "hardware.memory_gib=24", "training.global_samples=16", "training.max_length=1024"]  # fmt: skip
    in_bf16, in_fp32 = (
        plan_memory(resolve_auto(compose(None, [*words, *more]).config, machine()).config)
        for more in ([], ["precision.master_weights=fp32"])
    )
    assert in_bf16 is not None and in_fp32 is not None
    assert (in_bf16.fits, in_fp32.fits) == (True, False)
    adapters = 41_943_040  # rank 16 on seven products of 32 layers
    assert in_bf16.memory.weights == pytest.approx((8.03e9 * 2 + 4 * adapters) / 2**30, rel=0.001)
    assert in_bf16.memory.optimizer == pytest.approx(8 * adapters / 2**30, rel=0.001)


def test_a_frozen_70b_published_in_float16_takes_two_bytes_a_weight(machine) -> None:
    words = ["model=llama2_70b", "peft=lora", "parallelism=fsdp", "dataset=synthetic", "hardware=ampere",
             "hardware.gpus_per_node=8", "hardware.memory_gib=80"]  # fmt: skip
    found = plan_memory(resolve_auto(compose(None, words).config, machine()).config)
    assert found is not None and found.fits
    assert found.memory.weights == pytest.approx(68.98e9 * 2 / 8 / 2**30, rel=0.02)


def test_a_model_that_does_not_fit_recomputes_its_activations(undecided, machine):
    undecided.model.facts.num_parameters = 5_000_000_000  # 16 bytes each: 74.5 GiB
    resolution = resolve_auto(undecided, machine(H200))
    assert resolution.config.activation.checkpointing is Checkpointing.disabled  # 83% of 140.4 GiB hold it
    resolution = resolve_auto(undecided, machine(A100, memory=80.0))
    assert resolution.config.activation.checkpointing is Checkpointing.enabled
    assert resolution.choice("activation.checkpointing").why.startswith("estimated 74.5 GiB of states")


@pytest.mark.parametrize(
    ("memory", "is_compiled", "kept", "why"),
    [
        (24.0, None, "disabled", "fit into 83% of 24 GiB, and it is faster"),
        (
            19.0,
            None,
            "selective",
            "functions recomputed 7.4 GiB of the latter do, 1.4% slower (Qwen2.5-3B, one H200)",
        ),
        (
            16.0,
            None,
            "enabled",
            "7.4 GiB of states and 10.4 GiB of activations and buffers do not fit into 83% of 16 GiB",
        ),
        (19.0, False, "enabled", "and 14.8 GiB of activations and buffers do not fit into 83% of 19 GiB"),
    ],
)
def test_parts_of_blocks_are_recomputed_before_whole_ones(undecided, machine, memory, is_compiled, kept, why):
    undecided.hardware.memory_gib, undecided.model.compile_layers = memory, is_compiled
    undecided.packing.row_length = 8192
    resolution = resolve_auto(undecided, machine(H200))
    assert resolution.config.activation.checkpointing.name == kept
    assert resolution.choice("activation.checkpointing").why.endswith(why)


LORA_IN_FP32 = ("peft=lora", "precision.master_weights=fp32")
QWEN_3B = ("qwen3b_zero2", "parallelism=single", "hardware=hopper", "hardware.gpus_per_node=1",
           "hardware.memory_gib=140.4", "training.global_samples=null", "training.max_length=4096")  # fmt: skip


@pytest.mark.parametrize(
    ("words", "row", "kept"),
    [
        # One pass is all of a step, so no gradients of an earlier one are there: 110.5 of 112.3 GiB.
        (("training.global_tokens=32768",), 32_768, "selective"),
        (("training.global_tokens=65536",), 16_384, "disabled"),
        (("training.global_tokens=32768", "activation=stored"), 16_384, "disabled"),
        (("training.global_tokens=32768", "activation=selective"), 32_768, "selective"),
        # LoRA was not seen to gain by longer rows, and recomputing cost it twice as much.
        (("training.global_tokens=49152", "model=llama3_8b", *LORA_IN_FP32), 8192, "disabled"),
        (
            ("training.global_tokens=49152", "model=llama3_8b", *LORA_IN_FP32, "activation=selective"),
            16_384,
            "selective",
        ),
        # A base in bf16 leaves room for longer ones with everything kept.
        (("training.global_tokens=49152", "model=llama3_8b", "peft=lora"), 12_288, "disabled"),
    ],
)
def test_a_longer_row_is_worth_computing_parts_of_blocks_again(machine, words, row, kept):
    resolved = resolve_auto(compose(QWEN_3B[0], [*QWEN_3B[1:], *words]).config, machine()).config
    assert (resolved.packing.row_length, resolved.activation.checkpointing.name) == (row, kept)


ON_ONE = ("qwen3b_zero2", "parallelism=single", "hardware=hopper", "hardware.gpus_per_node=1")
LLAMA_LORA = ("model=llama3_8b", *LORA_IN_FP32, "training.global_samples=64", "dataset.mean_tokens=200")


@pytest.mark.parametrize(
    ("words", "row", "kept"),
    [
        # Where parts are computed again anyway, and where rows would be very short otherwise, LoRA gains, too.
        ((*LLAMA_LORA, "hardware.memory_gib=56", "training.max_length=512"), 2560, "selective"),
        (
            (*LORA_IN_FP32, "dataset.mean_tokens=200", "hardware.memory_gib=24", "training.max_length=256"),
            2048,
            "selective",
        ),
        # Eight documents are one pass of 8,192 tokens at most, however long a row may be.
        (("hardware.memory_gib=140.4", "training.global_samples=8", "training.max_length=1024"), 8192, "disabled"),
    ],
    ids=["needed", "short", "few_documents"],
)
def test_parts_are_computed_again_where_that_saves_passes(machine, words, row, kept):
    resolved = resolve_auto(compose(ON_ONE[0], [*ON_ONE[1:], *words]).config, machine()).config
    assert (resolved.packing.row_length, resolved.activation.checkpointing.name) == (row, kept)


def test_parts_are_computed_again_only_where_the_plan_then_fits(machine):
    """Of 24 GiB 83% would hold the tensors, if the allocator gives back what it holds besides: `auto` on less."""
    resolved = resolve_auto(compose("zero1_lora", []).config, machine()).config
    assert resolved.activation.checkpointing is Checkpointing.enabled
    assert plan_memory(resolved).fits is True
    resolved.activation.checkpointing = Checkpointing.selective
    plan = plan_memory(resolved)
    assert (plan.memory.total, plan.fits) == (pytest.approx(24.0), True)


def write_config(folder, **changes):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float16",
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 32,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.usefixtures("traces_no_activations")
def test_facts_are_read_from_a_folder(undecided, machine, tmp_path):
    write_config(tmp_path)
    undecided.model = ModelConfig(path=str(tmp_path), weights=Weights.random)
    facts = resolve_auto(undecided, machine(V100)).config.model.facts
    assert facts is not None
    # 2 x 32 x 8 embeddings; per layer 2 x 8 x (8 + 4) attention, 3 x 8 x 16 feed-forward, 2 x 8 norms; the last norm
    assert facts.num_parameters == 512 + 2 * (192 + 384 + 16) + 8
    assert (facts.architecture, facts.dtype) == ("LlamaForCausalLM", "float16")


def test_unknown_sizes_are_no_error(undecided, machine, tmp_path):
    write_config(tmp_path, quantization_config={"quant_method": "gptq"})  # a rule refuses it, whatever its sizes
    undecided.model = ModelConfig(path=str(tmp_path))
    resolution = resolve_auto(undecided, machine(V100))
    assert resolution.config.model.facts is None
    assert resolution.config.precision.compute is Compute.fp16  # the dtype is known all the same
    assert resolution.choice("activation.checkpointing").why.startswith("the model's size is not known")


def test_a_hub_model_that_was_never_downloaded(undecided, machine):
    undecided.model = ModelConfig(name="organization/never-downloaded")
    resolution = resolve_auto(undecided, machine(H200))
    assert resolution.config.model.facts is None
    assert "dtype is not known before it is loaded" in resolution.choice("precision.compute").why


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": '])
def test_a_broken_config_json_is_named(undecided, machine, tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    undecided.model = ModelConfig(path=str(tmp_path))
    with pytest.raises(RequestError, match=r"config\.json.*(copy the model again|model's own folder)"):
        resolve_auto(undecided, machine())


def test_a_size_of_zero_is_named(undecided, machine, tmp_path):
    write_config(tmp_path, num_attention_heads=0)
    undecided.model = ModelConfig(path=str(tmp_path))
    with pytest.raises(RequestError, match="num_attention_heads=0"):
        resolve_auto(undecided, machine())


def test_environment_and_auto_agree(undecided, machine, monkeypatch, has_flash):
    monkeypatch.setattr(environment, "installed_version", lambda package: "2.13.0")
    config = resolve_auto(undecided, machine(H200)).config
    assert environment.check_environment(config, machine(H200)) == []


@pytest.mark.parametrize(
    ("words", "row"),
    [
        (("training.global_samples=8", "training.max_length=512"), 512),  # a document for each GPU
        (("training.global_samples=64", "training.max_length=2"), 16),
        (("training.global_samples=8", "training.max_length=512", "dataset.mean_tokens=20"), 512),
        (("training.global_samples=640", "training.max_length=1024", "dataset.mean_tokens=100"), 16_384),
    ],
)
def test_a_row_is_no_longer_than_a_step_can_fill(machine, words, row):
    """640 documents of 100 tokens are 80 for each GPU, taken for twice as long, and one of the longest."""
    eight = ("model=qwen25_05b", "dataset=synthetic", "hardware=hopper", "hardware.gpus_per_node=8")
    resolved = resolve_auto(compose(None, [*eight, *words]).config, machine()).config
    assert resolved.packing.row_length == row


@pytest.fixture
def no_cache(monkeypatch):
    """No model's config.json is in the hub's cache."""
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: None)


HUB = ["dataset=synthetic", "training.global_samples=16", "training.max_length=2048", "optimizer.learning_rate=1e-4",
       "hardware=hopper", "hardware.gpus_per_node=1", "hardware.memory_gib=140.4", "model=hub"]  # fmt: skip


@pytest.mark.usefixtures("no_cache", "has_no_flash")
def test_a_hub_name_of_the_book_has_the_books_facts(machine):
    composed = compose(None, [*HUB, "model.name=Qwen/Qwen3-4B"]).config
    resolution = resolve_auto(composed, machine())
    of_the_group = compose(None, [*HUB, "model=qwen3_4b"]).config.model.facts
    assert resolution.config.model.facts == of_the_group
    assert composed.model.facts is None, "the configuration itself is as it was asked for"
    assert resolution.choice("model.facts").value == "qwen3_4b"
    assert resolution.choice("model.facts").why == (
        "the book's model=qwen3_4b has this name; its sizes are compared with its config.json before training"
    )
    assert plan_memory(resolution.config).memory.total is not None


@pytest.mark.usefixtures("no_cache", "has_no_flash")
@pytest.mark.parametrize(
    "words",
    [
        ["model.name=Qwen/Qwen3-4B-Base"],  # with the same sizes
        ["model.name=qwen/qwen3-4b"],
        ["model.name=Qwen/Qwen3-4B", "model.revision=main"],
        ["model.name=Qwen/Qwen3-4B", "model.trust_remote_code=true"],
    ],
    ids=str,
)
def test_another_hub_model_stays_unknown(machine, words):
    resolution = resolve_auto(compose(None, [*HUB, *words]).config, machine())
    assert resolution.config.model.facts is None
    assert "model.facts" not in values(resolution)


@pytest.mark.usefixtures("has_no_flash")
def test_a_group_file_says_nothing_of_the_books_facts(machine):
    assert "model.facts" not in values(resolve_auto(compose(None, [*HUB, "model=qwen3_4b"]).config, machine()))


@pytest.mark.parametrize(
    ("words", "ways", "compiles"),
    [
        ([], "autocast/full bf16/dropout cast/dropout", None),  # 70B weights, 16 bytes each, over 8 GPUs: 130 GiB each
        (["precision.master_weights=fp32"], "autocast/full autocast/dropout", None),
        (["hardware.num_nodes=4"], "autocast/full", None),
        (["precision.master_weights=bf16", "hardware.memory_gib=140"], "bf16/full cast/full", None),
        (["hardware.gpus_per_node=1", "hardware.memory_gib=16"], "autocast/full", None),  # nor in 4 bits
        (["parallelism=fsdp_offload"], "autocast/full", False),
        (["peft=lora"], "bf16/dropout cast/dropout", None),
        (["peft=lora", "peft.dropout=0", "parallelism=zero2"], "autocast/adapter", None),
        (
            ["hardware.num_nodes=4", "parallelism=zero3", "parallelism.mixed_precision=cast"],
            "bf16/full cast/full",
            False,
        ),
        (["hardware.num_nodes=4", "model.compile_layers=true"], "autocast/full", True),
        (["hardware.num_nodes=4", "packing=padded"], "autocast/full", False),
        (["hardware=volta", "peft=lora"], "fp32/dropout autocast/dropout", False),  # the weights are bf16
        (["hardware=cpu"], "fp32/full fp32/dropout autocast/dropout", False),
    ],
    ids=str,
)
def test_a_model_is_traced_once_for_the_run_and_its_advice_if_it_cannot_fit(
    machine, tmp_path, monkeypatch, words: list[str], ways: str, compiles: bool | None
) -> None:
    sizes = {
        "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 128_300, "max_position_embeddings": 8192,
    }  # fmt: skip
    stated = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"} | sizes
    (tmp_path / "config.json").write_text(json.dumps(stated))
    asked: list[tuple[str, bool | None]] = []

    def trace(_, *, ways, compiles, **__):
        asked.append((" ".join(ways), compiles))

    monkeypatch.setattr("tunebook.plan.architecture.base_model.trace_file", trace)
    config = compose(None, [
        f"model.path={tmp_path}", "model.weights=random", "dataset=synthetic", "hardware=hopper",
        "hardware.gpus_per_node=8", "hardware.memory_gib=80", *words,
    ]).config  # fmt: skip
    resolve_auto(config, machine())
    assert set(asked) == {(ways, compiles)}
