"""Rows that two ranks share, over gloo in fp32: the losses, gradients, validation and resume of whole rows."""

from __future__ import annotations

import json

import pytest

from tests.system.conftest import BIT_FOR_BIT, FIRST_STEPS, NUM_STEPS, ON_TWO_RANKS, ONE_THREAD
from tunebook.files import read_json
from tunebook.record.metrics import read_metrics

IN_A_GROUP = (*ON_TWO_RANKS, "parallelism.sequence_group_size=2")
# Architectures with norms of queries and keys, biases, partial rotary positions, windows, an image tower, and experts;
# qwen3 comes last
KINDS = ("llama", "gpt_neox", "phi3", "gemma3_text", "gemma3", "olmo2", "granite", "cohere", "qwen3_moe", "qwen3")
IN_SHORT_ROWS = ("packing.row_length=128", "training.micro_batch_size=2")  # several passes a step

PROGRAM = """
import json, sys
from types import SimpleNamespace
from tunebook.train.rank_process import RankEnd
end = RankEnd()
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl.trainer.utils import add_fused_lm_head
from contextlib import nullcontext
from tunebook.config.choices import Attention, Compute
from tunebook.model.varlen_attention import register
from tunebook.train import sequence
from tunebook.train.isolation import leaks, measure_isolation, tolerance
from tunebook.train.leak_probe import TrainingForward

torch.distributed.init_process_group("gloo")
def model_of(kind):
    sizes = dict(
        hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_hidden_layers=2, vocab_size=200, bos_token_id=0, eos_token_id=1, pad_token_id=1,
        **{"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2} if "moe" in kind else {},
    )
    if "vision_config" in CONFIG_MAPPING[kind].sub_configs:
        tower = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28)
        sizes = {"text_config": sizes, "vision_config": tower, "pad_token_id": 1}
    config = AutoConfig.for_model(kind, **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa_by_document", dtype=torch.float32)
    add_fused_lm_head(model)
    return model

whole = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)

def forward_of(model, collator, group):
    return TrainingForward(SimpleNamespace(
        model=model, model_wrapped=model, _prepare_inputs=lambda inputs: inputs, row_collator=collator,
        compute_loss_context_manager=nullcontext,
    ), group)

def gradient(model, collator, group):
    model.zero_grad()
    forward = forward_of(model, collator, group)
    outputs = forward._call(forward._inputs([list(range(40)), list(range(60, 100))]) | {"fused_lm_head": True})
    (-outputs.log_probs.sum() / 78).backward()
    gradients = (torch.zeros_like(one) if one.grad is None else one.grad for one in model.parameters())
    return torch.cat([one.flatten() for one in gradients])

run = SimpleNamespace(
    parallelism=SimpleNamespace(sequence_group_size=2), launcher=SimpleNamespace(timeout_s=60),
    attention=SimpleNamespace(implementation=Attention.sdpa_by_document),
)
group = sequence.join_sequence_group(run)
differences = {}
for kind in KINDS:
    register(Attention.sdpa_by_document)
    model = model_of(kind)
    alone = gradient(model, whole, None)
    sequence.attend_over_group(run, group, model.config)
    shared = group.summed(gradient(model, group.collator(whole), group))
    differences[kind] = ((shared - alone).norm() / alone.norm()).item()

def leaking(rows):
    batch = whole(rows)
    ends = batch["cu_seq_lens_q"][[0, -1]]
    return batch | {"cu_seq_lens_q": ends, "max_length_q": int(ends[-1])}

allowed = tolerance(Compute.fp32, uses_tf32=False)
collators = (group.collator(whole), group.collator(leaking))
with torch.no_grad():
    sound, leaky = (measure_isolation(forward_of(model, one, group), 200) for one in collators)
if group.rank == 0:
    print(json.dumps({"gradients": differences, "tokens": sound.tokens_together, "sees": allowed.sees_leaks(sound),
                      "sound": leaks(sound, allowed), "leaky": leaks(leaky, allowed)}))
torch.distributed.destroy_process_group()
end.leave(0)
"""

# A row of one document, since no kernel that keeps documents apart compiles on a CPU.
COMPILED = """
import json
from types import SimpleNamespace
from tunebook.train.rank_process import RankEnd
end = RankEnd()
import torch
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM
from tunebook.config.choices import Attention
from tunebook.model.blocks import compile_layers
from tunebook.train import sequence

torch.distributed.init_process_group("gloo")
run = SimpleNamespace(
    parallelism=SimpleNamespace(sequence_group_size=2), launcher=SimpleNamespace(timeout_s=60),
    attention=SimpleNamespace(implementation=Attention.sdpa),
)
config = AutoConfig.for_model(
    "qwen3", hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    num_hidden_layers=2, vocab_size=64, bos_token_id=0, eos_token_id=1, pad_token_id=1,
)
group = sequence.join_sequence_group(run)
sequence.attend_over_group(run, group, config)

def gradients(is_compiled, is_recomputed):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32).train()
    if is_recomputed:
        model.gradient_checkpointing_enable()
    if is_compiled:
        compile_layers(model, backend="aot_eager")
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    ids, places = (torch.arange(32)[None].chunk(2, dim=1)[group.rank] for _ in range(2))
    logits = model(input_ids=ids, position_ids=places, use_cache=False).logits[0]
    torch.nn.functional.cross_entropy(logits, (7 * ids[0] + 5) % 60).backward()
    return torch.cat([one.grad.full_tensor().flatten() for one in model.parameters()])

plain = gradients(False, False)
differences = [((gradients(True, one) - plain).norm() / plain.norm()).item() for one in (False, True)]
if group.rank == 0:
    print(json.dumps({"differences": differences, "compiled": torch._dynamo.utils.counters["stats"]["unique_graphs"],
                      "broken": dict(torch._dynamo.utils.counters["graph_break"])}))
torch.distributed.destroy_process_group()
end.leave(0)
"""


