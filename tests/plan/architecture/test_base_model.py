"""What is read from a model's config.json, and what is no model's."""

from __future__ import annotations

import json

import pytest

from tunebook.config.choices import Weights
from tunebook.config.model_facts import ModelFacts, facts_of_hub_name
from tunebook.config.schema import ModelConfig
from tunebook.errors import RequestError
from tunebook.model import base_config
from tunebook.model.base_config import (
    ENCODER_DECODERS,
    ENCODERS,
    read_dtype,
    read_quantizer,
    why_not_causal,
)
from tunebook.plan.architecture import base_model
from tunebook.plan.architecture.base_model import read_facts

from ..memory.layers import measured as traced

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float16", "num_hidden_layers": 2,
    "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


BY_BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True}
BY_GPTQ = {"quant_method": "gptq", "bits": 4}


@pytest.fixture
def model(tmp_path):
    """`model(hidden_size=0)`, `model(text="{")`: a model in a folder whose config.json says this."""

    def make(text=None, **changes):
        stated = {key: value for key, value in (LLAMA | changes).items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(stated) if text is None else text)
        return ModelConfig(path=str(tmp_path), weights=Weights.random)

    return make


@pytest.fixture
def built(monkeypatch):
    """The files for which a model would have been built on the meta device."""
    files = []
    monkeypatch.setattr(base_model, "trace_file", lambda file, **_: files.append(file))
    return files


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]},
        {"head_dim": 8},
        {"architectures": ["LlamaModel"]},
        {"model_type": "mistral", "num_key_value_heads": None},  # its default is a number, not that of the heads
        {"intermediate_size": [16, 32], "model_type": "decilm"},  # one for each layer
        {"max_position_embeddings": None},
        {"quantization_config": BY_BITSANDBYTES, "model_type": "qwen3"},
    ],
    ids=str,
)
def test_what_is_not_in_the_book_is_traced_on_the_meta_device(model, built, tmp_path, changes):
    assert read_facts(model(**changes)) is None
    assert built == [tmp_path / "config.json"]


def test_the_quickstarts_own_model_needs_no_trace():
    """Its config.json is known by its content, wherever it lies."""
    facts = read_facts(ModelConfig(path="book:recipes/quickstart/model", weights=Weights.random))
    assert facts is not None and facts.measured is not None and facts.measured.is_of_the_book


def test_facts_of_a_group_file_are_believed(built, monkeypatch):
    monkeypatch.setattr(base_model, "trace_stated", lambda facts, **_: None)
    facts = ModelFacts(architecture="XForCausalLM")
    assert read_facts(ModelConfig(name="organization/model", facts=facts)) is facts
    assert built == []


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_config": BY_GPTQ},
        {"quantization_config": BY_GPTQ, "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]},
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"},
    ],
    ids=str,
)
def test_nothing_is_built_of_what_a_rule_refuses(model, built, changes):
    named = model(**changes)
    named.weights = Weights.pretrained
    assert read_facts(named) is None
    assert built == []


FOUND = ModelFacts(architecture="XForCausalLM", num_parameters=1)
UNSTATED = (
    {"num_hidden_layers": None}, {"vocab_size": None}, {"vocab_size": None, "num_hidden_layers": None},
    {"model_type": "chatglm", "vocab_size": None, "padded_vocab_size": 65_024},
)  # fmt: skip


@pytest.mark.parametrize("changes", UNSTATED, ids=str)
def test_sizes_that_are_left_to_transformers_are_asked_of_it(model, monkeypatch, changes):
    monkeypatch.setattr(base_model, "trace_file", lambda file, **_: FOUND)
    assert read_facts(model(**changes)) is FOUND


@pytest.mark.parametrize("changes", UNSTATED, ids=str)
def test_sizes_that_nobody_can_be_asked_for_are_named(model, built, changes):
    unstated = " and no ".join(sorted({"num_hidden_layers", "vocab_size"} & changes.keys()))
    said = rf"config\.json states no {unstated}, and transformers, .* or type: pip install"
    with pytest.raises(RequestError, match=said) as caught:
        read_facts(model(**changes))
    assert (caught.value.problem_id, caught.value.exit_code) == ("model-config", 2)


def test_an_architecture_that_transformers_has_not_is_refused_however_few_sizes_it_states(model, monkeypatch, tmp_path):
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path))
    with pytest.raises(RequestError, match="has no causal language model of this architecture: model_type=chatglm9"):
        read_facts(model(model_type="chatglm9", architectures=["ChatGLMModel"], vocab_size=None))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"config\.json cannot be read as JSON .*; download or copy the model again"),
        ('{"model_type": "llama", "hid', r"cannot be read as JSON \(Unterminated string"),
        ("[" * 100_000, "cannot be read as JSON"),
        ("[1, 2]", r"holds no JSON object, so it is no model's config\.json; name the model's own folder"),
        ('"llama"', "holds no JSON object"),
        ('{"model_type": "x", "text_config": 3}', "holds no JSON object"),
        ("{}", "names neither model_type nor architectures"),
    ],
    ids=["empty", "cut", "deep", "list", "text", "language part", "nothing"],
)
def test_a_file_that_is_no_config(model, built, text, said):
    with pytest.raises(RequestError, match=said) as caught:
        read_facts(model(text=text))
    assert (caught.value.problem_id, caught.value.exit_code, built) == ("model-config", 2, [])


