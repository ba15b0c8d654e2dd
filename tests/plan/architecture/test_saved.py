"""What is traced on tensors without memory against what autograd saves of real ones, and the traces in the book."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch
import yaml
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, BambaConfig, Qwen3_5TextConfig
from transformers.models.bamba import modeling_bamba
from transformers.models.qwen3_5 import modeling_qwen3_5

from tunebook.config.book import book_root
from tunebook.config.compose import compose
from tunebook.config.model_facts import ModelFacts
from tunebook.model.load import architecture_from_facts
from tunebook.plan.architecture import ALL_WAYS, layers, saved, trace_file
from tunebook.plan.architecture.compiled import compile_layers
from tunebook.plan.architecture.kernels import CudaAutocast, gated_delta_rule, linear_attention

from .conftest import ARCHITECTURES, QUIET, SIZES

pytestmark = pytest.mark.usefixtures("own_compiler")

TOKENS = 42
COPYING = ("gpt_neox", "phi3")  # put their query together from two parts
FORMATS = {
    "fp32": (torch.float32, False), "autocast": (torch.float32, True), "bf16": (torch.bfloat16, True),
    "cast": (torch.bfloat16, False),
}  # fmt: skip


def measured(config, mode):
    """What is kept, whether or not it is offloaded."""
    return numbers_of(config, mode)["/".join(mode)]


def numbers_of(config, mode, **options):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    number = config.get_text_config(decoder=True).num_hidden_layers
    kinds = layers.kinds_of(config, layers.decoder_layers(layers.text_decoder(model), number))
    return saved._measure(config, kinds, layers.traced_places(config, kinds, {}), mode, {}, **options)


def really_saved(config, number_format, attention):
    """Bytes that a real pass over two documents in one row keeps in its last layer but one."""
    dtype, is_mixed = FORMATS[number_format]
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype).train()
    decoder, now, found = model.base_model, [None], {}
    of_weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    shapes = {shape for one in model.parameters() for shape in (tuple(one.shape), tuple(reversed(one.shape)))}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in of_weights and tuple(tensor.shape) not in shapes:
            found.setdefault(storage.data_ptr(), (now[0], storage.nbytes(), tensor))
        return tensor

    blocks = next(each for each in decoder.children() if isinstance(each, torch.nn.ModuleList))
    for number, layer in enumerate(blocks):
        layer.register_forward_pre_hook(lambda *_, number=number: now.__setitem__(0, number))
    half = torch.arange(TOKENS // 2)
    row = {"input_ids": torch.randint(0, 100, (1, TOKENS)), "position_ids": torch.cat([half, half])[None]}
    mixed = torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_mixed)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), mixed, CudaAutocast():
        decoder(**row, use_cache=False)
    return sum(size for number, size, _ in found.values() if number == len(blocks) - 2)


@pytest.mark.parametrize(
    ("kind", "attention", "number_format"),
    [
        ("llama", "sdpa", "autocast"),
        ("gpt2", "sdpa", "fp32"),
        ("gpt2", "sdpa", "autocast"),
        ("gpt_neox", "sdpa", "autocast"),
        ("gpt_neox", "sdpa", "bf16"),
        ("gpt_neox", "sdpa", "cast"),
        ("phi3", "sdpa", "fp32"),
        ("gemma2", "eager", "autocast"),
    ],
)
def test_a_layer_keeps_what_autograd_saves(config_of, kind, attention, number_format):
    """To the byte, but for a copy that only the CPU's kernel needs: it writes its output as the query lies in memory,
    those of a GPU as the next layer reads it."""
    config = config_of(kind)
    fixed, each, pair = measured(config, (number_format, "full", attention))[3:]
    copied = TOKENS * config.hidden_size * (4 if number_format == "fp32" else 2) if kind in COPYING else 0
    assert fixed + TOKENS * (each + pair * TOKENS) == really_saved(config, number_format, attention) - copied


def test_a_gpus_autocast_has_norms_and_powers_in_fp32_where_a_cpus_has_not():
    numbers = torch.randn(3, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert functional.layer_norm(numbers, (8,)).dtype is torch.bfloat16
        with CudaAutocast():
            assert functional.layer_norm(numbers, (8,)).dtype is torch.float32
            assert torch.pow(numbers, 3.0).dtype is (numbers**3).dtype is torch.float32
            assert numbers.softmax(dim=-1).dtype is torch.float32
            assert functional.linear(numbers, numbers).dtype is torch.bfloat16
            assert torch.arange(3).pow(2).dtype is torch.int64
    with CudaAutocast():
        assert functional.layer_norm(numbers, (8,)).dtype is torch.bfloat16


def test_experts_keep_what_autograd_saves(config_of):
    """Within 2%: the experts' product is another one here, which keeps the same tensors and a few numbers besides."""
    config = config_of("mixtral")
    fixed, each, pair = measured(config, ("bf16", "full", "sdpa"))[3:]
    expected = really_saved(config, "bf16", "sdpa")
    assert fixed + TOKENS * (each + pair * TOKENS) == pytest.approx(expected, rel=0.02)


