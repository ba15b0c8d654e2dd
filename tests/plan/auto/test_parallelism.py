"""`parallelism=auto`: what it becomes, and that the strategy's name typed by hand gives the same run."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from omegaconf import OmegaConf

from tunebook.config.book import book_root
from tunebook.config.choices import (
    Attention,
    Checkpointing,
    Generation,
    OptimizerName,
    PeftMethod,
    Strategy,
)
from tunebook.config.compose import compose
from tunebook.config.frozen import architecture_json, config_to_yaml, load_config
from tunebook.config.identity import config_hash
from tunebook.config.model_facts import ARCHITECTURE_FILE, ModelFacts
from tunebook.config.schema import CHOICE_SCHEMAS, FsdpConfig, ParallelismConfig, ZeroConfig
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.plan.memory.verdict import tensors_fit
from tunebook.plan.rules import check

from ..plans import H200, V100
from ..plans import resolution as planned

T4 = ("Tesla T4", (7, 5))
GPUS = {"hopper": (H200, 140.4), "volta": (V100, 32.0)}
ORDER = (Strategy.ddp, Strategy.fsdp_grad_op, Strategy.fsdp)


@cache
def facts_of(model):
    """As `hydra_configs/model` has them."""
    file = OmegaConf.load(book_root() / "hydra_configs" / "model" / f"{model}.yaml")
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelFacts), file.facts))


@pytest.fixture
def run(undecided):
    """`run("llama3_8b", "lora")`: a configuration with everything open but the kernel, which need not be installed."""

    def make(model="qwen25_05b", method="full", kernel=Attention.flash_attention_2):
        undecided.parallelism = ParallelismConfig(strategy=Strategy.auto)
        undecided.model.facts = facts_of(model)
        undecided.peft.method = PeftMethod[method]
        undecided.attention.implementation = kernel
        return undecided

    return make


def chosen(resolution):
    """The strategy, which is listed among the choices as well."""
    strategy = resolution.config.parallelism.strategy.name
    assert resolution.choice("parallelism.strategy").value == strategy
    return strategy


def named(config, strategy):
    return replace(config, parallelism=CHOICE_SCHEMAS["parallelism"][strategy.name](strategy=strategy))


def is_recomputed(config):
    return config.activation.checkpointing is Checkpointing.enabled


# On 2 GPUs and on 8: the strategy, `+` where activations are recomputed, `!` where even that is not estimated to fit.
TABLE = {
    ("hopper", "qwen25_05b", "full"): ("ddp", "ddp"),
    ("hopper", "qwen25_3b", "lora"): ("ddp", "ddp"),
    # 16 bytes for each of 8 billion parameters are 120 GiB: more than a copy each; of 12 of them a half on 2 GPUs
    ("hopper", "llama3_8b", "full"): ("fsdp_grad_op", "fsdp_grad_op"),
    ("hopper", "llama3_8b", "lora"): ("ddp", "ddp"),
    ("hopper", "llama2_70b_chat", "full"): ("fsdp+!", "fsdp+!"),
    ("hopper", "llama2_70b_chat", "lora"): ("fsdp+", "fsdp"),  # 128 GiB of frozen bf16 weights
    ("volta", "qwen25_05b", "lora"): ("ddp", "ddp"),
    ("volta", "qwen25_3b", "full"): ("fsdp+!", "fsdp_grad_op+"),
    ("volta", "qwen25_3b", "lora"): ("ddp+", "fsdp"),
    ("volta", "llama3_8b", "full"): ("fsdp+!", "fsdp+"),
    ("volta", "llama2_70b_chat", "lora"): ("fsdp+!", "fsdp+!"),
}
CASES = [
    pytest.param(*key, num, word, marks=[] if key[1] == "llama3_8b" else [pytest.mark.nightly])
    for key, words in TABLE.items()
    for num, word in zip((2, 8), words, strict=True)
]


@pytest.mark.parametrize(("generation", "model", "method", "num_gpus", "expected"), CASES)
def test_models_on_gpus(run, machine, generation, model, method, num_gpus, expected):
    gpu, memory = GPUS[generation]
    kernel = Attention.flash_attention_2 if generation == "hopper" else Attention.auto
    resolution = resolve_auto(run(model, method, kernel), machine(*[gpu] * num_gpus, memory=memory))
    config = resolution.config
    marks = ("+" if is_recomputed(config) else "") + ("" if tensors_fit(config) else "!")
    assert chosen(resolution) + marks == expected


@pytest.mark.parametrize("memory", [24.0, 48.0, 96.0])
def test_nothing_faster_fits_and_the_choice_fits_if_any_does(run, machine, memory):
    open_run, found = run("llama3_8b"), machine(*[H200] * 4, memory=memory)
    typed = {strategy: resolve_auto(named(open_run, strategy), found).config for strategy in ORDER}
    fitting = [strategy for strategy in ORDER if tensors_fit(typed[strategy])]
    stored = [strategy for strategy in fitting if not is_recomputed(typed[strategy])]
    config = resolve_auto(open_run, found).config
    assert config.parallelism.strategy is (stored + fitting + [Strategy.fsdp])[0]
    assert config == typed[config.parallelism.strategy]


WORDS = ["dataset=synthetic", "training.global_samples=64", "model.weights=random"]


@pytest.mark.parametrize(
    ("words", "gpus", "strategy"),
    [
        (["model=qwen25_05b", "hardware=cpu"], [], "single"),
        (["model=qwen25_05b", "hardware=cpu", "hardware.gpus_per_node=2"], [], "ddp"),
        (["model=llama3_8b"], [H200] * 2, "fsdp_grad_op"),
        (["model=llama3_8b", "hardware.num_nodes=2"], [H200] * 8, "hsdp"),
    ],
)
def test_the_run_is_the_one_of_the_strategys_name(words, gpus, strategy, machine, tmp_path):
    found = machine(*gpus)
    kernel = ["attention=flash_attention_2"] if gpus else []
    ours, theirs = (
        resolve_auto(compose(None, [*WORDS, *words, *kernel, f"parallelism={name}"]).config, found).config
        for name in ("auto", strategy)
    )
    assert ours.parallelism.strategy is Strategy[strategy]
    assert type(ours.parallelism) is type(theirs.parallelism) is CHOICE_SCHEMAS["parallelism"][strategy]
    assert config_hash(ours) == config_hash(theirs)
    (tmp_path / "run.yaml").write_text(config_to_yaml(ours))
    (tmp_path / ARCHITECTURE_FILE).write_text(architecture_json(ours))
    assert load_config(tmp_path / "run.yaml") == ours == theirs


@pytest.mark.parametrize(
    ("model", "nodes", "gpus", "strategy"),
    [
        ("llama3_8b", 2, 8, "hsdp"),
        ("llama3_8b", 8, 1, "fsdp"),  # one GPU a node cannot be divided within it
    ],
)
def test_several_nodes(run, machine, model, nodes, gpus, strategy):
    config = run(model)
    config.hardware.num_nodes = nodes
    resolution = resolve_auto(config, machine(*[H200] * gpus))
    assert chosen(resolution) == strategy
    assert [problem.id for problem in check(resolution.config) if problem.is_error] == []
    if strategy == "hsdp":
        assert resolution.config.parallelism.shard_group_size == 8


def test_a_refused_strategy_is_not_chosen_even_if_it_would_fit(run, machine):
    config, found = run("llama3_8b"), machine(*[H200] * 2, memory=80.0)
    assert chosen(resolve_auto(config, found)) == "fsdp"
    config.optimizer.name = OptimizerName.adamw_8bit  # does not know shards
    resolution = resolve_auto(config, found)
    assert chosen(resolution) == "ddp"
    assert "optimizer-with-fsdp" in resolution.choice("parallelism.strategy").why
    assert [problem.id for problem in check(resolution.config) if problem.is_error] == []


def test_unknown_sizes_take_the_safe_choice_that_rules_allow(run, machine, monkeypatch):
    monkeypatch.setattr("tunebook.plan.auto.resolve.read_facts", lambda model, **_: None)
    config = run()
    assert chosen(resolve_auto(config, machine(H200, H200))) == "fsdp"
    config.optimizer.name = OptimizerName.paged_adamw_8bit
    assert chosen(resolve_auto(config, machine(H200, H200))) == "ddp"


def test_parts_are_recomputed_for_the_fastest_strategy():
    words = ["parallelism=auto", "hardware=hopper", "hardware.gpus_per_node=4", "hardware.memory_gib=92"]
    rows = ["training.global_samples=null", "training.max_length=4096", "training.global_tokens=32768"]
    config = planned("qwen3b_zero2", *words, *rows).config
    assert config.parallelism.strategy is Strategy.ddp
    assert config.activation.memory_budget == 0.8


def test_the_reason_names_the_memory_that_a_faster_strategy_would_take(run, machine):
    why = resolve_auto(run("llama3_8b"), machine(H200, H200)).choice("parallelism.strategy").why
    assert "; not ddp (does not fit: 1" in why


@pytest.mark.parametrize("settings", [FsdpConfig, ZeroConfig])
def test_settings_of_a_named_strategy_are_not_thrown_away(run, machine, settings):
    config = run("llama3_8b")
    config.parallelism = settings(strategy=Strategy.auto)
    resolution = resolve_auto(config, machine(H200, H200))
    assert resolution.config.parallelism == settings(strategy=Strategy.auto)
    (problem,) = [problem for problem in check(resolution.config) if problem.is_error]
    assert (problem.id, problem.fix) == ("strategy-settings-mismatch", "parallelism=auto")


def test_gpus_that_cannot_work_together_leave_one(run, machine):
    config = run(kernel=Attention.auto)
    config.packing.row_length, config.activation.checkpointing = 2048, Checkpointing.disabled
    resolution = resolve_auto(config, machine(H200, V100))
    hardware = resolution.config.hardware
    assert (hardware.generation, hardware.gpus_per_node) == (Generation.hopper, 1)
    assert (chosen(resolution), resolution.problem) == ("single", None)
    whole = machine(H200, H200, memory=20.0)
    slices = replace(whole, gpus=[replace(gpu, is_mig=True) for gpu in whole.gpus])
    assert resolve_auto(config, slices).config.hardware.gpus_per_node == 1


def test_a_number_of_gpus_that_was_asked_for_is_kept(run, machine):
    config = run(kernel=Attention.auto)
    config.hardware.gpus_per_node = 2
    resolution = resolve_auto(config, machine(T4, V100))
    hardware = resolution.config.hardware
    assert (hardware.generation, hardware.gpus_per_node) == (Generation.volta, 2)  # the oldest decides
    assert resolution.problem is not None and resolution.problem.id == "mixed-gpus"
