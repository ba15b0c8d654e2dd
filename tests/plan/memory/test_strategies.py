"""What must hold of the estimate for every strategy, way of training and optimizer, worked out by hand."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunebook.config.book import book_root
from tunebook.config.choices import Checkpointing, OptimizerName, PeftMethod
from tunebook.model.parameters import count_parameters, weight_sizes
from tunebook.plan.memory import GIB, estimate_memory
from tunebook.plan.memory.host import host_bytes, page_locked
from tunebook.plan.memory.overhead import overhead_bytes
from tunebook.plan.rules import check

from ..plans import resolved

GROUP = book_root() / "hydra_configs" / "parallelism"
STRATEGIES = sorted({file.stem for file in GROUP.glob("*.yaml")} - {"auto"})  # which becomes one of the others
ADAMW = OptimizerName.adamw
FSDP = {name for name in STRATEGIES if name.startswith(("fsdp", "hsdp"))}
OPTIMIZER_OFFLOADED = {"zero2_offload", "zero3_offload", "zero3_nvme"}


def refused_by(strategy, method=PeftMethod.full, optimizer=ADAMW):
    """The rules that refuse a combination; everything that is not refused must have an estimate."""
    rules = set()
    if optimizer not in (ADAMW, OptimizerName.muon) and strategy in FSDP:
        rules.add("optimizer-with-fsdp")
    if optimizer in (OptimizerName.muon, OptimizerName.adafactor) and strategy.startswith("zero"):
        rules.add("optimizer-with-zero")
    if optimizer is OptimizerName.muon and strategy == "fsdp_offload":
        rules.add("optimizer-offloaded")
    if optimizer is not ADAMW and strategy in OPTIMIZER_OFFLOADED:
        rules.add("optimizer-offloaded")
    if method is PeftMethod.qlora and strategy == "zero3_nvme":
        rules.add("offload-not-possible")
    return rules


CASES = [case for case in itertools.product(STRATEGIES, PeftMethod, OptimizerName) if not refused_by(*case)]
# Which of weights, gradients and optimizer state each strategy divides among all ranks.
DIVIDED = {
    "single": (),
    "ddp": (),
    "hsdp": (),
    "zero1": ("optimizer",),
    "zero2": ("gradients", "optimizer"),
    "zero2_offload": ("gradients",),
} | dict.fromkeys(("zero3", "fsdp", "fsdp_all_ranks_load", "fsdp_grad_op"), ("weights", "gradients", "optimizer"))


def composed(strategy):
    words = ["model=qwen25_05b", "dataset=synthetic", "training.global_samples=64", "training.max_length=1024"]
    words += ["optimizer.learning_rate=1e-4", "hardware=hopper", "activation=stored", "packing.row_length=1024"]
    words += [f"parallelism={strategy}", f"hardware.gpus_per_node={1 if strategy == 'single' else 8}"]
    words += ["parallelism.shard_group_size=4"] if strategy == "hsdp" else []
    return resolved(None, *words)


def planned(strategy, method=PeftMethod.full, optimizer=ADAMW):
    """A configuration of 8 H200."""
    config = composed(strategy)
    config.peft.method, config.optimizer.name = method, optimizer
    return config


def estimate(config):
    """Of a step of several passes, whatever its size: larger passes may be fewer."""
    return estimate_memory(config, config.model.facts, accumulates=True)


def host(config):
    return host_bytes(config, config.model.facts, tensors=estimate(config).total_gib * GIB)


def parts(found):
    return {
        name: getattr(found, f"{name}_gib") for name in ("weights", "gradients", "optimizer", "buffers", "activations")
    }


def changed(config, **values):
    """A copy with some values at `section__key`."""
    result = copy.deepcopy(config)
    for key, value in values.items():
        section, name = key.split("__")
        setattr(getattr(result, section), name, value)
    return result


def test_every_strategy_is_known_here():
    offloaded = {"zero3_offload", "zero3_nvme", "fsdp_offload"}
    assert set(STRATEGIES) == set(DIVIDED) | offloaded


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_rules_refuse_what_is_left_out_here_and_nothing_else(strategy):
    for method, optimizer in itertools.product(PeftMethod, OptimizerName):
        found = {problem.id for problem in check(planned(strategy, method, optimizer)) if problem.is_error}
        assert found == refused_by(strategy, method, optimizer), (method, optimizer)


@pytest.mark.parametrize(("strategy", "method", "optimizer"), CASES)
def test_the_estimate_is_finite_and_grows_with_the_work(strategy, method, optimizer):
    config = planned(strategy, method, optimizer)
    found, hosts = estimate(config), host(config)
    values = [*parts(found).values(), *vars(hosts).values(), overhead_bytes(config, found.total_gib * GIB)]
    assert all(math.isfinite(value) and value >= 0 for value in values)
    assert found.activations_gib > 0 and hosts.processes > 0
    for more in (
        {"packing__row_length": 2048},
        {"training__micro_batch_size": 2},
        {"peft__rank": 64},
        {"training__micro_batch_size": 3, "packing__row_length": 4096},
    ):
        larger = estimate(changed(config, **more))
        taken = larger.total_gib + host(changed(config, **more)).peak / GIB  # an adapter may be on the host alone
        is_read = "peft__rank" not in more or method is not PeftMethod.full
        assert taken > found.total_gib + hosts.peak / GIB if is_read else taken == found.total_gib + hosts.peak / GIB
        # The fullest moment may be another, with fewer gradients, and more of what a pass keeps.
        assert larger.total_gib >= found.total_gib - 1e-9
        assert larger.weights_gib >= found.weights_gib and larger.optimizer_gib >= found.optimizer_gib
    recomputed = estimate_memory(config, config.model.facts, checkpointing=Checkpointing.enabled, accumulates=True)
    assert recomputed.activations_gib < found.activations_gib
    assert recomputed.states_gib == found.states_gib


@pytest.mark.parametrize(("strategy", "method", "optimizer"), [case for case in CASES if case[0] != "single"])
def test_what_is_divided_halves_on_twice_as_many_nodes(strategy, method, optimizer):
    config = planned(strategy, method, optimizer)
    one, two = estimate(config), estimate(changed(config, hardware__num_nodes=2))
    for name in ("weights", "gradients", "optimizer"):
        before, after = getattr(one, f"{name}_gib"), getattr(two, f"{name}_gib")
        divisor = 2 if name in DIVIDED.get(strategy, ()) or strategy.endswith(("_offload", "_nvme")) else 1
        is_whole = strategy == "zero2_offload" and name == "weights"
        assert after == pytest.approx(before if is_whole else before / divisor)
    assert two.total_gib <= one.total_gib + 1e-9
    # A node keeps half as much of what all nodes share.
    assert host(changed(config, hardware__num_nodes=2)).offload <= host(config).offload


@pytest.mark.parametrize(("strategy", "method", "optimizer"), [case for case in CASES if case[2] is not ADAMW])
def test_smaller_moments_are_smaller_by_their_bytes(strategy, method, optimizer):
    """8 bits save 3 of 4 bytes of two moments; paged ones are counted on the host."""
    config = planned(strategy, method, optimizer)
    whole = estimate(changed(config, optimizer__name=ADAMW)).optimizer_gib
    ranks = 8 if "optimizer" in DIVIDED.get(strategy, ("optimizer",)) else 4 if strategy == "hsdp" else 1
    parameters = count_parameters(config, config.model.facts)
    # transformers asks for whole moments of embeddings, which DeepSpeed's flat copies do not know
    embeddings = 0 if strategy.startswith("zero") else parameters.trained_embeddings / ranks / GIB
    mine = parameters.trained / ranks / GIB
    eight_bit = 2 * mine + 6 * embeddings
    saved = {OptimizerName.adamw_8bit: 8 * mine - eight_bit, OptimizerName.muon: 4 * (mine - embeddings)}.get(
        optimizer, 8 * mine
    )
    assert whole - estimate(config).optimizer_gib == pytest.approx(saved)
    paged = {OptimizerName.paged_adamw_32bit: 8 * mine, OptimizerName.paged_adamw_8bit: eight_bit}.get(optimizer, 0)
    on_node = (1 if strategy == "single" else 8) * paged
    more = host(config).offload - host(changed(config, optimizer__name=ADAMW)).offload
    assert more / GIB == pytest.approx(on_node)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_adapters_take_less_than_all_weights(strategy):
    full, lora = (estimate(planned(strategy, method)) for method in (PeftMethod.full, PeftMethod.lora))
    assert lora.gradients_gib + lora.optimizer_gib <= 0.1 * (full.gradients_gib + full.optimizer_gib)
    if "zero3" not in strategy:  # whose product keeps more of an adapter's layers than of those that are trained whole
        assert lora.total_gib < full.total_gib
    hosts = host(planned(strategy, PeftMethod.lora)), host(planned(strategy))
    assert hosts[0].offload <= hosts[1].offload and hosts[0].saving <= hosts[1].saving * 1.05


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if not refused_by(name, PeftMethod.qlora)])
def test_four_bits_take_less_than_adapters_by_their_bytes(strategy):
    config, lora = planned(strategy, PeftMethod.qlora), estimate(planned(strategy, PeftMethod.lora))
    facts = config.model.facts
    saved = facts.measured.linear_parameters * (4 - 4.127 / 8)  # embeddings, norms and biases stay in fp32
    ranks = 8 if "weights" in DIVIDED.get(strategy, ()) else 4 if strategy == "hsdp" else 1
    if lora.weights_gib:
        assert lora.weights_gib - estimate(config).weights_gib == pytest.approx(saved / ranks / GIB)
    else:
        per_node = host(planned(strategy, PeftMethod.lora)).offload - host(config).offload
        assert per_node == pytest.approx(8 * (of_weights(facts, 4, strategy) - of_weights(facts, 4.127 / 8, strategy)))


def of_weights(facts, bytes_of_linear, strategy):
    """Page-locked bytes of a rank's shares of the linear layers; ZeRO-3 also has all its weights in one block."""
    sizes = facts.num_layers * [size / 8 for size in weight_sizes(facts).values()]
    apart = sum(page_locked(bytes_of_linear * size) for size in sizes)
    if strategy != "zero3_offload":
        return apart
    adapters = count_parameters(planned(strategy, PeftMethod.lora), facts).trained
    others = facts.num_parameters - facts.measured.linear_parameters + adapters
    return apart + page_locked(bytes_of_linear * sum(sizes) + 4 * others / 8)


