"""The order of documents: the same optimizer steps on any number of ranks, each document once per epoch."""

import numpy as np
import pytest

from tunebook.data.sampler import RankBatches, Schedule, StepSize, cut_into_steps, epoch_order

LENGTHS = np.random.default_rng(0).integers(5, 60, 103).astype(np.int64)


def batches_of(world_size, *, micro=1, rows=8, size=None, is_packed=True, num_steps=7, lengths=LENGTHS):
    schedule = Schedule(
        lengths=lengths, size=size or StepSize(documents=16), rows_per_step=rows, is_packed=is_packed, seed=3
    )
    return [
        RankBatches(schedule, num_steps=num_steps, micro_batch_size=micro, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]


def steps_of(ranks):
    """The documents of every step, over all ranks."""
    accumulation = ranks[0].accumulation
    per_rank = [list(rank) for rank in ranks]
    num_steps = len(per_rank[0]) // accumulation
    return [
        sorted(
            document
            for batches in per_rank
            for batch in batches[step * accumulation : (step + 1) * accumulation]
            for row in batch
            for document in row
        )
        for step in range(num_steps)
    ]


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize(("world_size", "micro"), [(1, 1), (2, 1), (4, 2), (8, 1)])
def test_steps_hold_the_same_documents_whatever_the_split(world_size, micro, is_packed):
    rows = 8 if is_packed else 16
    alone = steps_of(batches_of(1, rows=rows, is_packed=is_packed))
    assert steps_of(batches_of(world_size, micro=micro, rows=rows, is_packed=is_packed)) == alone


def test_packed_and_padded_steps_hold_the_same_documents():
    assert steps_of(batches_of(2, rows=8)) == steps_of(batches_of(2, rows=16, is_packed=False))


def test_an_epoch_holds_every_document_exactly_once_and_its_last_step_is_smaller():
    steps = steps_of(batches_of(4, num_steps=7))
    assert [len(step) for step in steps] == [16, 16, 16, 16, 16, 16, 7]
    assert sorted(document for step in steps for document in step) == list(range(103))


def test_the_second_epoch_is_in_another_order():
    steps = steps_of(batches_of(1, num_steps=14))
    assert sorted(d for step in steps[7:] for d in step) == list(range(103))
    assert steps[0] != steps[7]


def test_every_rank_has_the_same_number_of_micro_batches():
    ranks = batches_of(4, micro=2, num_steps=14)
    assert [len(list(rank)) for rank in ranks] == [14] * 4 == [len(rank) for rank in ranks]


def test_validation_keeps_the_stored_order():
    assert epoch_order(5, None, 3).tolist() == [0, 1, 2, 3, 4]


def test_a_token_budget_puts_each_document_in_the_fullest_row_that_has_room():
    lengths = np.array([6, 7, 3, 4, 9, 9, 1], dtype=np.int64)
    # 6 and 7 take a row each, 3 fills up the second and 4 the first; 9 and 9 take the next two rows, 1 fits beside one
    steps = cut_into_steps(np.arange(7), lengths, StepSize(tokens=20, row_length=10))
    assert [step.tolist() for step in steps] == [[0, 1, 2, 3], [4, 5, 6]]


def test_a_document_that_does_not_fit_waits_in_its_place():
    lengths = np.array([8, 9, 5, 6, 2, 1], dtype=np.int64)
    steps = cut_into_steps(np.arange(6), lengths, StepSize(tokens=20, row_length=10))
    assert [step.tolist() for step in steps] == [[0, 1, 4, 5], [2, 3]]
    # the third is passed over twice, and still comes before the last, which has not been looked at again
    steps = cut_into_steps(np.arange(5), np.array([9, 6, 7, 4, 8]), StepSize(tokens=10, row_length=10))
    assert [step.tolist() for step in steps] == [[0], [1, 3], [2], [4]]


def test_a_token_budget_loses_and_repeats_nothing_and_fits_its_rows():
    order = epoch_order(len(LENGTHS), 1, 0)
    size = StepSize(tokens=4 * 128, row_length=128)
    steps = cut_into_steps(order, LENGTHS, size)
    assert sorted(int(document) for step in steps for document in step) == list(range(103))
    assert all(LENGTHS[step].sum() <= 4 * 128 for step in steps)
    full = [LENGTHS[step].sum() / (4 * 128) for step in steps[:-1]]
    assert min(full) > 0.9


@pytest.mark.parametrize(("rows", "length"), [(4, 128), (2, 256), (8, 100)])
def test_no_row_of_a_token_budget_is_longer_than_a_row(rows, length):
    schedule = Schedule(
        lengths=np.random.default_rng(4).integers(1, 100, 2000),
        size=StepSize(tokens=rows * length, row_length=length),
        rows_per_step=rows,
        is_packed=True,
        seed=0,
    )
    for step in schedule.steps_of_epoch(0):
        dealt = schedule.rows_of_step(step)
        assert sorted(document for row in dealt for document in row) == sorted(step.tolist())
        assert max(int(schedule.lengths[row].sum()) for row in dealt) <= length


def test_totals_count_documents_tokens_and_padding():
    lengths = np.array([10, 4, 6, 8], dtype=np.int64)
    (rank,) = batches_of(1, micro=2, rows=4, size=StepSize(documents=4), is_packed=False, num_steps=2, lengths=lengths)
    list(rank)
    totals = rank.totals(0, 1)
    assert (totals.documents, totals.tokens) == (4, 28)
    pairs = [lengths[[row[0] for row in batch]] for batch in list(rank)[:2]]
    assert totals.computed_tokens == sum(2 * int(pair.max()) for pair in pairs)
    assert rank.totals(1, 2).tokens == 28
