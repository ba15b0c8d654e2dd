"""What is counted without memory against the real model, and what cannot be built."""

from __future__ import annotations

import contextlib
import json
import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import DataDependentOutputException
from transformers import AutoConfig, AutoModelForCausalLM

from tunebook.config.book import book_root
from tunebook.config.choices import Attention
from tunebook.model.load import largest
from tunebook.plan.architecture import measure, saved
from tunebook.plan.architecture.layers import decoder_layers, text_decoder

from .conftest import SIZES

KINDS = ("llama", "qwen2", "qwen3", "gpt2", "gpt_neox", "gemma2", "mixtral", "phi3")


SAVED = {"fp32/full/sdpa": [0, 1, 0, 0, 1, 0]}


def finding(saved, beside=None):
    """`measure.measuring` with what it would find."""
    return lambda *_, **__: contextlib.nullcontext(lambda: (saved, beside or {}))


@pytest.fixture(autouse=True)
def without_activations(monkeypatch):
    """Those are looked at in test_saved.py."""
    monkeypatch.setattr(measure, "measuring", finding(SAVED))


def described(folder):
    return measure.describe(folder / "config.json", trust_remote_code=False)


@pytest.mark.filterwarnings("ignore")  # of peft, about what it makes of GPT-2's layers and of experts
@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_is_counted(folder_of, config_of, kind):
    found = described(folder_of(kind))
    model = AutoModelForCausalLM.from_config(config_of(kind))
    assert found["num_parameters"] == sum(parameter.numel() for parameter in model.parameters())
    both_ends = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    outside = sum(parameter.numel() for name, parameter in model.named_parameters() if not layer_of(name))
    assert found["num_parameters"] - found["measured"]["parameters"] == outside
    assert found["tie_word_embeddings"] is (len(both_ends) == 1)
    assert found["measured"]["num_layers"] == found["num_layers"] == config_of(kind).num_hidden_layers
    lora = LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM")
    trained = [each.numel() for each in get_peft_model(model, lora).parameters() if each.requires_grad]
    assert 3 * found["measured"]["adapter_parameters"] == sum(trained)


@pytest.mark.filterwarnings("ignore")
def test_what_4_bits_are_made_of_and_what_a_token_meets(folder_of, config_of):
    """Of Mixtral's experts, each layer's in one tensor, two are chosen, and none is a linear layer."""
    found, config = described(folder_of("mixtral"))["measured"], config_of("mixtral")
    layers = AutoModelForCausalLM.from_config(config).model.layers
    experts = sum(each.numel() for name, each in layers.named_parameters() if "experts" in name and each.dim() == 3)
    linear = sum(each.weight.numel() for each in layers.modules() if isinstance(each, torch.nn.Linear))
    assert experts > 0 and found["linear_parameters"] == linear
    left_out = experts * (config.num_local_experts - config.num_experts_per_tok) // config.num_local_experts
    assert found["active_parameters"] == found["parameters"] - left_out
    assert found["largest_parameter"] == max(each.numel() for each in layers.parameters() if each.dim() == 3)
    sizes = {"experts_per_token": 2, "expert_size": config.intermediate_size, "has_expert_biases": False}
    assert sizes.items() <= found.items()
    assert described(folder_of("gpt_oss"))["measured"]["has_expert_biases"]
    dense = described(folder_of("llama"))["measured"]
    assert "experts_per_token" not in dense
    assert dense["active_parameters"] == dense["parameters"] > dense["linear_parameters"]