def test_experts_that_no_adapter_reaches_keep_no_inputs(config_of):
    """PEFT cannot adapt GPT-OSS's. One layer of gpt-oss-20b kept 225,840 bytes per token on an H100 (h100_models)."""
    config, key = config_of("gpt_oss"), ("bf16", "adapter", "flash")
    frozen, adapted = (
        numbers_of(config, key, has_experts=has_experts)["/".join(key)][4] for has_experts in (False, True)
    )
    inputs = config.hidden_size + config.intermediate_size
    assert adapted - frozen == 2 * config.num_experts_per_tok * inputs
    facts = compose(None, ["model=gpt_oss_20b"]).config.model.facts
    assert facts.measured.saved["/".join(key)][4] == pytest.approx(225_840, rel=0.02)


# Of all modes a few are traced again each time.
EACH_TIME = {
    "fp32/full/sdpa",
    "autocast/full/flash",
    "bf16/adapter/eager",
    "cast/adapter/sdpa",
    "autocast/full/compiled",
}
MODES = [
    pytest.param(mode, marks=[] if "/".join(mode) in EACH_TIME else pytest.mark.nightly, id="-".join(mode))
    for mode in saved._MODES
]


@pytest.mark.parametrize("mode", MODES)
def test_the_numbers_in_the_book_are_those_of_a_fresh_trace(mode):
    """The quickstart's, the smallest model there is; those of the other models are made by the same command."""
    folder = book_root() / "recipes" / "quickstart" / "model"
    facts = trace_file(folder / "config.json")
    assert facts is not None and facts.measured is not None
    shipped = facts.measured.saved | facts.measured.saved_without_autocast
    numbers = numbers_of(AutoConfig.from_pretrained(folder), mode)
    assert len(numbers) == (2 if mode[2] == saved.COMPILED else 3) and numbers.items() <= shipped.items()