def test_a_file_that_is_no_text(model, tmp_path):
    named = model()
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RequestError, match="cannot be read as JSON"):
        read_facts(named)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 0}, "says hidden_size=0, and a model has at least 1; correct the file"),
        ({"vocab_size": -32}, "says vocab_size=-32, and a model has at least 2"),
        ({"max_position_embeddings": 1}, "says max_position_embeddings=1, and a model has at least 2"),
        ({"hidden_size": 10**12}, "says hidden_size=1000000000000, and no model has more than 100000000"),
        (
            {"hidden_size": 10**7, "intermediate_size": 10**8, "num_hidden_layers": 60},
            r"says sizes that together make at least 6\.6e16 parameters, and no model has more than 1e15; correct",
        ),
        ({"hidden_size": 16.5}, "says hidden_size=16.5, which is not an integer"),
        ({"hidden_size": "16"}, 'says hidden_size="16", which is not an integer'),
        ({"num_hidden_layers": True}, "says num_hidden_layers=true, which is not an integer"),
        ({"num_hidden_layers": -3}, "says num_hidden_layers=-3, and a model has at least 1"),
        ({"num_hidden_layers": None, "n_layer": 0}, "says n_layer=0, and a model has at least 1"),
        (
            {"hidden_size": None, "n_embd": 18, "num_attention_heads": None, "n_head": 4},
            "says n_embd=18 and n_head=4, which does not divide it",
        ),
        ({"intermediate_size": float("nan")}, "says intermediate_size=NaN, which is not an integer"),
        ({"num_attention_heads": 3}, "hidden_size=16 and num_attention_heads=3, which does not divide it, and no head"),
        (
            {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 20},
            "says num_experts_per_tok=20 and num_local_experts=8: a token cannot be sent to more experts than there",
        ),
        (
            {"text_config": LLAMA | {"n_routed_experts": 4, "num_experts_per_tok": 5}},
            "says num_experts_per_tok=5 and n_routed_experts=4",
        ),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 and num_key_value_heads=3, which does not divide them"),
    ],
    ids=lambda case: "-".join(case) if isinstance(case, dict) else "",
)
def test_sizes_that_no_model_has(model, built, changes, said):
    with pytest.raises(RequestError, match=said) as caught:
        read_facts(model(**changes))
    assert (caught.value.problem_id, built) == ("model-config", [])


@pytest.mark.parametrize("experts", [0, 1, 2, None, [2, 4]], ids=str)
def test_a_dense_model_may_name_experts_too(model, built, experts):
    read_facts(model(num_experts=experts, num_experts_per_tok=2))
    assert len(built) == 1


def test_heads_of_a_stated_size_need_not_divide(model, built):
    assert read_facts(model(num_attention_heads=3, num_key_value_heads=3, head_dim=8)) is None
    assert len(built) == 1


def test_weights_of_no_stated_format_are_fp32_as_transformers_has_it(model, built):
    named = model(dtype=None)
    read_facts(named)
    assert read_dtype(named) == "float32" and len(built) == 1


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "torch.bfloat16", 5])
def test_weights_of_an_unknown_format_are_refused(model, built, dtype):
    with pytest.raises(RequestError, match=f'dtype="?{dtype}"?, and weights are trained from float32, float16, bfl'):
        read_facts(model(dtype=None, torch_dtype=dtype))
    assert built == []


def test_the_format_may_be_stated_with_the_language_part(model, built):
    assert read_dtype(model(dtype=None, text_config={"dtype": "bfloat16"})) == "bfloat16"
    quantized = model(dtype="float8_e4m3fn", quantization_config={"quant_method": "fp8"})
    quantized.weights = Weights.pretrained
    assert read_facts(quantized) is None and built == []  # a rule says more


@pytest.mark.parametrize(
    ("stated", "quantizer"),
    [
        ({}, None),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "bitsandbytes_4bit"),
        ({"quantization_config": {"load_in_8bit": True}}, "bitsandbytes_8bit"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "fp8"),
    ],
    ids=str,
)
def test_what_quantized_the_weights(model, stated, quantizer):
    assert read_quantizer(model(**stated)) == quantizer


def test_a_config_that_cannot_be_read_says_nothing_of_quantization(model):
    assert read_quantizer(model(text="{")) is None
    assert read_quantizer(ModelConfig(path="not/there")) is None