@pytest.mark.parametrize(("strategy", "method"), [case[:2] for case in CASES if case[2] is ADAMW])
def test_nothing_is_lost_on_the_way_to_the_host(strategy, method):
    """What offloading takes from the GPUs of a node is in its memory or on its disk."""
    config = planned(strategy, method)
    base = {"zero2_offload": "zero2", "fsdp_offload": "fsdp"}.get(strategy, "zero3")
    if not strategy.endswith(("_offload", "_nvme")):
        assert (host(config).offload, host(config).nvme) == (0, 0)
        return
    taken = estimate(planned(base, method)).states_gib - estimate(config).states_gib
    assert host(config).offload + host(config).nvme >= 8 * taken * GIB * (1 - 1e-9)


sizes = st.integers(1, 8192)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    strategy=st.sampled_from(["ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp_grad_op", "zero3_offload"]),
    nodes=st.integers(1, 16), ranks=st.integers(1, 16), length=sizes, rows=st.integers(1, 8),
    key=st.sampled_from(["num_layers", "hidden_size", "intermediate_size", "vocab_size", "num_parameters"]),
    more=st.integers(1, 1000),
)  # fmt: skip
def test_a_larger_model_never_takes_less(strategy, nodes, ranks, length, rows, key, more):
    config = changed(
        composed(strategy), hardware__num_nodes=nodes, hardware__gpus_per_node=ranks, packing__row_length=length,
        training__micro_batch_size=rows,
    )  # fmt: skip
    larger = copy.deepcopy(config)
    facts = larger.model.facts
    setattr(facts, key, getattr(facts, key) + more)
    # The parameters that a size brings; an average layer does not shrink.
    layer = -(-count_parameters(config, config.model.facts).layers // 24)
    ends = {"vocab_size": facts.hidden_size, "hidden_size": facts.vocab_size}.get(key, 0)
    facts.num_parameters += more * (layer if key == "num_layers" else ends)
    small, large = estimate(config), estimate(larger)
    assert math.isfinite(large.total_gib)
    assert large.total_gib >= small.total_gib
    assert host(larger).peak >= host(config).peak