@pytest.mark.filterwarnings("ignore")
def test_a_tower_for_images_is_not_trained_on_text(folder_of, config_of):
    found, text = described(folder_of("gemma3")), described(folder_of("gemma3_text"))
    model = AutoModelForCausalLM.from_config(config_of("gemma3"))
    tower = [parameter.numel() for name, parameter in model.named_parameters() if "language_model" not in name]
    assert found["measured"]["unreached"] == ["model.multi_modal_projector", "model.vision_tower"]
    assert found["measured"]["unreached_parameters"] == sum(tower) == found["num_parameters"] - text["num_parameters"]
    same = ("num_layers", "parameters", "linear_inputs", "adapter_parameters", "linear_parameters")
    assert {key: found["measured"][key] for key in same} == {key: text["measured"][key] for key in same}
    assert (text["measured"]["unreached"], text["measured"]["unreached_parameters"]) == ([], 0)
    # transformers 5.24: flash attention drops the mask over the tokens of an image
    assert {*text["measured"]["attention"]} - {*found["measured"]["attention"]} == {
        "flash_attention_2", "flash_attention_3", "flash_attention_4"
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_what_is_not_reached_has_no_gradient(config_of):
    """Of a real pass."""
    model = AutoModelForCausalLM.from_config(config_of("gemma3"), dtype=torch.float32)
    model(input_ids=torch.arange(10, 40)[None]).logits.sum().backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == measure._unreached(config_of("gemma3"), {})


def layer_of(name):
    """The number of the layer that a parameter is in, as text; empty for those of both ends and the last norm."""
    return next((part for part in name.split(".") if part.isdecimal()), "")


def test_the_sizes_are_those_of_the_config(folder_of):
    found = described(folder_of("gpt2"))
    assert found["architecture"] == "GPT2LMHeadModel"
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    assert [found[name] for name in sizes] == [64, 256, 4, 4, 100]  # GPT-2 states no inner size: 4 x hidden
    assert (found["max_position_embeddings"], found["dtype"]) == (512, "bfloat16")
    # query, key and value in one product, output, and the feed-forward's two
    assert found["measured"]["linear_inputs"] == 3 * (64 + 64 + 64 + 256)
    assert described(folder_of("gemma2"))["num_key_value_heads"] == 2


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"model_type": "lama9"}, "unknown-architecture", r'model_type=lama9, architectures=\["Llama.*"\]$'),
        ({"model_type": "t5"}, "not-causal", "model_type=t5, architectures=.*LlamaForCausalLM.*]$"),
        ({"hidden_act": "nonsense"}, "cannot-build", "nonsense"),
    ],
)
def test_what_cannot_be_built(folder_of, changes, error, said):
    file = folder_of("llama") / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    found = measure.describe(file, trust_remote_code=False)
    assert found["error"] == error
    assert re.search(said, found["reason"])


@pytest.mark.parametrize(("kind", "meant"), [("lama9", "llama"), ("mistrl", "mistral"), ("foobar", None), ("", None)])
def test_what_may_have_been_meant_is_near(folder_of, kind, meant):
    file = folder_of("llama") / "config.json"
    file.write_text(json.dumps({"model_type": kind, "hidden_size": 16}))
    found = measure.describe(file, trust_remote_code=False)
    assert (found["reason"], found.get("meant")) == (f"model_type={kind}", meant)


CODE = {"AutoConfig": "configuration_own.Config", "AutoModelForCausalLM": "modeling_own.Model"}


@pytest.mark.parametrize(("kind", "is_known"), [("phi3", True), ("own", False)])
def test_code_of_the_models_own_that_is_not_there(folder_of, kind, is_known):
    file = folder_of("phi3") / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": kind, "auto_map": CODE}))
    found = measure.describe(file, trust_remote_code=True)
    absent = "configuration_own.py, modeling_own.py"
    assert found == {"error": "code-absent", "reason": absent, "is_known": is_known}
    assert ("error" in measure.describe(file, trust_remote_code=False)) is not is_known
    (file.parent / "configuration_own.py").touch()
    assert measure._absent_code(file) == {"error": "code-absent", "reason": "modeling_own.py", "is_known": is_known}
    (file.parent / "modeling_own.py").touch()
    assert measure._absent_code(file) is None


@pytest.mark.parametrize(
    "auto_map", [None, [], {"AutoConfig": None}, {"AutoConfig": "org/other--config.Config"}], ids=str
)
def test_code_that_is_somewhere_else_or_nowhere_is_not_looked_for_in_the_folder(folder_of, auto_map):
    file = folder_of("phi3") / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": auto_map, "vocab_size": -1}))
    assert measure.describe(file, trust_remote_code=True).get("error") != "code-absent"


@pytest.mark.parametrize(("kind", "expected"), [("llama", True), ("mixtral", False)])
@pytest.mark.filterwarnings("ignore")
def test_compiled_layers_are_traced_where_auto_compiles_them(folder_of, monkeypatch, kind, expected):
    asked = []
    monkeypatch.setattr(measure, "measuring", lambda *_, **how: asked.append(how["compiles"]) or finding(SAVED)())
    for compiles in (None, True, False):
        measure.describe(folder_of(kind) / "config.json", trust_remote_code=False, compiles=compiles)
    assert asked == [expected, True, False]


def test_no_weight_takes_memory(folder_of, monkeypatch):
    seen = []

    def look(config, layers, *_, **__):
        seen.extend(parameter.device for parameter in layers.parameters())
        return finding(SAVED)()

    monkeypatch.setattr(measure, "measuring", look)
    described(folder_of("llama"))
    assert set(seen) == {torch.device("meta")}