@pytest.fixture
def on_two(run_forked, tmp_path):
    """What rank 0 of a program prints as JSON."""

    def found(program):
        (tmp_path / "program.py").write_text(program)
        ended = run_forked([str(tmp_path / "program.py")], ranks=2)
        assert ended.exit_code == 0, ended.output
        return json.loads(next(line for line in ended.output.splitlines() if line.startswith("{")))

    return found


def test_compiled_blocks_exchange_their_rows_in_one_graph(on_two):
    found = on_two(COMPILED)
    assert max(found["differences"]) < 1e-6, found
    assert found["compiled"] >= 2 and not found["broken"]


def test_gradients_are_those_of_whole_rows_and_a_leak_is_seen(on_two):
    found = on_two(f"KINDS = {KINDS}\n{PROGRAM}")
    assert set(found["gradients"]) == set(KINDS)
    assert max(found["gradients"].values()) < 1e-5, found["gradients"]
    assert (found["tokens"], found["sees"], found["sound"]) == (78, True, [])
    assert len(found["leaky"]) == 3  # the other document's change, the document alone, the loss


@pytest.mark.parametrize(
    "strategy", ["zero3", pytest.param("ddp", marks=pytest.mark.slow), pytest.param("zero2", marks=pytest.mark.slow)]
)
def test_losses_of_every_strategy(train_once, one_rank, strategy):
    trained = train_once(FIRST_STEPS, *IN_A_GROUP, f"parallelism={strategy}")
    assert trained.losses == pytest.approx(one_rank.losses, rel=1e-5)
    found = read_json(trained.folder / "manifest.json")
    assert (found["parallelism_found"]["strategy"], found["parallelism_found"]["sequence_group_size"]) == (strategy, 2)
    assert found["leak_probe"]["checked"] and found["leak_probe"]["tokens_together"] == 78
    batch = read_json(trained.folder / "plan.json")["batch"]
    assert (batch["world_size"], batch["sequence_group_size"], batch["rows_per_step"]) == (2, 2, 1)


@pytest.mark.slow
def test_two_groups_accumulate_and_recompute(train_once, one_rank):
    words = ("hardware=cpu", "hardware.gpus_per_node=4", "parallelism.sequence_group_size=2", "parallelism=ddp")
    trained = train_once(FIRST_STEPS, *words, *IN_SHORT_ROWS, "activation=checkpointing")
    batch = read_json(trained.folder / "plan.json")["batch"]
    assert batch["rows_per_step"] == 2 * batch["accumulation"] * 2 and batch["accumulation"] > 1
    assert trained.losses == pytest.approx(one_rank.losses, rel=1e-5)
    alone, shared = (read_metrics(one.folder)[-1] for one in (one_rank, trained))
    assert [shared[key] for key in ("tokens_seen", "documents_seen")] == [
        alone[key] for key in ("tokens_seen", "documents_seen")
    ]


@pytest.mark.parametrize(
    "words",
    [
        ("parallelism=ddp",),
        pytest.param(("parallelism=zero3", "parallelism.sequence_group_size=2"), marks=pytest.mark.slow),
        pytest.param(("parallelism=zero2", *IN_SHORT_ROWS), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_tiled_mlps_train_as_whole_ones(train_once, one_rank, words):
    trained = train_once(FIRST_STEPS, *ON_TWO_RANKS, *words, "activation.mlp_tile_tokens=100")
    assert trained.losses == pytest.approx(one_rank.losses, rel=1e-5)
    choices = read_json(trained.folder / "plan.json")["choices"]
    assert [each["value"] for each in choices if each["key"] == "activation.checkpointing"] == ["enabled"]


def test_validation_and_resume(train_once):
    words = (*BIT_FOR_BIT, "training.save_every_steps=10", "dataset.validation_share=0.05")
    alone = train_once(*words, "parallelism=single", "hardware=cpu")
    words = (*words, *IN_A_GROUP, "parallelism=ddp")
    whole = train_once(*words, **ONE_THREAD)
    assert whole.losses == pytest.approx(alone.losses, rel=1e-5)
    validated, of_whole = ([line for line in read_metrics(one.folder) if "validation_loss" in line][-1]
                           for one in (whole, alone))  # fmt: skip
    assert validated["validation_tokens"] == of_whole["validation_tokens"] > 0
    assert validated["validation_loss"] == pytest.approx(of_whole["validation_loss"], rel=1e-5)
    resume = f"training.resume={whole.folder / 'checkpoints' / 'checkpoint-10'}"
    resumed = train_once(*(word for word in words if not word.startswith("training.resume")), resume, **ONE_THREAD)
    assert resumed.losses == whole.losses[10:] and len(resumed.losses) == NUM_STEPS - 10
