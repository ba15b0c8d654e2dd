"""At which moment of a step each strategy is fullest, by numbers worked out here or seen in traces of H200s."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tunebook.config.choices import Checkpointing, MasterWeights, Offload, PeftMethod, Strategy
from tunebook.config.schema import FsdpConfig, ParallelismConfig, ZeroConfig
from tunebook.model.parameters import count_parameters, trained_sizes
from tunebook.plan.memory import GIB, estimate_memory
from tunebook.plan.memory.ledger import Kind, Ledger, Moment, Row
from tunebook.plan.memory.rows import step_ledger
from tunebook.plan.memory.states import reduced_gradient_bytes

from .layers import measured

EMBEDDINGS = 151_936 * 896
ADAPTERS = {"q_proj": [24 * 896, 24 * 896]}


def fullest(config, facts, *, accumulates):
    """The fullest moment, and its bytes of each kind."""
    ledger = step_ledger(config, facts, accumulates=accumulates)
    return ledger.peak, ledger.parts()


def row_bytes(config, facts, moment, *names):
    """Bytes of the named rows at a moment."""
    rows = step_ledger(config, facts, accumulates=False).at(moment)
    return sum(row.num_bytes for row in rows if row.label in names)


def test_a_row_is_there_from_its_first_moment_to_its_last():
    rows = [
        Row("weights", Kind.weights, 2**30, Moment.start, Moment.step),
        Row("kept", Kind.activations, 2 * 2**30, Moment.forward, Moment.last),
        Row("logits", Kind.activations, 3 * 2**30, Moment.head, Moment.head),
        Row("gradients", Kind.gradients, 4 * 2**30, Moment.end, Moment.end),
    ]
    ledger = Ledger(rows)
    assert ledger.at(Moment.start) == rows[:1]
    assert ledger.at(Moment.last) == rows[:2]
    assert ledger.peak is Moment.head
    parts = {Kind.weights: 2**30, Kind.activations: 5 * 2**30}
    assert ledger.parts() == dict.fromkeys(Kind, 0) | parts
    text = ledger.as_text()
    assert "    3.000     head - head     activations  logits" in text
    assert "    5.000  end" in text and text.endswith("the peak is at head")


def test_the_head_s_tiles_and_a_recomputed_layer_are_not_there_at_once(sound):
    """In short rows the head is more, in long ones the layer."""
    sound.activation.checkpointing = Checkpointing.enabled
    found = {}
    for row in (1024, 65536):
        sound.packing.row_length = row
        found[row], _ = fullest(sound, sound.model.facts, accumulates=True)
    assert found == {1024: Moment.head, 65536: Moment.last}


def test_the_head_s_gradient_is_there_in_both_formats_when_it_is_cast(sound):
    """Weights in bf16 and a row that is shorter than the head's tile of 4,096 tokens."""
    sound.activation.checkpointing = Checkpointing.enabled
    sound.precision.master_weights, sound.packing.row_length = MasterWeights.bf16, 512
    moment, parts = fullest(sound, sound.model.facts, accumulates=True)
    assert moment is Moment.cast
    assert parts[Kind.activations] == 512 * 24 * 2 * 896 + 16 * 512 * 896 + (4 + 2) * EMBEDDINGS


def test_a_head_of_its_own_leaves_its_gradient_with_those_of_earlier_passes(sound):
    """Before the layers' backward pass; tied, it waits for that of the embeddings."""
    sound.activation.checkpointing, sound.packing.row_length = Checkpointing.enabled, 65536
    for is_tied in (True, False):
        facts = replace(sound.model.facts, tie_word_embeddings=is_tied)
        first, later = (fullest(sound, facts, accumulates=accumulates)[1] for accumulates in (False, True))
        gone = 0 if is_tied else 4 * EMBEDDINGS
        assert first[Kind.activations] - later[Kind.activations] == gone
        assert later[Kind.gradients] - first[Kind.gradients] == 4 * facts.num_parameters


def test_zero_2_makes_room_for_whole_parameters(sound):
    """Of 3 layers of Qwen2.5-7B dealt out to two ranks one gets both embeddings and head: 5.2 GiB, as was traced."""
    words, hidden, inner, keys = 152_064, 3584, 18944, 512
    layer = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * inner
    facts = replace(
        sound.model.facts, num_layers=3, hidden_size=hidden, intermediate_size=inner, vocab_size=words,
        num_attention_heads=28, num_key_value_heads=4, tie_word_embeddings=False,
        num_parameters=2 * words * hidden + 3 * layer, measured=None,
    )  # fmt: skip
    sound.hardware.gpus_per_node = 2
    sound.parallelism = ZeroConfig(strategy=Strategy.zero2, round_robin_gradients=True)
    assert reduced_gradient_bytes(sound, facts) / GIB == pytest.approx(5.236, abs=0.001)
    sound.parallelism.round_robin_gradients = (
        False  # 545M of embeddings, a layer and the next one up to its second half
    )
    dealt_in_order = 4 * (words * hidden + layer + 2 * hidden * (hidden + keys) + 2 * hidden * inner)
    assert reduced_gradient_bytes(sound, facts) == dealt_in_order
    sound.parallelism.offload_optimizer = Offload.cpu
    assert reduced_gradient_bytes(sound, facts) == 0
    sound.parallelism = ParallelismConfig(strategy=Strategy.ddp)
    assert reduced_gradient_bytes(sound, facts) == 0


