"""`parallelism=auto`: what it becomes, for which reason, and that the strategy's name typed by hand gives the same."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from omegaconf import OmegaConf

from tunebook.config.book import book_root
from tunebook.config.choices import (
    Attention,
    Checkpointing,
    Compute,
    Generation,
    MasterWeights,
    OptimizerName,
    PeftMethod,
    Strategy,
)
from tunebook.config.compose import compose
from tunebook.config.frozen import PARALLELISM_SCHEMAS, config_to_yaml, load_config
from tunebook.config.identity import config_hash
from tunebook.config.model_facts import ModelFacts
from tunebook.config.schema import FsdpConfig, ParallelismConfig, ZeroConfig
from tunebook.plan.auto.resolve import resolve_auto
from tunebook.plan.memory import estimate_memory, fits_into
from tunebook.plan.rules import check

from ..plans import H200, V100
from ..plans import resolution as planned

T4 = ("Tesla T4", (7, 5))
GPUS = {"hopper": (H200, 140.4), "volta": (V100, 32.0)}
ORDER = ("ddp", "fsdp_grad_op", "fsdp")


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
    """The strategy and its reason."""
    choice = resolution.choice("parallelism.strategy")
    assert choice.value == resolution.config.parallelism.strategy.name
    return choice.value, choice.why


def estimate(config):
    return estimate_memory(config, config.model.facts).total_gib


def fits(config):
    return fits_into(config, estimate(config), config.hardware.memory_gib)


def is_recomputed(config):
    return config.activation.checkpointing is Checkpointing.enabled


# On 2 GPUs and on 8: the strategy, `+` where activations are recomputed, `!` where even that is not estimated to fit.
TABLE = {
    ("hopper", "qwen25_05b", "full"): ("ddp", "ddp"),
    ("hopper", "qwen25_05b", "lora"): ("ddp", "ddp"),
    ("hopper", "qwen25_3b", "full"): ("ddp", "ddp"),
    ("hopper", "qwen25_3b", "lora"): ("ddp", "ddp"),
    # 16 bytes for each of 8 billion parameters are 120 GiB: more than a copy each; of 12 of them a half on 2 GPUs
    ("hopper", "llama3_8b", "full"): ("fsdp_grad_op", "fsdp_grad_op"),
    ("hopper", "llama3_8b", "lora"): ("ddp", "ddp"),
    ("hopper", "llama2_70b_chat", "full"): ("fsdp+!", "fsdp+!"),
    ("hopper", "llama2_70b_chat", "lora"): ("fsdp+", "fsdp"),  # 128 GiB of frozen bf16 weights
    ("volta", "qwen25_05b", "full"): ("ddp", "ddp"),
    ("volta", "qwen25_05b", "lora"): ("ddp", "ddp"),
    ("volta", "qwen25_3b", "full"): ("fsdp+!", "fsdp_grad_op+"),
    ("volta", "qwen25_3b", "lora"): ("ddp+", "fsdp"),
    ("volta", "llama3_8b", "full"): ("fsdp+!", "fsdp+"),
    ("volta", "llama3_8b", "lora"): ("fsdp+", "fsdp+"),
    ("volta", "llama2_70b_chat", "full"): ("fsdp+!", "fsdp+!"),
    ("volta", "llama2_70b_chat", "lora"): ("fsdp+!", "fsdp+!"),
}
CASES = [(*key, num, word) for key, words in TABLE.items() for num, word in zip((2, 8), words, strict=True)]


@pytest.mark.parametrize(("generation", "model", "method", "num_gpus", "expected"), CASES)
def test_models_on_gpus(run, machine, generation, model, method, num_gpus, expected):
    gpu, memory = GPUS[generation]
    kernel = Attention.flash_attention_2 if generation == "hopper" else Attention.auto
    resolution = resolve_auto(run(model, method, kernel), machine(*[gpu] * num_gpus, memory=memory))
    config = resolution.config
    assert config.hardware.gpus_per_node == num_gpus
    marks = ("+" if is_recomputed(config) else "") + ("" if fits(config) else "!")
    assert chosen(resolution)[0] + marks == expected


@pytest.mark.parametrize(("generation", "model", "method"), TABLE)
def test_one_gpu_is_single(run, machine, generation, model, method):
    gpu, memory = GPUS[generation]
    resolution = resolve_auto(run(model, method), machine(gpu, memory=memory))
    assert chosen(resolution) == ("single", "one GPU has nothing to divide")


@pytest.mark.parametrize("memory", [24.0, 36.0, 48.0, 72.0, 96.0, 140.4, 192.0])
@pytest.mark.parametrize("model", ["qwen25_3b", "llama3_8b"])
def test_nothing_faster_fits_and_what_is_taken_does_wherever_anything_does(run, machine, model, memory):
    open_run, found = run(model), machine(*[H200] * 4, memory=memory)
    typed = {}
    for name in ORDER:
        settings = PARALLELISM_SCHEMAS[Strategy[name]](strategy=Strategy[name])
        typed[name] = resolve_auto(replace(open_run, parallelism=settings), found).config
    stored = [name for name in ORDER if fits(typed[name]) and not is_recomputed(typed[name])]
    either = [name for name in ORDER if fits(typed[name])]
    resolution = resolve_auto(open_run, found)
    assert chosen(resolution)[0] == (stored + either + ["fsdp"])[0]
    assert resolution.config == typed[chosen(resolution)[0]]


def test_every_strategy_and_both_ways_are_met_by_the_memories_above(run, machine):
    met = set()
    for memory in (24.0, 36.0, 48.0, 72.0, 96.0, 140.4, 192.0):
        for model in ("qwen25_3b", "llama3_8b"):
            config = resolve_auto(run(model), machine(*[H200] * 4, memory=memory)).config
            met.add((config.parallelism.strategy.name, is_recomputed(config), fits(config)))
    assert met >= {
        ("ddp", False, True), ("fsdp_grad_op", False, True), ("fsdp", False, True), ("fsdp", True, True),
        ("fsdp", True, False),
    }  # fmt: skip


WORDS = ["dataset=synthetic", "training.global_samples=64", "model.weights=random"]


@pytest.mark.parametrize(
    ("words", "gpus", "strategy"),
    [
        (["model=qwen25_05b"], [H200], "single"),
        (["model=qwen25_05b", "hardware=cpu"], [], "single"),
        (["model=qwen25_05b", "hardware=cpu", "hardware.gpus_per_node=2"], [], "ddp"),
        (["model=qwen25_3b"], [H200] * 2, "ddp"),
        (["model=llama3_8b"], [H200] * 2, "fsdp_grad_op"),
        (["model=llama2_70b_chat", "peft=lora"], [H200] * 8, "fsdp"),
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
    assert type(ours.parallelism) is type(theirs.parallelism) is PARALLELISM_SCHEMAS[Strategy[strategy]]
    assert config_hash(ours) == config_hash(theirs)
    assert config_to_yaml(ours) == config_to_yaml(theirs)
    (tmp_path / "run.yaml").write_text(config_to_yaml(ours))
    assert load_config(tmp_path / "run.yaml") == ours == theirs


class TestSeveralNodes:
    def resolved(self, config, machine, num_nodes=2, num_gpus=8):
        config.hardware.num_nodes = num_nodes
        return resolve_auto(config, machine(*[H200] * num_gpus))

    def test_a_copy_each_where_it_fits(self, run, machine):
        assert chosen(self.resolved(run("qwen25_3b"), machine))[0] == "ddp"

    def test_divided_within_a_node_where_that_fits(self, run, machine):
        resolution = self.resolved(run("llama3_8b"), machine)
        strategy, why = chosen(resolution)
        assert strategy == "hsdp"
        assert "GPUs of a node" in why
        assert "; ddp would take 167.1 GiB" in why
        assert isinstance(resolution.config.parallelism, FsdpConfig)
        assert resolution.config.parallelism.shard_group_size == 8

    def test_else_among_all(self, run, machine):
        strategy, why = chosen(self.resolved(run("llama2_70b_chat"), machine, num_nodes=4))
        assert strategy == "fsdp"
        assert "; hsdp would take 142.5 GiB" in why

    def test_one_gpu_a_node_cannot_be_divided_within_it(self, run, machine):
        resolution = self.resolved(run("llama3_8b"), machine, num_nodes=8, num_gpus=1)
        strategy, why = chosen(resolution)
        assert strategy == "fsdp"
        assert "; hsdp is refused (hsdp-group)" in why
        assert [problem.id for problem in check(resolution.config) if problem.is_error] == []


class TestCpu:
    def test_one_process(self, run, machine):
        assert chosen(resolve_auto(run(kernel=Attention.auto), machine())) == ("single", "one process on the CPU")

    @pytest.mark.parametrize("model", ["qwen25_05b", "llama2_70b_chat"])
    def test_several_ranks(self, run, machine, model):
        config = run(model, kernel=Attention.auto)
        config.hardware.gpus_per_node = 2
        resolution = resolve_auto(config, machine())
        assert chosen(resolution) == ("ddp", "several ranks on a CPU, where FSDP does not run")
        assert "needs-gpu" not in {problem.id for problem in check(resolution.config)}


class TestRulesDecideToo:
    def test_bitsandbytes_does_not_know_shards(self, run, machine):
        config = run("llama3_8b")
        config.optimizer.name = OptimizerName.adamw_8bit
        resolution = resolve_auto(config, machine(*[H200] * 2, memory=80.0))
        strategy, why = chosen(resolution)
        assert strategy == "ddp"
        assert "do not fit into 83% of 80 GiB" in why
        assert "; fsdp_grad_op is refused (optimizer-with-fsdp); fsdp is refused" in why
        assert [problem.id for problem in check(resolution.config) if problem.is_error] == []
        config.optimizer.name = OptimizerName.adamw
        assert chosen(resolve_auto(config, machine(*[H200] * 2, memory=80.0)))[0] == "fsdp"

    def test_also_where_the_size_is_not_known(self, run, machine, monkeypatch):
        monkeypatch.setattr("tunebook.plan.auto.resolve.read_facts", lambda model, **_: None)
        config = run()
        strategy, why = chosen(resolve_auto(config, machine(H200, H200)))
        assert strategy == "fsdp"
        assert why.endswith("; the model's size is not known before it is loaded, and this is the safe choice")
        config.optimizer.name = OptimizerName.paged_adamw_8bit
        strategy, why = chosen(resolve_auto(config, machine(H200, H200)))
        assert strategy == "ddp"
        assert "; fsdp is refused (optimizer-with-fsdp)" in why

    def test_what_is_wrong_with_every_strategy_decides_nothing(self, run, machine):
        config = run("llama3_8b")
        config.training.resume = "nvr"
        resolution = resolve_auto(config, machine(H200, H200))
        assert chosen(resolution)[0] == "fsdp_grad_op"
        assert [problem.key for problem in check(resolution.config) if problem.is_error] == ["training.resume"]

    @pytest.mark.parametrize("method", list(PeftMethod))
    @pytest.mark.parametrize("optimizer", list(OptimizerName))
    @pytest.mark.parametrize("compute", [Compute.bf16, Compute.fp8])
    @pytest.mark.parametrize("master", list(MasterWeights))
    def test_a_refused_strategy_is_never_taken_where_another_is_not(
        self, run, machine, method, optimizer, compute, master
    ):
        config, found = run("llama2_70b_chat", method.name), machine(*[H200] * 4)
        config.optimizer.name, config.precision.compute = optimizer, compute
        config.precision.master_weights = master
        refused = {}
        for name in ORDER:
            settings = PARALLELISM_SCHEMAS[Strategy[name]](strategy=Strategy[name])
            problems = check(resolve_auto(replace(config, parallelism=settings), found).config)
            refused[name] = sum(problem.is_error for problem in problems)
        assert refused[chosen(resolve_auto(config, found))[0]] == min(refused.values())


class TestReasons:
    def test_a_copy(self, run, machine):
        resolution = resolve_auto(run("qwen25_3b"), machine(H200, H200))
        why = f"a whole copy on each GPU is the fastest: estimated {estimate(resolution.config):.1f} GiB fit into "
        assert chosen(resolution)[1] == why + "83% of 140.4 GiB"

    def test_what_is_faster_and_would_be_recomputed(self, run, machine):
        why = chosen(resolve_auto(run("qwen25_3b"), machine(*[H200] * 8, memory=81.5)))[1]
        assert why.startswith("gradients and optimizer states divided among the GPUs: estimated ")
        assert why.endswith(" GiB fit into 83% of 81.5 GiB; ddp would have to recompute activations")

    def test_parts_computed_again_are_said_and_rows_that_stay_short_are_given_up(self):
        words = ["parallelism=auto", "hardware=hopper", "hardware.gpus_per_node=4", "training.global_samples=null"]

        def decided(*more):
            return planned("qwen3b_zero2", *words, *more)

        whole = decided("hardware.memory_gib=96", "training.max_length=4096", "training.global_tokens=32768")
        assert whole.config.activation.checkpointing is Checkpointing.selective
        assert chosen(whole) == (
            "ddp",
            "a whole copy on each GPU is the fastest: estimated 67.3 GiB with norms and activation functions "
            "recomputed fit into 83% of 96 GiB",
        )
        eight = ("model=llama3_8b", "training.max_length=2048", "training.global_tokens=131072")
        divided = decided("hardware.memory_gib=80", *eight)
        strategy, why = chosen(divided)
        assert (strategy, divided.config.packing.row_length) == ("fsdp", 8192)
        assert why.endswith("fsdp_grad_op would have to compute in rows of 4096 tokens")

    def test_recomputing_is_said(self, run, machine):
        config = run("qwen25_05b")
        config.activation.checkpointing = Checkpointing.enabled
        strategy, why = chosen(resolve_auto(config, machine(H200, H200)))
        assert strategy == "ddp"
        assert "GiB with activations recomputed fit into" in why

    def test_that_they_are_kept_is_obeyed(self, run, machine):
        config, found = run("qwen25_3b", kernel=Attention.auto), machine(*[V100] * 8, memory=32.0)
        config.activation.checkpointing = Checkpointing.disabled
        resolution = resolve_auto(config, found)
        assert chosen(resolution)[0] == "fsdp"
        assert "do not fit into" in chosen(resolution)[1]
        assert resolution.config.activation.checkpointing is Checkpointing.disabled

    def test_a_memory_that_is_not_known(self, run, machine, monkeypatch):
        monkeypatch.setattr("tunebook.plan.auto.hardware._memory_gib", lambda config, found: (None, "nobody knows"))
        strategy, why = chosen(resolve_auto(run(), machine(H200, H200)))
        assert strategy == "fsdp"
        assert why.endswith("; the memory is not known, and this is the safe choice")


class TestWhatWasTyped:
    @pytest.mark.parametrize("settings", [FsdpConfig, ZeroConfig])
    def test_settings_of_a_named_strategy_are_not_thrown_away(self, run, machine, settings):
        config = run("llama3_8b")
        config.parallelism = settings(strategy=Strategy.auto)
        resolution = resolve_auto(config, machine(H200, H200))
        assert resolution.config.parallelism == settings(strategy=Strategy.auto)
        (problem,) = [problem for problem in check(resolution.config) if problem.is_error]
        assert (problem.id, problem.fix) == ("strategy-settings-mismatch", "parallelism=auto")

    def test_a_named_strategy_is_kept_even_where_it_does_not_fit(self, run, machine):
        config = run("llama2_70b_chat")
        config.parallelism.strategy = Strategy.ddp
        assert chosen(resolve_auto(config, machine(H200, H200))) == ("ddp", "as asked")

    def test_the_callers_configuration_is_not_changed(self, run, machine):
        config = run("llama3_8b")
        resolve_auto(config, machine(H200, H200))
        assert config.parallelism == ParallelismConfig(strategy=Strategy.auto)
        assert config.packing.row_length is None

    def test_each_decision_is_listed_once(self, run, machine):
        keys = [choice.key for choice in resolve_auto(run("llama3_8b"), machine(H200, H200)).choices]
        assert len(keys) == len(set(keys))
        assert keys.index("packing.mode") < keys.index("parallelism.strategy") < keys.index("packing.row_length")


class TestWhichGpus:
    """As many as are found, but for those that cannot work together: the default must run wherever one GPU does."""

    def test_gpus_of_different_generations(self, run, machine):
        resolution = resolve_auto(run(kernel=Attention.auto), machine(H200, V100))
        hardware = resolution.config.hardware
        assert (hardware.generation, hardware.gpus_per_node) == (Generation.hopper, 1)
        assert chosen(resolution)[0] == "single"
        assert resolution.problem is None
        found = "1 x NVIDIA H200, 1 x Tesla V100-SXM2-32GB found here"
        assert (
            resolution.choice("hardware.gpus_per_node").why
            == f"GPUs of different generations do not train together ({found})"
        )

    def test_slices_of_a_gpu(self, run, machine):
        whole = machine(H200, H200, memory=20.0)
        resolution = resolve_auto(run(), replace(whole, gpus=[replace(gpu, is_mig=True) for gpu in whole.gpus]))
        assert resolution.config.hardware.gpus_per_node == 1
        assert chosen(resolution)[0] == "single"

    def test_a_number_that_was_asked_for_is_kept(self, run, machine):
        config = run(kernel=Attention.auto)
        config.hardware.gpus_per_node = 2
        resolution = resolve_auto(config, machine(T4, V100))
        hardware = resolution.config.hardware
        assert (hardware.generation, hardware.gpus_per_node) == (Generation.volta, 2)  # the oldest decides
        assert resolution.problem is not None
        assert resolution.problem.id == "mixed-gpus"

    def test_the_default_of_a_run_without_a_recipe_takes_all(self, machine):
        words = [*WORDS, "model=qwen25_3b", "attention=flash_attention_2"]
        resolution = resolve_auto(compose(None, words).config, machine(*[H200] * 4))
        assert resolution.config.hardware.gpus_per_node == 4
        assert chosen(resolution)[0] == "ddp"
