"""A fix that chooses another group, typed together with what was typed before: nothing is refused that was not."""

from __future__ import annotations

import json

import pytest

from tunebook.config.choices import PeftMethod
from tunebook.config.compose import compose
from tunebook.errors import Problem, RulesError
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.plan.rules import _conflicting_keys, check, located

ON_8 = ("hardware=hopper", "hardware.gpus_per_node=8")
TO_NVME = "parallelism.offload_parameters=nvme"
OR_LORA = " or peft=lora"
OR_ZERO3_NVME = " or parallelism=zero3_nvme parallelism.nvme_path=FOLDER"


@pytest.fixture
def problems_of(machine):
    """`problems_of("quickstart", "hardware=turing", ...)`: what is to be said against it, by id."""

    def problems(recipe: str, *words: str) -> dict[str, Problem]:
        composition = compose(recipe, list(words), [])
        place_of = composition.origins.set_by
        try:
            found = check(resolve_auto(composition.config, machine()).config, place_of)
        except RulesError as error:  # before its layers would have been traced
            found = located(error.problems, composition.config, place_of)
        return {problem.id: problem for problem in found}

    return problems


def pasted(words: tuple[str, ...], way_out: str) -> list[str]:
    """The words as they are after a fix was followed to the letter."""
    added, _, left_out = way_out.partition(" without ")
    return [word for word in words if word.partition("=")[0] not in left_out.split(", ")] + added.split()


def test_an_answer_that_the_other_group_leaves_to_its_default_undoes_it_too():
    config = compose("llama3_8b_fsdp_offload", ["parallelism.offload_parameters=cpu"], []).config
    assert list(_conflicting_keys("parallelism", "fsdp", config)) == ["parallelism.offload_parameters"]
    assert list(_conflicting_keys("parallelism", "fsdp_offload", config)) == []


ON_CPU = ("hardware=cpu", "hardware.gpus_per_node=8", "precision.compute=fp32")
FP8 = ("precision=fp8", "peft=full", *ON_8)
CASES = [
    ("llama3_8b_fp8", ON_CPU, "fsdp-on-cpu", "parallelism=ddp"),
    (
        "llama3_8b_fp8",
        (*ON_CPU, "parallelism.cpu_ram_efficient_loading=true"),  # typed as it is by default
        "fsdp-on-cpu",
        "parallelism=ddp without parallelism.cpu_ram_efficient_loading",
    ),
    (
        "llama3_8b_fp8",
        (*ON_CPU, "parallelism.state_dict=full", "parallelism.shard_group_size=2"),
        "fsdp-on-cpu",
        "parallelism=ddp without parallelism.state_dict, parallelism.shard_group_size",
    ),
    (
        "llama3_8b_fp8",
        ("hardware=cpu", "hardware.gpus_per_node=1", "precision.compute=fp32"),
        "fsdp-on-cpu",
        "parallelism=single",
    ),
    (
        "quickstart",
        ("parallelism=zero1", "hardware=turing", "parallelism.overlap_comm=false"),
        "sharding-on-one-rank",
        "parallelism=single without parallelism.overlap_comm",
    ),
    (
        "quickstart",
        ("parallelism.strategy=ddp", "hardware=turing"),
        "sharding-on-one-rank",
        "parallelism=single without parallelism.strategy",
    ),
    (
        "zero3_lora",
        (*FP8, "parallelism.reduce_bucket_size=1000000"),
        "fp8-with-deepspeed",
        "parallelism=fsdp_offload without parallelism.reduce_bucket_size",
    ),
    (
        "zero3_lora",
        (*FP8, TO_NVME, "parallelism.nvme_path=/disk"),
        "fp8-with-deepspeed",
        "parallelism=fsdp_offload without parallelism.offload_parameters, parallelism.nvme_path",
    ),
    (
        "zero1_lora",
        (*FP8, "optimizer.name=adamw_8bit"),
        "fp8-with-deepspeed",
        "parallelism=fsdp_grad_op optimizer.name=adamw",
    ),
    (
        "quickstart",
        ("launcher=slurm", "launcher.partition=long", "launcher.name=local", "parallelism=single"),
        "launcher-settings-mismatch",
        "launcher=local without launcher.partition",
    ),
    (
        "llama3_8b_fp8",
        (*ON_8, "precision=bf16", TO_NVME),
        "offload-not-possible",
        f"parallelism.offload_parameters=cpu{OR_ZERO3_NVME}",
    ),
    ("llama3_8b_fp8", (*ON_8, TO_NVME), "offload-not-possible", "parallelism.offload_parameters=cpu"),
    ("qwen3b_zero2", (*ON_8, TO_NVME), "offload-not-possible", f"parallelism.offload_parameters=none{OR_ZERO3_NVME}"),
    (
        "qwen3b_zero2",
        (*ON_8, TO_NVME, "parallelism.nvme_path=/disk"),
        "offload-not-possible",
        "parallelism.offload_parameters=none or parallelism=zero3_nvme",
    ),
    (
        "qwen3b_zero2",
        (*ON_8, "parallelism.offload_parameters=cpu"),
        "offload-not-possible",
        "parallelism.offload_parameters=none or parallelism=zero3_offload",
    ),
    ("qwen3b_zero2", (*ON_8, TO_NVME, "peft=qlora"), "offload-not-possible", "parallelism.offload_parameters=none"),
    (
        "qwen3b_zero2",
        (*ON_8, "parallelism.offload_parameters=cpu", "optimizer.name=adamw_8bit"),
        "offload-not-possible",
        "parallelism.offload_parameters=none",
    ),
    (
        "llama3_8b_fp8",
        ("hardware=hopper", "hardware.gpus_per_node=7", "training.global_samples=70", "precision=bf16",
         "parallelism=hsdp", "parallelism.shard_group_size=3"),
        "hsdp-group",
        "parallelism=fsdp parallelism.shard_group_size=null",
    ),
    *(
        (
            recipe,
            (*ON_8, "precision=bf16", f"parallelism.strategy={strategy}"),
            "strategy-settings-mismatch",
            f"parallelism={strategy}",
        )
        for recipe, strategy in (("llama31_8b_tools", "zero3"), ("llama3_8b_fp8", "zero2"), ("qwen3b_zero2", "fsdp"))
    ),
    ("llama3_8b_fp8", (*ON_8, "optimizer.name=adamw_8bit"), "optimizer-with-fsdp", "optimizer.name=adamw"),
    ("quickstart", ("precision.fp8_scaling=rowwise",), "fp8-scaling-ignored", "precision.fp8_scaling=tensorwise"),
    (
        "zero1_lora",
        (*ON_8, "precision.fp8_scaling=rowwise"),
        "fp8-scaling-ignored",
        "precision.fp8_scaling=tensorwise",
    ),
    (
        "llama3_8b_fp8",
        (*ON_8, "precision=bf16", "precision.fp8_scaling=rowwise"),
        "fp8-scaling-ignored",
        "precision.fp8_scaling=tensorwise or precision.compute=fp8",
    ),
    ("llama3_8b_fp8", (*ON_8, "peft.modules_to_save=[lm_head]"), "adapter-settings-ignored", "peft.modules_to_save=[]"),
    (
        "llama3_8b_fp8",
        (*ON_8, "precision=bf16", "peft.modules_to_save=[lm_head]"),
        "adapter-settings-ignored",
        f"peft.modules_to_save=[]{OR_LORA}",
    ),
    (
        "llama3_8b_fp8",
        (*ON_8, "precision=bf16", "peft.method=full", "peft.modules_to_save=[lm_head]"),
        "adapter-settings-ignored",
        f"peft.modules_to_save=[]{OR_LORA} without peft.method",
    ),
    *(
        (
            "llama3_8b_fp8",
            (*ON_8, "precision=bf16", f"peft.target_modules=[{name}]"),
            "adapter-settings-ignored",
            "peft.target_modules=[]",
        )
        for name in ("nope", "lm_head")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "words", "rule", "fix"), CASES, ids=lambda value: str(value)[:60])