def test_zero_makes_room_for_a_whole_matrix_that_is_trained_beside_adapters(sound):
    """Two of 8 ranks have pieces of one of them, and one of each has room for all of it."""
    sound.hardware.gpus_per_node, sound.parallelism = 8, ZeroConfig(strategy=Strategy.zero2)
    facts = replace(sound.model.facts, tie_word_embeddings=False)
    sound.peft.method, sound.peft.rank = PeftMethod.lora, 8
    adapters = count_parameters(sound, facts).trained
    assert reduced_gradient_bytes(sound, facts) == pytest.approx(4 * adapters / 8, rel=0.3)
    sound.peft.modules_to_save = ["embed_tokens", "lm_head"]
    trained = count_parameters(sound, facts).trained
    assert trained == adapters + 2 * EMBEDDINGS
    assert 4 * EMBEDDINGS <= reduced_gradient_bytes(sound, facts) < 4 * EMBEDDINGS + 4 * adapters
    assert trained / 8 < EMBEDDINGS / 3  # what was counted, of so many ranks


def test_experts_are_dealt_out_as_much_as_was_counted_of_them(sound):
    """As many parameters in all as the model has, whatever its layers are made of."""
    facts = replace(
        sound.model.facts,
        measured=measured(num_layers=24, parameters=24 * 40_000_000, active_parameters=1, adapters=ADAPTERS),
    )  # fmt: skip
    assert sum(trained_sizes(sound, facts)) == pytest.approx(EMBEDDINGS + 24 * 40_000_000, rel=1e-6)


def test_the_room_of_zero_2_stays_until_the_step(sound):
    """Of 23 layers, 163 matrices, one of two ranks gets both the embeddings and the head."""
    layer = (494_032_768 - EMBEDDINGS) // 24
    facts = replace(
        sound.model.facts, tie_word_embeddings=False, num_layers=23, num_parameters=2 * EMBEDDINGS + 23 * layer
    )
    sound.hardware.gpus_per_node, sound.packing.row_length = 2, 256
    sound.parallelism = ZeroConfig(strategy=Strategy.zero2, round_robin_gradients=True)
    sound.activation.checkpointing = Checkpointing.enabled
    room, share = reduced_gradient_bytes(sound, facts), 2 * facts.num_parameters
    assert room > share
    _, parts = fullest(sound, facts, accumulates=False)
    assert parts[Kind.gradients] == share and parts[Kind.buffers] >= room - share


def test_zero_1_copies_its_share_when_all_gradients_are_there(sound):
    """Seen with 8 layers of granite-3.1-8b on two H200: 27.1 GiB, where 23.6 are without the copy."""
    sound.hardware.gpus_per_node, sound.packing.row_length = 2, 256
    sound.parallelism = ZeroConfig(strategy=Strategy.zero1)
    facts = replace(sound.model.facts, vocab_size=1000, num_parameters=358_000_000)
    moment, parts = fullest(sound, facts, accumulates=False)
    assert moment in (Moment.end, Moment.step) and parts[Kind.gradients] == 4 * facts.num_parameters
    assert parts[Kind.buffers] == pytest.approx(2 * facts.num_parameters, rel=0.03)  # some whole parameters more


@pytest.mark.parametrize("is_tied", [True, False])
def test_zero_3_gathers_and_scatters_the_head(sound, is_tied):
    facts = replace(sound.model.facts, tie_word_embeddings=is_tied)
    sound.hardware.gpus_per_node, sound.parallelism = 2, ZeroConfig(strategy=Strategy.zero3)
    arriving, sent = (
        (Moment.gather, "output head being gathered"),
        (Moment.reduce, "gradient of the output head in transit"),
    )
    assert row_bytes(sound, facts, *arriving) == 1.5 * 4 * EMBEDDINGS
    assert row_bytes(sound, facts, *sent) == (0 if is_tied else (2 + 4 / 2) * EMBEDDINGS)
    sound.parallelism = ParallelismConfig(strategy=Strategy.ddp)
    assert row_bytes(sound, facts, *arriving) == row_bytes(sound, facts, *sent) == 0


def test_fsdp_reduces_the_embeddings_last(sound):
    """Seen with 9 layers of Llama 3 8B on two H200: 2.94 GiB for embeddings of 525 million numbers."""
    facts = sound.model.facts
    sound.hardware.gpus_per_node, sound.parallelism = 8, FsdpConfig(strategy=Strategy.fsdp)
    sent = "gradient of the embeddings in transit"
    assert row_bytes(sound, facts, Moment.end, sent) == 6 * EMBEDDINGS
    there = step_ledger(sound, facts, accumulates=False).at(Moment.end)
    gradients = sum(row.num_bytes for row in there if row.kind is Kind.gradients)
    assert gradients == pytest.approx(4 * facts.num_parameters / 8)
    sound.peft.method = PeftMethod.lora
    assert row_bytes(sound, facts, Moment.end, sent) == 0


def test_the_buckets_of_zero_2_are_made_when_the_backward_pass_begins(sound):
    """Not while the last layer's forward pass and the head are computed."""
    sound.hardware.gpus_per_node = 2
    sound.parallelism = ZeroConfig(strategy=Strategy.zero2, overlap_comm=True, reduce_bucket_size=10_000_000)
    ledger = step_ledger(sound, sound.model.facts, accumulates=False)
    there = [moment for moment in Moment if any(row.label == "gradient buckets" for row in ledger.at(moment))]
    assert there[0] is Moment.reduce and Moment.last in there and there[-1] is Moment.step


def test_an_estimate_is_its_fullest_moment(sound):
    facts = sound.model.facts
    for accumulates in (False, True):
        found = estimate_memory(sound, facts, accumulates=accumulates)
        _, parts = fullest(sound, facts, accumulates=accumulates)
        assert found.total_gib * GIB == pytest.approx(sum(parts.values()))