def test_the_cache_is_not_asked_for_more_than_the_facts_of_a_group_file(monkeypatch):
    for module in (base_config, base_model):
        monkeypatch.setattr(module, "config_file", lambda _: pytest.fail("asked"))
    layers = traced(is_of_the_book=True)
    named = ModelConfig(name="organization/model", facts=ModelFacts(architecture="XForCausalLM", measured=layers))
    assert read_quantizer(named) is None and why_not_causal(named) is None


def test_the_cache_is_asked_where_the_layers_were_measured(model, monkeypatch, tmp_path):
    model(quantization_config={"quant_method": "gptq"})
    for module in (base_config, base_model):
        monkeypatch.setattr(module, "config_file", lambda _: tmp_path / "config.json")
    facts = ModelFacts(architecture="LlamaForCausalLM", measured=traced())
    assert read_quantizer(ModelConfig(name="organization/model", facts=facts)) == "gptq"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, "is made for sequence classification, not to continue"),
        ({"architectures": "LlamaForSequenceClassification"}, "is made for sequence classification, not to continue"),
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "BertForMaskedLM is made for masked LM"),
        ({"architectures": ["BertModel"], "model_type": "bert"}, "BertModel is an encoder: its attention looks both"),
        ({"architectures": ["BertLMHeadModel"], "model_type": "bert"}, "BertLMHeadModel is an encoder"),
        ({"architectures": None, "model_type": "roberta"}, "roberta is an encoder"),
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "T5ForConditionalGeneration is an enc"),
        ({"architectures": None, "model_type": "mt5"}, "mt5 is an encoder-decoder: it reads all of a text before"),
        ({"architectures": None, "model_type": "kimi_k25"}, "kimi_k25 is a model of images or sound and text: Auto"),
        ({"architectures": ["Qwen3VLTextModel"], "model_type": "qwen3_vl_text"}, "is a model without an output head"),
        ({"architectures": ["BertLMHeadModel"], "model_type": "bert", "is_decoder": True}, None),
        ({}, None),
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, None),
        ({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}, None),
        ({"architectures": "LlamaForCausalLM"}, None),
        ({"architectures": []}, None),
    ],
    ids=str,
)
def test_only_what_continues_a_text_is_causal(model, changes, said):
    found = why_not_causal(model(**changes))
    assert found is None if said is None else said in found


def test_code_of_its_own_decides_what_a_model_is_for(model):
    named = model(architectures=["XForReward"], auto_map={"AutoModelForCausalLM": "modeling_x.XForReward"})
    assert why_not_causal(named) is not None
    named.trust_remote_code = True
    assert why_not_causal(named) is None


def test_no_encoder_that_transformers_has_a_causal_head_for_is_forgotten():
    """By what they say of themselves: they are no decoders, and are trained on masked words."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )

    both = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() & MODEL_FOR_MASKED_LM_MAPPING_NAMES.keys()
    assert both - MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.keys() == ENCODERS - {"bert-generation", "xlnet"}
    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() >= ENCODERS


def test_an_encoder_decoder_is_one_that_transformers_has_no_causal_head_for():
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )

    assert MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.keys() >= ENCODER_DECODERS
    assert not MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() & ENCODER_DECODERS


@pytest.mark.parametrize("table", [base_config._CAUSAL, *base_config._OTHER_KINDS])
def test_the_classes_of_transformers_are_read_from_its_source(table):
    from transformers.models.auto import modeling_auto

    imported = vars(modeling_auto)[table].items()
    expected = {name: [found] if isinstance(found, str) else list(found) for name, found in imported}
    assert base_config._auto_classes(table) == expected


def test_without_transformers_no_class_is_refused(model, monkeypatch):
    monkeypatch.setattr(base_config, "_auto_classes", lambda _: {})
    assert why_not_causal(model(architectures=None, model_type="kimi_k25")) is None


def test_a_model_that_a_rule_refuses_is_not_traced(model, built):
    assert read_facts(model(architectures=None, model_type="kimi_k25")) is None and built == []


@pytest.mark.parametrize(
    ("changes", "is_known"),
    [({}, True), ({"max_position_embeddings": None}, True), ({"num_hidden_layers": 35}, False)],
    ids=str,
)
def test_without_torch_a_cached_model_of_the_book_has_the_books_facts(built, monkeypatch, tmp_path, changes, is_known):
    """Its config.json is in the hub cache, and nothing can trace it; a file of other sizes is another model's."""
    _, facts = facts_of_hub_name("Qwen/Qwen3-4B")
    names = {"num_layers": "num_hidden_layers"}
    sizes = {names.get(name, name): getattr(facts, name) for name in base_model._NAMES}
    stated = LLAMA | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]} | sizes | changes
    file = tmp_path / "config.json"
    file.write_text(json.dumps(stated))
    monkeypatch.setattr(base_model, "config_file", lambda _: file)
    monkeypatch.setattr(base_model, "read_config", lambda _: json.loads(file.read_text()))
    found = read_facts(ModelConfig(name="Qwen/Qwen3-4B"))
    assert built == [file], "torch would trace it"
    assert found == (facts if is_known else None)