@pytest.mark.parametrize(
    ("kind", "expected", "not_expected"),
    [
        ("llama", {Attention.sdpa, Attention.flash_attention_2}, set()),
        ("gemma2", {Attention.eager, Attention.flex_attention, Attention.flash_attention_2}, {Attention.sdpa}),
    ],
)
def test_the_attention_is_what_transformers_has_for_the_architecture(config_of, kind, expected, not_expected):
    with torch.device("meta"):
        found = set(measure.attention_of(AutoModelForCausalLM.from_config(config_of(kind))))
    assert expected <= found
    assert not not_expected & found


def test_flash_attn_is_left_out_in_versions_that_an_architecture_does_not_go_with():
    class Sinks:
        _supports_sdpa, _supports_flex_attn, _supports_flash_attn = False, True, True
        _compatible_flash_implementations = ("someone/kernels", "flash_attention_4")

    class Own:
        _supports_sdpa = _supports_flex_attn = _supports_flash_attn = False

    found = measure.attention_of(Sinks())
    assert found == [Attention.eager, Attention.flex_attention, Attention.flash_attention_4]
    assert measure.attention_of(Own()) == [Attention.eager]


@pytest.mark.parametrize(
    ("kind", "asked", "expected"),
    [
        ("llama", {}, True),
        ("qwen3", {"attention_dropout": 0.1}, False),
        ("gemma2", {}, False),  # caps the logits
        ("gpt2", {}, True),
        ("gpt2", {"attn_pdrop": 0.1}, False),
    ],
)
def test_kernels_by_lengths_are_listed_where_the_model_asks_for_no_more(folder_of, kind, asked, expected):
    file = folder_of(kind) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | asked))
    found = described(file.parent)["measured"]["attention"]
    assert ({"varlen_attention", "varlen_attention_4", "sdpa_by_document"} <= set(found)) is expected
    assert ("varlen_attention" in found) is expected


def test_of_the_kernels_by_lengths_one_computes_attention_sinks(folder_of):
    found = described(folder_of("gpt_oss"))["measured"]["attention"]
    assert found == ["eager", "flex_attention", "flash_attention_4", "varlen_attention"]


def test_a_fault_of_the_machine_is_not_taken_for_one_of_the_model(config_of, monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(saved, "_build", fail)
    layers = torch.nn.ModuleList([torch.nn.Linear(1, 1)])
    with pytest.raises(MemoryError):
        saved.varlen_kernels(config_of("llama"), layers, {})
    with pytest.raises(MemoryError):
        saved._measure(config_of("llama"), [], [], ("fp32", "full", "sdpa"), {})


@pytest.mark.parametrize(
    ("kind", "words"),
    [("t5", "an encoder-decoder"), ("qwen2_vl", "a model of images or sound and text"), ("albert", "an encoder")],
)
def test_a_model_of_another_kind_is_called_what_it_is(tmp_path, kind, words):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    found = measure.describe(tmp_path / "config.json", trust_remote_code=False)
    assert (found["error"], found["kind"]) == ("not-causal", words)


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_no_pass_goes_through_is_refused_with_its_error(folder_of, monkeypatch):
    monkeypatch.setattr(measure, "measuring", finding({}))
    file = folder_of("mixtral") / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_experts_per_tok": 20}))
    found = measure.describe(file, trust_remote_code=False)
    assert found["error"] == "cannot-build"
    assert re.search(r"^no pass through its layers can be computed: \w+: .*k not in range", found["reason"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("error", [DataDependentOutputException("item"), None], ids=["no values", "none"])
def test_a_model_whose_pass_is_only_not_seen_is_not_refused(folder_of, monkeypatch, error):
    def pass_through(*_, **__):
        if error is not None:
            raise error

    monkeypatch.setattr(measure, "measuring", finding({}))
    monkeypatch.setattr("transformers.LlamaForCausalLM.forward", pass_through)
    found = described(folder_of("llama"))
    assert found["architecture"] == "LlamaForCausalLM"
    assert found["measured"]["saved"] == {}


STATES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 50}


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("mamba", {"state_size": 4}),
        ("falcon_mamba", {"state_size": 4}),
        ("rwkv", {"attention_hidden_size": 32}),
    ],
)
def test_models_without_attention_have_facts_too(tmp_path, kind, sizes, monkeypatch):
    monkeypatch.setattr(measure, "measuring", finding({}))  # they need not have been seen passing
    config = AutoConfig.for_model(kind, **STATES, **sizes)
    config.save_pretrained(tmp_path)
    found = measure.describe(tmp_path / "config.json", trust_remote_code=False)
    model = AutoModelForCausalLM.from_config(config)
    assert found["num_parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert (found["num_attention_heads"], found["num_key_value_heads"], found["num_layers"]) == (1, 1, 2)
    linear = {name: each for name, each in model.base_model.named_modules() if isinstance(each, torch.nn.Linear)}
    refused = ["out_proj"] if "mamba" in kind else []  # by PEFT
    assert found["measured"].get("not_adapted", []) == refused
    taken = [each for name, each in linear.items() if name.rpartition(".")[2] not in refused]
    assert found["measured"]["adapter_parameters"] == sum(sum(each.weight.shape) for each in taken)
    assert sum(map(sum, found["measured"]["adapters"].values())) == found["measured"]["adapter_parameters"]
    assert not [name for name in found["measured"]["adapters"] if "lora" in name or name == "base_layer"]


# One of each way of stating sizes: a head size, a window, an image tower, stacked experts without and with biases.
OF_THE_BOOK = ("qwen3_06b", "gemma3_1b", "gemma3_4b", "olmoe_1b_7b", "gpt_oss_20b", "smollm3_3b")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OF_THE_BOOK)
def test_the_files_of_a_model_of_the_book_are_made_again(monkeypatch, tmp_path, name):
    """From sizes alone; a few of the traced activations are looked at in test_saved.py."""
    shipped = book_root() / "hydra_configs" / "model"
    folder = tmp_path / "hydra_configs" / "model"
    folder.mkdir(parents=True)
    stated = (shipped / f"{name}.yaml").read_text()
    (folder / f"{name}.yaml").write_text(re.sub(r"  num_parameters: .*\n", "", stated))
    answer = json.loads((shipped / f"{name}.architecture.json").read_text())
    measured = answer["measured"]
    every = measured["saved"] | measured["saved_without_autocast"]
    monkeypatch.setattr(measure, "measuring", finding(every, measured["saved_beside_experts"]))
    monkeypatch.setattr(measure, "book_root", lambda: tmp_path)
    measure.trace_book([name])
    for file in (f"{name}.yaml", f"{name}.architecture.json"):
        assert (folder / file).read_text() == (shipped / file).read_text()


