"""The batch arithmetic, against numbers worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from tunebook.config.choices import Generation, PackingMode, Source, Strategy
from tunebook.config.frozen import plain_config
from tunebook.config.schema import (
    DatasetConfig,
    DpoConfig,
    HardwareConfig,
    OptimizerConfig,
    PackingConfig,
    ParallelismConfig,
    SyntheticConfig,
    TrainingConfig,
)
from tunebook.data.batch import count_documents, longest_document, mean_tokens, schedule_of, solve_batch
from tunebook.data.sampler import RankBatches
from tunebook.data.synthetic import generate
from tunebook.errors import RequestError
from tunebook.plan.show import batch_lines


def config_of(mode, ranks, *, mean_tokens=None, **training):
    return plain_config(
        dataset=DatasetConfig(mean_tokens=mean_tokens, num_documents=None),
        parallelism=ParallelismConfig(strategy=Strategy.ddp),
        hardware=HardwareConfig(generation=Generation.hopper, gpus_per_node=ranks),
        packing=PackingConfig(mode=mode),
        optimizer=OptimizerConfig(learning_rate=1e-4),
        training=TrainingConfig(**{"max_length": 1024, **training}),
    )


# 66 per GPU: 6 is its largest divisor up to 8, which is 8192 tokens
@pytest.mark.parametrize(("requested", "micro", "accumulation"), [(11, 11, 6), (2, 2, 33), (None, 6, 11)])
def test_528_documents_on_8_gpus_as_published(requested, micro, accumulation):
    plan = solve_batch(config_of(PackingMode.padded, 8, global_samples=528, micro_batch_size=requested), None)
    assert (plan.world_size, plan.micro_batch_size, plan.accumulation) == (8, micro, accumulation)
    assert plan.rows_per_step == 528


def test_padded_documents_longer_than_a_pass_are_passes_of_their_own():
    plan = solve_batch(config_of(PackingMode.padded, 8, global_samples=528, max_length=16_384), None)
    assert (plan.micro_batch_size, plan.accumulation) == (1, 66)


def test_packed_rows_have_room_for_both_sides_of_a_pair():
    config = replace(config_of(PackingMode.isolated, 1, global_samples=4), method=DpoConfig(name="dpo"))
    plan = solve_batch(config, np.array([2048, 500, 600, 1200] * 4))
    assert (config.training.max_length, plan.row_length, plan.rows_per_step) == (1024, 2048, 3)
    assert plan.padding_share == 0


def test_pairs_are_two_rows_as_wide_as_their_longest_side():
    config = replace(config_of(PackingMode.padded, 1, global_samples=8), method=DpoConfig(name="dpo"))
    assert solve_batch(config, None).micro_batch_size == 4  # 4 x 2 rows of 1,024 tokens
    lengths, widths = np.array([30, 40, 50, 80] * 4), np.array([40, 40, 80, 120] * 4)  # sides of 10 and 20, ...
    plan = solve_batch(config, lengths, widths)
    assert (plan.unit, plan.num_documents, plan.longest_row) == ("pair", 16, 60)
    batches = RankBatches(
        schedule_of(config, plan, lengths, widths), num_steps=2, micro_batch_size=8, rank=0, world_size=1
    )
    list(batches)
    order = widths[np.concatenate([*batches.steps()])].reshape(2, 8)
    assert batches.totals(0, 2) == (16, 800, int(order.max(1).sum()) * 8)


def test_estimate_before_the_data_is_prepared():
    unknown = solve_batch(config_of(PackingMode.isolated, 8, global_samples=528), None)
    assert (unknown.rows_per_step, unknown.accumulation, unknown.total_steps, unknown.longest_row) == (None,) * 4
    plan = solve_batch(config_of(PackingMode.isolated, 8, global_samples=528, mean_tokens=400.0), None)
    assert plan.is_estimate
    assert plan.rows_per_step == 208  # 528 x 400 / 1024 = 206.25, in eights
    assert plan.tokens_per_step == 211_200
    beyond = solve_batch(config_of(PackingMode.isolated, 1, global_samples=4, mean_tokens=5000.0), None)
    assert beyond.tokens_per_step == 4 * 1024  # no document is longer


@pytest.mark.parametrize(("samples", "mean"), [(16, None), (16, 400.0), (24, None)])
def test_one_pass_is_planned_where_even_the_longest_documents_fit_into_it(samples, mean):
    config = config_of(PackingMode.isolated, 8, global_samples=samples, micro_batch_size=2, mean_tokens=mean)
    plan = solve_batch(config, None)
    assert (plan.rows_per_step, plan.accumulation) == ((16, 1) if samples == 16 else (None, None))
    config.packing.row_length = 2 * 1024
    assert solve_batch(config, None).accumulation == 1
    longest = np.full(samples * 3, 1024, dtype=np.int64)
    assert solve_batch(config, longest).accumulation == 1, "which is what it comes to"


def test_a_token_budget_fixes_the_rows():
    lengths = np.full(1000, 256, dtype=np.int64)
    plan = solve_batch(config_of(PackingMode.isolated, 4, global_tokens=32768), lengths)
    assert (plan.rows_per_step, plan.accumulation, plan.longest_row) == (32, 8, 1024)
    assert plan.documents_per_step == pytest.approx(1000 / 8)  # 128 documents a step, the last has 104
    assert batch_lines(plan)[0].startswith("batch     at most 32,768 tokens a step")
    plan = solve_batch(config_of(PackingMode.isolated, 4, global_tokens=9000), None)
    assert plan.rows_per_step == 8  # whole rows only


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(RequestError) as caught:
        solve_batch(config_of(PackingMode.isolated, 1, global_samples=64), np.full(50, 9))
    assert caught.value.problem_id == "batch-larger-than-data"


def test_the_padding_is_what_the_ranks_will_count():
    lengths = np.random.default_rng(1).integers(20, 1024, 1503).astype(np.int64)
    config = config_of(PackingMode.padded, 2, global_samples=24, micro_batch_size=4)
    plan = solve_batch(config, lengths)
    batches = RankBatches(
        schedule_of(config, plan, lengths), num_steps=plan.steps_per_epoch, micro_batch_size=4, rank=0, world_size=2
    )
    assert len(list(batches)) == plan.steps_per_epoch * plan.accumulation
    counted = batches.totals(0, plan.steps_per_epoch)
    assert counted.documents == 1503
    assert plan.longest_row == lengths.max()
    assert plan.padding_share == pytest.approx(1 - counted.tokens / counted.computed_tokens)
    assert 0.3 < plan.padding_share < 0.5


@pytest.mark.parametrize(("samples", "max_steps", "total"), [(6, None, 375), (64, None, 36), (64, 5, 5)])
def test_the_longest_row_is_that_of_the_runs_own_steps(samples, max_steps, total):
    lengths = np.clip(np.random.default_rng(5).lognormal(5, 1, 1500), 16, 1024).astype(np.int64)
    config = config_of(PackingMode.isolated, 2, global_samples=samples, num_epochs=1.5, max_steps=max_steps)
    config.packing.row_length = 8192
    plan = solve_batch(config, lengths)
    assert (plan.total_steps, plan.documents_per_step) == (total, samples)
    assert plan.rows_per_step % 2 == 0
    schedule = schedule_of(config, plan, lengths)
    steps = [step for epoch in range(2) for step in schedule.steps_of_epoch(epoch)][: plan.total_steps]
    rows = [row for step in steps for row in schedule.rows_of_step(step)]
    assert len(rows) == len(steps) * plan.rows_per_step
    assert plan.longest_row == max(int(lengths[row].sum()) for row in rows)
    assert plan.longest_row < 8192


def documents_of(dataset, max_length=1024):
    return plain_config(dataset=dataset, training=TrainingConfig(max_length=max_length, global_samples=8))


@pytest.mark.parametrize(("sigma", "most", "longest"), [(0.9, 4096, 8192), (0.9, 700, 200), (0.0, 4096, 200)])
def test_the_mean_is_that_of_the_documents_that_are_drawn(sigma, most, longest):
    settings = SyntheticConfig(log_sigma_tokens=sigma, max_tokens=most, num_documents=1_500)
    config = documents_of(DatasetConfig(source=Source.synthetic, synthetic=settings), longest)
    batches = generate(settings, num_documents=settings.num_documents, vocab_size=1000, eos_token_id=0)
    drawn = np.concatenate([batch.column("input_ids").value_lengths().to_numpy() for batch in batches])
    assert mean_tokens(config) == pytest.approx(float(np.minimum(drawn, longest).mean()), rel=1e-9)
    config.dataset.mean_tokens = 3000.0
    assert mean_tokens(config) == min(longest, 3000), "a stated mean comes first"
    assert mean_tokens(documents_of(DatasetConfig(path="a.jsonl"))) is None


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (DatasetConfig(source=Source.synthetic, max_documents=3_000, validation_share=0.1), 2_700),
        (DatasetConfig(source=Source.synthetic, max_documents=30_000), 20_000),
        (DatasetConfig(source=Source.hub, num_documents=52_000, validation_share=0.05), 49_400),
        (DatasetConfig(source=Source.hub, num_documents=52_000, max_documents=1_000), 1_000),
        (DatasetConfig(source=Source.hub, max_documents=1_000), None),  # it may have fewer
    ],
)
def test_documents_of_an_epoch_are_those_read_without_those_held_out(dataset, expected):
    assert count_documents(documents_of(dataset)) == expected


def test_generated_documents_are_no_longer_than_they_are_drawn():
    dataset = DatasetConfig(source=Source.synthetic, synthetic=SyntheticConfig(max_tokens=512))
    assert [longest_document(documents_of(dataset, max_length)) for max_length in (1024, 256)] == [512, 256]
    assert longest_document(documents_of(DatasetConfig(path="a.jsonl"))) == 1024
