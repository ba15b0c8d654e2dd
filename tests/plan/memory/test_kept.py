"""What layers keep more or less than was traced, against the tensors that autograd really saves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from tunebook.config.choices import (
    Attention,
    Checkpointing,
    Compute,
    MasterWeights,
    MixedPrecision,
    PackingMode,
    PeftMethod,
    Strategy,
)
from tunebook.config.schema import FsdpConfig, ParallelismConfig, ZeroConfig
from tunebook.model.varlen_attention import register
from tunebook.plan.memory import estimate_memory
from tunebook.plan.memory.kept import kept_by_one_layer, tokens_per_pass
from tunebook.plan.memory.ledger import Moment
from tunebook.plan.memory.rows import step_ledger

from ..plans import resolved
from .layers import measured
from .live_tensors import NUM_HEADS, SMALL, Way, saved_by_a_layer
from .live_tensors import TOKENS as LIVE_TOKENS

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
TOKENS, RANK = 40, 4  # like no size of a weight, by which those are told apart
SIZES = {
    "hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32
}  # fmt: skip
OF_LIVE_TENSORS = {
    "hidden_size": SMALL[0], "intermediate_size": SMALL[1], "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_HEADS,
}  # fmt: skip
# Small things that the estimate leaves out: the logarithm of each softmax's sum, a scale per norm, adapters' middles.
NOT_COUNTED = 4 * SIZES["num_attention_heads"] + 2 * 4


def saved_bytes(
    num_layers, *, weights, is_mixed, attention="sdpa", is_adapter=False, dropout=0.0,
    targets="all-linear", are_adapters_cast=False,
):  # fmt: skip
    """Bytes of what autograd saves of two documents of half a row each, copies of weights left out."""
    register(Attention.sdpa_by_document)
    config = AutoConfig.for_model("qwen2", num_hidden_layers=num_layers, tie_word_embeddings=True, **SIZES)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=weights)
    decoder = model.base_model
    if is_adapter:
        lora = LoraConfig(r=RANK, target_modules=targets, lora_dropout=dropout, task_type="CAUSAL_LM")
        wrapped = get_peft_model(model, lora, autocast_adapter_dtype=not are_adapters_cast)
        wrapped.enable_input_require_grads()
        decoder = wrapped.base_model.model.model
    decoder.train()
    of_weights = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
    shapes = {shape for one in decoder.parameters() for shape in (tuple(one.shape), tuple(reversed(one.shape)))}
    saved = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in of_weights and tuple(tensor.shape) not in shapes:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    half = torch.arange(TOKENS // 2)
    row = {"input_ids": torch.randint(0, 32, (1, TOKENS)), "position_ids": torch.cat([half, half])[None]}
    if attention == Attention.sdpa_by_document.value:
        row |= {"cu_seq_lens_q": torch.tensor([0, TOKENS // 2, TOKENS]), "max_length_q": TOKENS // 2}
    mixed = torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_mixed)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), mixed:
        decoder(**row, use_cache=False)
    return sum(size for size, _ in saved.values())


KEPT = 10_000  # bytes of each token: what is compared are differences
MODES = [
    f"{form}/{method}/{kernel}"
    for form in ("fp32", "autocast", "bf16")
    for method in ("full", "adapter", "dropout")
    for kernel in ("sdpa", "flash", "eager", "compiled", "selective")
]


def sized(config, sizes=SIZES, layers=None):
    """The configuration's facts, with linear layers of these sizes."""
    facts = config.model.facts
    for key, value in sizes.items():
        setattr(facts, key, value)
    hidden, inner = facts.hidden_size, facts.intermediate_size
    keys = hidden * facts.num_key_value_heads // facts.num_attention_heads
    layers = layers or {
        "q_proj": (hidden, hidden), "k_proj": (hidden, keys), "v_proj": (hidden, keys), "o_proj": (hidden, hidden),
        "gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden),
    }  # fmt: skip
    number = facts.num_layers
    facts.measured = measured(
        num_layers=number, linear_inputs=number * sum(inputs for inputs, _ in layers.values()),
        adapters={name: [number * inputs, number * outputs] for name, (inputs, outputs) in layers.items()},
        saved={mode: [0, number * KEPT, 0, 0, KEPT, 0] for mode in MODES},
        saved_without_autocast={f"cast/{mode}": [0, number * KEPT, 0, 0, KEPT, 0] for mode in ("adapter/sdpa",)},
    )  # fmt: skip
    return facts