@pytest.mark.filterwarnings("ignore")
def test_a_size_that_transformers_has_not_is_not_written(monkeypatch, tmp_path):
    folder = tmp_path / "hydra_configs" / "model"
    folder.mkdir(parents=True)
    stated = (book_root() / "hydra_configs" / "model" / "qwen3_06b.yaml").read_text()
    (folder / "qwen3_06b.yaml").write_text(stated.replace("num_parameters: 5", "num_parameters: 6"))
    monkeypatch.setattr(measure, "book_root", lambda: tmp_path)
    with pytest.raises(AssertionError, match="states another num_parameters than transformers has"):
        measure.trace_book(["qwen3_06b"])


def widths(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config(decoder=True)
    return tuple(measure._attention_widths(decoder_layers(text_decoder(model), text.num_hidden_layers), text).values())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [  # layers x heads x head size: of the whole document, of a window; the window
        ("llama", (3 * 64, 0, 0)),
        ("qwen3", (3 * 4 * 32, 0, 0)),
        ("gemma2", (2 * 4 * 32, 2 * 4 * 32, 4096)),
        ("gemma3", (0, 4 * 4 * 32, 4096)),
        ("mixtral", (3 * 64, 0, 0)),
    ],
)
def test_layers_attend_to_a_document_or_to_a_window(config_of, kind, expected):
    assert widths(config_of(kind)) == expected


def test_layers_that_compare_no_tokens_have_no_width(config_of):
    config = AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=2, vocab_size=50, state_size=4)
    assert widths(config)[0] == 0
    # Layers of Falcon-H1 and some of Zamba2 are both.
    hybrid = AutoConfig.for_model("falcon_h1", **SIZES, num_hidden_layers=2, mamba_d_ssm=32, mamba_n_heads=4)
    assert widths(hybrid) == (2 * 64, 0, 0)
    window = AutoConfig.for_model("mistral", **SIZES, num_key_value_heads=2, num_hidden_layers=2, sliding_window=16)
    assert widths(window) == (0, 2 * 64, 16)


def test_of_sizes_that_each_layer_has_the_largest_counts(tmp_path, monkeypatch):
    """Gemma 3n lists the inner sizes of its layers; the loader compares the same one."""
    monkeypatch.setattr(measure, "measuring", finding({}))
    sizes = SIZES | {"intermediate_size": [32, 48], "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    sizes |= {"vocab_size_per_layer_input": 50, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
    config = AutoConfig.for_model("gemma3n_text", **sizes, activation_sparsity_pattern=[0.0, 0.0])
    config.save_pretrained(tmp_path)
    found = measure.describe(tmp_path / "config.json", trust_remote_code=False)
    assert found["intermediate_size"] == 48 == largest(config.intermediate_size)
    assert (found["measured"]["per_layer_inputs"], found["measured"]["looked_up_parameters"]) == (2 * 8, 50 * 2 * 8)