@pytest.mark.parametrize(
    ("model", "mode"),
    [
        ("qwen3_4b", ("bf16", "full", "flash")),
        ("gemma3_1b", ("cast", "adapter", "sdpa")),
        ("gpt_oss_20b", ("autocast", "full", "eager")),
        ("olmoe_1b_7b", ("fp32", "adapter", "flash")),
        pytest.param("olmo3_7b", ("bf16", "full", "compiled"), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_the_numbers_of_a_named_model_are_those_of_a_fresh_trace(model, mode):
    facts = ModelFacts(**yaml.safe_load((book_root() / f"hydra_configs/model/{model}.yaml").read_text())["facts"])
    assert facts.measured is not None and facts.measured.is_of_the_book
    shipped = facts.measured.saved | facts.measured.saved_without_autocast
    numbers = numbers_of(architecture_from_facts(facts), mode)
    assert len(numbers) == (2 if mode[2] == saved.COMPILED else 3) and numbers.items() <= shipped.items()


@pytest.mark.parametrize(
    ("mode", "each", "pair"),
    [  # per hidden number what goes into norms and comes out of them; in fp32 each head's scores, too
        (("autocast", "full", "flash"), 10, 0),
        (("fp32", "full", "flash"), 20, 0),
        (("bf16", "full", "flash"), 14, 0),
        (("bf16", "adapter", "flash"), 8, 0),
        (("fp32", "full", "eager"), 16, 4),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else str(value),
)
def test_beside_what_is_kept_stands_what_offloading_leaves_of_it(config_of, mode, each, pair):
    config = config_of("llama")
    numbers, offloaded = numbers_of(config, mode), "/".join((*mode, saved.OFFLOADED))
    assert {*numbers} == {"/".join(mode), offloaded, "/".join((*mode, saved.TILED))}
    left = [0, each * config.hidden_size, pair * config.num_attention_heads]
    assert numbers[offloaded] == [*(3 * number for number in left), *left]


def test_each_kind_of_layer_is_traced_twice():
    sliding, full = ("sliding", (None, ((4, 4),))), ("full", (None, ((4, 4),)))
    places = partial(layers.places_to_trace, kinds_when_shortened=lambda places: None)
    assert places([sliding] * 30) == [0, 1]
    assert places([*[sliding] * 5, full] * 4) == [0, 5, 1, 11]
    assert places([*[sliding] * 20, full]) == [0, 20, 1]
    dense = ("full", (None, ((4, 8),)))  # of other shapes, which only its place in the model decides
    assert places([dense, *[full] * 20]) == [0, 1, 2]
    deep = [*[full] * 20, dense]
    assert places(deep) == [*range(12)]  # no deeper: the last kind gets the mean of the others
    assert layers.places_to_trace(deep, lambda places: [deep[place] for place in places]) == [0, 1, 20]


ZAMBA = {
    "vocab_size": 50, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "mamba_d_state": 8,
    "mamba_headdim": 16, "n_mamba_heads": 4, "adapter_rank": 4, "num_hidden_layers": 18,
    "layers_block_type": [*["mamba"] * 5, "hybrid"] * 3,
}  # fmt: skip


def test_the_places_of_a_kind_follow_the_layers_that_are_traced():
    zamba = AutoConfig.for_model("zamba2", **ZAMBA)
    assert zamba.hybrid_layer_ids == [5, 11, 17]
    assert layers.shortened(zamba, [0, 5, 1, 11]).hybrid_layer_ids == [1, 3]
    experts = AutoConfig.for_model("qwen3_moe", num_hidden_layers=6, mlp_only_layers=[0, 3])
    assert layers.shortened(experts, [0, 1, 3]).mlp_only_layers == [0, 2]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", [("bf16", "full", "flash"), ("autocast", "adapter", "sdpa")], ids="/".join)
def test_layers_whose_kind_the_config_lists_by_place_are_traced(mode):
    whole = numbers_of(AutoConfig.for_model("zamba2", **ZAMBA), mode)["/".join(mode)]
    half = AutoConfig.for_model(
        "zamba2", **ZAMBA | {"num_hidden_layers": 12, "layers_block_type": ZAMBA["layers_block_type"][:12]}
    )
    assert whole[1] == pytest.approx(1.5 * numbers_of(half, mode)["/".join(mode)][1], rel=0.01)
    assert whole[1] > 18 * 2 * ZAMBA["hidden_size"]  # bytes of a token: more than the input of each layer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["falcon_h1", "mamba2"])
def test_where_peft_refuses_some_layers_adapters_on_the_others_are_traced(kind):
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2}
    own = {
        "falcon_h1": {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "mamba_d_ssm": 32,
                      "mamba_n_heads": 4, "mamba_d_state": 8},
        "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
    }  # fmt: skip
    numbers = numbers_of(AutoConfig.for_model(kind, **sizes, **own[kind]), ("autocast", "adapter", "flash"))
    assert numbers["autocast/adapter/flash"][1] > 2 * 2 * 32  # bytes of a token: more than the input of each layer


DEEP = {"qwen3": 5, "gemma3_text": 13, "smollm3": 9, "gpt_oss": 6}


@pytest.mark.parametrize("kind", DEEP)
@pytest.mark.parametrize("mode", [("bf16", "full", "flash"), ("fp32", "adapter", "sdpa")], ids="/".join)
def test_a_few_layers_keep_what_each_of_all_layers_keeps(config_of, monkeypatch, kind, mode):
    """Only the first of a kind keeps more: what all of them share, such as the rotation's sines."""
    config, seen = config_of(kind), []
    deeper = AutoConfig.for_model(
        kind, **{name: value for name, value in ARCHITECTURES[kind].items() if name != "layer_types"} | QUIET
        | {"num_hidden_layers": DEEP[kind]},
    )  # fmt: skip
    assert len(config.layer_types) < DEEP[kind]
    found, trace = numbers_of(deeper, mode), saved._saved_by_layer
    monkeypatch.setattr(layers, "traced_places", lambda config, kinds, options: [*range(len(kinds))])
    monkeypatch.setattr(saved, "_saved_by_layer", lambda *every: seen.append(trace(*every)) or seen[-1])
    assert numbers_of(deeper, mode) == found
    kinds = [*zip(deeper.layer_types, getattr(deeper, "no_rope_layers", deeper.layer_types), strict=True)]
    for each in seen:
        for kind_of_layer in set(kinds):
            places = [place for place, other in enumerate(kinds) if other == kind_of_layer][1:]
            assert len({tuple(numbers[place] for numbers in each) for place in places}) <= 1


def test_one_graph_shows_what_both_ways_of_compiling_keep(config_of):
    """With selective checkpointing as traced by itself."""
    config, mode = config_of("llama"), ("bf16", "adapter", saved.COMPILED)
    found = numbers_of(config, mode)

    def compile_selectively(layers, receivers):
        compile_layers(layers, recomputes=True)

    with mock.patch.object(saved, "compile_layers", compile_selectively):
        alone = numbers_of(config, mode)["bf16/adapter/compiled"]
    assert found["bf16/adapter/selective"] == alone != found["bf16/adapter/compiled"]


def test_without_autocast_adapters_are_in_the_format_of_the_weights(config_of):
    """So that of each of four products nothing is kept but what comes of its rank 1, and no input in fp32."""
    config = config_of("gpt_neox")
    adapter, full = (measured(config, ("cast", method, "sdpa"))[4] for method in ("adapter", "full"))
    assert adapter - full == 4 * 2
    under_autocast = measured(config, ("bf16", "adapter", "sdpa"))[4]
    assert under_autocast - adapter > 2 * 2 * config.hidden_size, "the outputs of two norms at least"


def test_gated_delta_rule_saves_what_its_kernel_saves():
    """2 key heads of 16 and 4 value heads of 32, in bf16: for each token query, key, value, beta and a row of 64.

    And in fp32 a factor for each norm and the sum of the gates.
    """
    tokens, form = 100, {"dtype": torch.bfloat16, "requires_grad": True}
    query, key = torch.zeros(1, tokens, 2, 16, **form), torch.zeros(1, tokens, 2, 16, **form)
    value, beta = torch.zeros(1, tokens, 4, 32, **form), torch.zeros(1, tokens, 4, **form)
    gates, sizes = torch.zeros(1, tokens, 4, requires_grad=True), []

    def note(tensor):
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output, last = gated_delta_rule(query, key, value, g=gates, beta=beta, cu_seqlens=None)
    assert (output.shape, last) == (value.shape, None)
    assert sum(sizes) == tokens * (2 * (2 * 2 * 16 + 4 * 32 + 4 + 4 * 64) + 4 * (2 * 2 + 4))


def test_linear_attention_saves_what_its_kernel_saves():
    """4 heads, in bf16: for each token query and key of 16 and a value of 32, and in fp32 the sum of the gates."""
    tokens, form = 100, {"dtype": torch.bfloat16, "requires_grad": True}
    query, key = torch.zeros(1, tokens, 4, 16, **form), torch.zeros(1, tokens, 4, 16, **form)
    value, gates, sizes = torch.zeros(1, tokens, 4, 32, **form), torch.zeros(1, tokens, 4, requires_grad=True), []

    def note(tensor):
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output, last = linear_attention(query, key, value, gates, scale=1.0, cu_seqlens=None)
    assert (output.shape, last) == (value.shape, None)
    assert sum(sizes) == tokens * (2 * (2 * 4 * 16 + 4 * 32) + 4 * 4)


def bytes_per_token(config):
    """Of layers with states, which keep bytes in proportion to the tokens."""
    constant, per_token, squared, *_ = numbers_of(config, ("bf16", "full", "flash"))["bf16/full/flash"]
    assert squared == 0
    assert 0 <= constant < 50 * per_token
    return per_token


def test_mamba_keeps_memory_in_proportion_to_the_tokens_and_is_put_back():
    config = BambaConfig(
        **SIZES, **QUIET, num_hidden_layers=4, num_key_value_heads=2, head_dim=16, mamba_n_heads=8, mamba_n_groups=2,
        mamba_d_state=16, mamba_chunk_size=256,
    )  # fmt: skip
    own = modeling_bamba.mamba2_chunk_scan
    per_token = bytes_per_token(config)
    assert modeling_bamba.mamba2_chunk_scan is own
    size = config.mamba_expand * config.hidden_size
    assert per_token > 4 * 2 * (2 * 8 * 16 + size)  # the kernel's part alone


def test_states_keep_memory_in_proportion_to_the_tokens_and_are_put_back():
    config = Qwen3_5TextConfig(
        **SIZES, **QUIET, num_hidden_layers=4, num_key_value_heads=2, head_dim=16, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
        layer_types=["linear_attention"] * 4,
    )  # fmt: skip
    own = modeling_qwen3_5.torch_chunk_gated_delta_rule
    per_token = bytes_per_token(config)
    assert modeling_qwen3_5.torch_chunk_gated_delta_rule is own
    assert per_token > 4 * 2 * (2 * 2 * 16 + 4 * 16 + 4 * 64)  # the kernel's part alone


def test_three_lengths_give_a_parabola():
    lengths = saved.LENGTHS
    assert saved._curve([7 + 5 * length + 3 * length**2 for length in lengths]) == pytest.approx((7, 5, 3))


@pytest.mark.parametrize(
    ("ways", "modes"),
    [
        (ALL_WAYS, 4 * 2 * 3 + 2 * 3),
        (["autocast/full"], 3 + 1),
        (["bf16/dropout", "cast/dropout"], 2 * 3 + 1),
        (["bf16/adapter", "bf16/dropout"], 3 + 2),
        (["fp32/adapter", "autocast/adapter"], 2 * 3 + 1),
    ],
)
def test_a_mode_that_cannot_be_run_is_left_out(config_of, monkeypatch, own_compiler, ways, modes):
    def fail(*_):
        raise RuntimeError("no fake kernel")

    config = config_of("llama")
    monkeypatch.setattr(saved, "_saved_by_layer", fail)
    layers, looked_at = torch.nn.ModuleList([torch.nn.Linear(1, 1)]), []
    with saved.measuring(config, layers, {}, on_found=lambda: looked_at.append(None), ways=ways) as found:
        assert found() == ({}, {})
    assert len(looked_at) == modes, "and is said to be done, like every other of these ways"


def test_nothing_is_compiled_where_nothing_will_be(config_of, monkeypatch, own_compiler):
    monkeypatch.setattr(saved, "_measure", lambda _, __, places, mode, ___, **options: {"/".join(mode): [0] * 6})
    layers = torch.nn.ModuleList([torch.nn.Linear(1, 1)])
    with saved.measuring(config_of("mixtral"), layers, {}, compiles=False, has_experts=True) as found:
        both, beside = found()
    assert not [mode for mode in both if "compiled" in mode] and len(both) == 4 * 2 * 3
    assert [*beside] == [mode for mode in both if "/adapter/" in mode]


@pytest.mark.parametrize("mode", [("autocast", "full", "sdpa"), ("bf16", "adapter", "flash")])
def test_a_tower_for_images_changes_nothing_about_the_layers_of_text(config_of, mode):
    assert numbers_of(config_of("gemma3"), mode) == numbers_of(config_of("gemma3_text"), mode)
    assert min(measured(config_of("gemma3"), mode)[:2]) >= 0 < measured(config_of("gemma3"), mode)[1]