def test_every_way_out_goes_with_what_was_typed(recipe, words, rule, fix, problems_of):
    before = problems_of(recipe, *words)
    assert before[rule].fix == fix
    for way_out in fix.split(" or "):
        after = problems_of(recipe, *pasted(words, way_out))
        assert rule not in after
        assert {problem.id for problem in after.values() if problem.is_error} <= before.keys()


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (("hardware=turing", "precision=fp8"), "precision.compute=fp32"),
        (("hardware=ampere", "precision=fp8"), "precision.compute=bf16"),
        (("hardware=hopper", "precision=fp8"), "precision.compute=bf16"),
    ],
    ids=str,
)
def test_all_that_refuse_fp8_name_the_same_format(words, fix, problems_of):
    """An adapter under ZeRO: of three rules each would send to something that the next refuses."""
    errors = [problem for problem in problems_of("zero1_lora", *words).values() if problem.is_error]
    assert {problem.id for problem in errors} >= {"fp8-with-adapters", "fp8-with-deepspeed"}
    assert {problem.fix.split(" attention")[0] for problem in errors} == {fix}
    assert not any(problem.is_error for problem in problems_of("zero1_lora", *words, fix).values())


@pytest.mark.usefixtures("traces_no_activations")
def test_a_quantized_base_is_not_sent_to_a_full_fine_tune(problems_of, machine, tmp_path):
    sizes = {
        "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
    }  # fmt: skip
    quantized = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(kind | sizes | quantized))
    model = ("model=hub", f"model.path={tmp_path}", *ON_8)
    saved = "peft.modules_to_save=[self_attn,mlp]"
    assert problems_of("zero1_lora", *model, "peft=qlora", saved)["adapter-without-targets"].fix == (
        "peft.modules_to_save=[]"
    )
    words = [*model, "peft=qlora", "peft.target_modules=[q_proj]"]
    config = resolve_auto(compose("zero1_lora", words, []).config, machine()).config
    config.peft.method = PeftMethod.full  # as typed, it is refused before its layers are known
    assert {*problems_of("zero1_lora", *words, "peft=full")} == {"quantized-base-in-full"}
    ignored = {problem.id: problem for problem in check(config)}
    assert ignored["adapter-settings-ignored"].fix == "peft.target_modules=[]"