def layer_bytes_per_token(config, facts):
    """What one layer keeps of a token."""
    return kept_by_one_layer(config, facts) / tokens_per_pass(config)


CASES = {
    "autocast": (Compute.bf16, MasterWeights.fp32, Attention.sdpa, PeftMethod.full),
    "fp32": (Compute.fp32, MasterWeights.fp32, Attention.sdpa, PeftMethod.full),
    "by_document": (Compute.bf16, MasterWeights.fp32, Attention.sdpa_by_document, PeftMethod.full),
    "by_document_fp32": (Compute.fp32, MasterWeights.fp32, Attention.sdpa_by_document, PeftMethod.full),
    "all_bf16": (Compute.bf16, MasterWeights.bf16, Attention.sdpa, PeftMethod.full),
    "lora": (Compute.bf16, MasterWeights.fp32, Attention.sdpa, PeftMethod.lora),
    "lora_on_bf16": (Compute.bf16, MasterWeights.bf16, Attention.sdpa, PeftMethod.lora),
}


TARGETS = {
    "attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "two": ["q_proj", "v_proj"],
    "output": ["o_proj"],
    "feed_forward": ["gate_proj", "up_proj", "down_proj"],
    "gate": ["gate_proj"],
    "down": ["down_proj"],
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize(
    ("compute", "weights", "is_cast"),
    [
        (Compute.bf16, torch.float32, False),
        (Compute.bf16, torch.bfloat16, False),
        (Compute.fp32, torch.float32, False),
        (
            Compute.bf16,
            torch.bfloat16,
            True,
        ),  # FSDP gathers adapters in bf16: those that read one norm share its output
    ],
    ids=["autocast", "bf16", "fp32", "fsdp"],
)
def test_products_without_an_adapter_keep_no_input(sound, targets, compute, weights, is_cast):
    """The difference to an adapter on all seven, the middles of adapters left out."""
    sound.precision.compute, sound.peft.method, sound.peft.dropout = compute, PeftMethod.lora, 0.0
    sound.precision.master_weights = MasterWeights.bf16 if weights is torch.bfloat16 else MasterWeights.fp32
    sound.attention.implementation, sound.packing.row_length = Attention.sdpa, TOKENS
    if is_cast:
        sound.parallelism = FsdpConfig(strategy=Strategy.fsdp)
    facts, saved, planned = sized(sound), {}, {}
    is_mixed = compute is Compute.bf16 and not is_cast
    options = {"weights": weights, "is_mixed": is_mixed, "is_adapter": True, "are_adapters_cast": is_cast}
    for chosen in (TARGETS[targets], []):
        sound.peft.target_modules = chosen
        two, three = (saved_bytes(number, targets=chosen or "all-linear", **options) for number in (2, 3))
        middles = RANK * (len(chosen) or 7) * (4 if compute is Compute.fp32 else 2)
        saved[bool(chosen)] = (three - two) / TOKENS - middles
        planned[bool(chosen)] = layer_bytes_per_token(sound, facts)
    less = saved[True] - saved[False]
    assert less == planned[True] - planned[False]
    assert less < 0 or (is_cast and less == 0)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("case", ["autocast", "fp32", "all_bf16", "lora", "lora_fp32"])
@pytest.mark.parametrize("dropout", [0.0, 0.05])
def test_zero3s_own_product_keeps_inputs_as_they_are(sound, monkeypatch, case, dropout):
    """What it keeps more than torch's: on a CPU the rest of a dropout is larger, and the same with both."""
    cases = CASES | {"lora_fp32": (Compute.fp32, MasterWeights.fp32, Attention.sdpa, PeftMethod.lora)}
    compute, master, _, method = cases[case]
    sound.precision.compute, sound.precision.master_weights = compute, master
    sound.peft.method, sound.peft.dropout = method, dropout
    sound.attention.implementation, sound.packing.row_length = Attention.sdpa, TOKENS
    facts = sized(sound)
    options = {
        "weights": torch.bfloat16 if master is MasterWeights.bf16 else torch.float32,
        "is_mixed": compute is Compute.bf16,
        "is_adapter": method is PeftMethod.lora,
        "dropout": dropout,
    }
    usual, planned = {}, {}
    for strategy in (Strategy.ddp, Strategy.zero3):
        sound.parallelism = ParallelismConfig(strategy=strategy)
        if strategy is Strategy.zero3:
            monkeypatch.setattr(torch.nn.functional, "linear", zero3_linear_wrap)
        usual[strategy] = saved_bytes(3, **options) - saved_bytes(2, **options)
        planned[strategy] = layer_bytes_per_token(sound, facts) * TOKENS
    assert usual[Strategy.zero3] - usual[Strategy.ddp] == planned[Strategy.zero3] - planned[Strategy.ddp]


FORMATS = [(MasterWeights.fp32, torch.float32), (MasterWeights.bf16, torch.bfloat16)]


HIDDEN, INNER = SMALL
WIDE_HEADS = 2 * HIDDEN // NUM_HEADS  # all heads together are twice as wide as the hidden size
KINDS = {  # inputs and outputs of linear layers, and the size of a head
    "llama": (None, HIDDEN // NUM_HEADS),
    "phi3": (
        {"qkv_proj": (HIDDEN, 3 * HIDDEN), "o_proj": (HIDDEN, HIDDEN), "gate_up_proj": (HIDDEN, 2 * INNER),
         "down_proj": (INNER, HIDDEN)}, None,
    ),
    "wide heads": (
        {"q_proj": (HIDDEN, 2 * HIDDEN), "k_proj": (HIDDEN, 2 * HIDDEN), "v_proj": (HIDDEN, 2 * HIDDEN),
         "o_proj": (2 * HIDDEN, HIDDEN), "gate_proj": (HIDDEN, INNER), "up_proj": (HIDDEN, INNER),
         "down_proj": (INNER, HIDDEN)}, WIDE_HEADS,
    ),
}  # fmt: skip


def sized_as_followed(config, name):
    """The facts of a model of `KINDS`, its kind and the size of a head."""
    layers, head_size = KINDS[name]
    facts = sized(config, OF_LIVE_TENSORS, layers)
    if head_size is not None:
        facts.measured.attention_width = facts.num_layers * NUM_HEADS * head_size
    return facts, {"kind": "phi3" if name == "phi3" else "llama", "head_size": head_size}


@pytest.mark.parametrize("dropout", [0.0, 0.05])
@pytest.mark.parametrize(("master", "weights"), FORMATS, ids=["autocast", "bf16"])
@pytest.mark.parametrize("name", KINDS)
def test_zero3s_own_product_where_products_are_fused_or_heads_are_wide(
    sound, monkeypatch, name, master, weights, dropout
):
    """Phi-3 has one for query, key and value, and one for gate and up; each missing one is as many bytes less as an
    input has in bf16, or more where torch's product keeps a copy for each. Over bf16 weights nothing is cast."""
    sound.precision.master_weights, sound.peft.method, sound.peft.dropout = master, PeftMethod.lora, dropout
    facts, model = sized_as_followed(sound, name)
    way, usual, planned = Way(weights=weights, is_adapter=True, dropout=dropout), {}, {}
    for strategy in (Strategy.ddp, Strategy.zero3):
        sound.parallelism = ParallelismConfig(strategy=strategy)
        if strategy is Strategy.zero3:
            monkeypatch.setattr(torch.nn.functional, "linear", zero3_linear_wrap)
            if master is MasterWeights.bf16:  # DeepSpeed casts the adapters, too
                way = replace(way, adapters=torch.bfloat16, is_mixed=False)
        usual[strategy], _ = saved_by_a_layer(way, **model)
        planned[strategy] = layer_bytes_per_token(sound, facts)
    assert usual[Strategy.zero3] - usual[Strategy.ddp] == planned[Strategy.zero3] - planned[Strategy.ddp]


@pytest.mark.parametrize("name", KINDS)
def test_zero3_that_casts_the_whole_model_keeps_inputs_once(sound, monkeypatch, name):
    """Of a norm for all that read it, and of the attention none but its kernel's: as autocast less a copy for each."""
    sound.precision.master_weights, sound.peft.method, sound.peft.dropout = MasterWeights.bf16, PeftMethod.lora, 0.0
    facts, model = sized_as_followed(sound, name)
    autocast = Way(weights=torch.bfloat16, is_adapter=True)
    cast = replace(autocast, adapters=torch.bfloat16, is_mixed=False)
    usual, planned = saved_by_a_layer(autocast, **model)[0], layer_bytes_per_token(sound, facts)
    sound.parallelism = ZeroConfig(strategy=Strategy.zero3, mixed_precision=MixedPrecision.cast)
    monkeypatch.setattr(torch.nn.functional, "linear", zero3_linear_wrap)
    assert saved_by_a_layer(cast, **model)[0] - usual == layer_bytes_per_token(sound, facts) - planned < 0


COMPILED = [  # what is kept in autocast, and what of an adapter on all seven is not: of each hidden and inner number
    ((), "compiled", (20, 6), (0, 0)),
    (("q_proj", "k_proj", "v_proj", "o_proj"), "compiled", (18, 4), (2, 2)),
    (("q_proj", "v_proj"), "compiled", (16, 4), (4, 2)),
    (("gate_proj", "up_proj", "down_proj"), "compiled", (16, 6), (4, 0)),
    ((), "selective", (16, 4), (0, 0)),
    (("q_proj", "k_proj", "v_proj", "o_proj"), "selective", (16, 4), (0, 0)),
]


@pytest.mark.usefixtures("own_compiler")
@pytest.mark.parametrize(("targets", "compiled", "expected", "less"), COMPILED)
@pytest.mark.parametrize(
    ("master", "weights"), [FORMATS[0], pytest.param(*FORMATS[1], marks=pytest.mark.nightly)], ids=["autocast", "bf16"]
)
def test_compiled_layers_keep_no_input_of_products_without_an_adapter(
    sound, targets, compiled, expected, less, master, weights
):
    """As torch's partitioner divides them; those that compute some of it again keep none of these inputs anyway.

    Left out are sums of each softmax, a scale per norm, the adapters' middles, and where two documents begin and end.
    """
    sound.model.compile_layers, sound.attention.implementation = True, Attention.varlen_attention
    sound.precision.master_weights, sound.peft.method, sound.peft.dropout = master, PeftMethod.lora, 0.0
    if compiled == "selective":
        sound.activation.checkpointing = Checkpointing.selective
    facts = sized(sound, OF_LIVE_TENSORS)
    everywhere = layer_bytes_per_token(sound, facts)
    sound.peft.target_modules = list(targets)
    assert everywhere - layer_bytes_per_token(sound, facts) == of_numbers(facts, *less)
    kept, _ = saved_by_a_layer(Way(weights=weights, is_adapter=True, targets=targets), compiled=compiled)
    left_out = 4 * facts.num_attention_heads + 2 * 4 + 2 * (len(targets) or 7) + 16 / LIVE_TOKENS
    hidden, inner = expected
    if master is MasterWeights.bf16:
        hidden -= 2  # of what goes into the layer
    assert kept - left_out == pytest.approx(of_numbers(facts, hidden, inner), rel=1e-9)


def of_numbers(facts, hidden, inner):
    return hidden * facts.hidden_size + inner * facts.intermediate_size


@pytest.mark.parametrize(
    ("budget", "accumulates"), [(None, True), (4 * 2048, True), (2 * 2048, False)], ids=["documents", "two", "one"]
)
def test_gradients_of_earlier_passes_are_there_unless_one_pass_is_a_whole_step(sound, budget, accumulates):
    sound.hardware.gpus_per_node, sound.parallelism = 2, ParallelismConfig(strategy=Strategy.ddp)
    sound.training.global_samples, sound.training.global_tokens = None if budget else 64, budget
    facts = sound.model.facts
    assert estimate_memory(sound, facts) == estimate_memory(sound, facts, accumulates=accumulates)
    assert estimate_memory(sound, facts, accumulates=True) != estimate_memory(sound, facts, accumulates=False)


@pytest.mark.parametrize(
    ("mode", "micro", "row", "samples", "accumulates"),
    [
        (PackingMode.isolated, 1, 2048, 2, False),  # a row each
        (PackingMode.isolated, 1, 2048, 3, True),
        (PackingMode.isolated, 1, None, 2, False),  # a row is as long as a document
        (PackingMode.isolated, 3, 5 * 2048 - 1, 2 * 3 * 4, False),  # four of the longest in each of six rows
        (PackingMode.isolated, 3, 5 * 2048 - 1, 2 * 3 * 4 + 1, True),
        (PackingMode.padded, 3, None, 6, False),
        (PackingMode.padded, 3, None, 12, True),
        (PackingMode.padded, None, None, 2, False),
    ],
)
def test_a_step_whose_documents_fit_into_one_pass_has_no_earlier_gradients(
    sound, mode, micro, row, samples, accumulates
):
    sound.hardware.gpus_per_node, sound.parallelism = 2, ParallelismConfig(strategy=Strategy.ddp)
    sound.training.max_length, sound.training.micro_batch_size, sound.training.global_samples = 2048, micro, samples
    sound.packing.mode, sound.packing.row_length = mode, row
    facts = sound.model.facts
    assert estimate_memory(sound, facts) == estimate_memory(sound, facts, accumulates=accumulates)


@pytest.mark.parametrize(
    ("is_one_pass", "master", "expected"),
    [  # tiles and a copy of the weight, in bytes of a number
        (False, MasterWeights.fp32, 4096 * 32768 * 2 + 32768 * 896 * 2),
        (True, MasterWeights.fp32, 4096 * 151_936 * 2 + 151_936 * 896 * 2),
        (True, MasterWeights.bf16, 4096 * 151_936 * 2),  # the weight is what is computed with
    ],
)
def test_the_output_heads_tiles(sound, is_one_pass, master, expected):
    sound.model.one_pass_head, sound.precision.master_weights = is_one_pass, master
    sound.packing.row_length = 8192
    there = step_ledger(sound, sound.model.facts, accumulates=False).at(Moment.head)
    found = {row.label: row.num_bytes for row in there}
    assert found["a tile of logits"] + found.get("cast weight of the head", 0) == expected
    assert found["last norm"] == 16 * 8192 * 896
    assert found["gradient of the head in fp32"] == 4 * 151_936 * 896


def test_the_peak_of_a_run_with_full_rows_on_an_h200():
    """Recorded with the run: Qwen2.5-0.5B, one GPU, bf16 autocast, sdpa, rows of 4,096 tokens."""
    lines = map(json.loads, (RESULTS / "h200_qwen05b_single.jsonl").read_text().splitlines())
    (run,) = [line for line in lines if line["name"] == "single"]
    config = resolved(run["recipe"], *run["overrides"], "model.one_pass_head=false", "hardware=hopper")
    assert config.packing.row_length == 4096
    assert config.model.facts is not None
    estimate = estimate_memory(config, config.model.facts)
    assert estimate.total_gib == pytest.approx(max(run["memory_gib"]), rel=0.02)


@pytest.mark.parametrize(
    ("kernel", "strategy", "expected"),
    [
        (Attention.varlen_attention, Strategy.single, 100),
        (Attention.varlen_attention_4, Strategy.fsdp, 100),
        (Attention.eager, Strategy.single, 700),  # compiled layers were traced with torch's kernel for packed rows
        (Attention.varlen_attention, Strategy.zero3, 100 + 2 * 896),  # whose hooks cut layers into pieces
    ],
)
def test_compiled_layers_count_only_as_they_were_traced(sound, kernel, strategy, expected):
    saved = {"autocast/full/compiled": 100, "autocast/full/flash": 300, "autocast/full/eager": 700}
    facts = sound.model.facts
    facts.measured = measured(
        num_layers=facts.num_layers, saved={mode: [0, each, 0, 0, each, 0] for mode, each in saved.items()}
    )
    sound.model.compile_layers, sound.attention.implementation = True, kernel
    sound.parallelism.strategy = strategy
    assert kept_by_one_layer(sound, facts) == pytest.approx(expected * tokens_per_pass(sound))
