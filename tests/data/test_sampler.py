"""Every document once per epoch, in the same steps on any number of ranks, and the rows that the collator gets."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset

from tunebook.data.sampler import DocumentRows, RankBatches, Schedule, StepSize, cut_into_steps, epoch_order

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
    ranks = batches_of(world_size, micro=micro, rows=rows, is_packed=is_packed)
    assert steps_of(ranks) == steps_of(batches_of(1))  # which are packed
    assert {len(list(rank)) for rank in ranks} == {len(ranks[0])}


def test_an_epoch_holds_every_document_exactly_once_and_the_next_is_in_another_order():
    steps = steps_of(batches_of(4, num_steps=14))
    assert [len(step) for step in steps] == 2 * [16, 16, 16, 16, 16, 16, 7]
    for epoch in (steps[:7], steps[7:]):
        assert sorted(document for step in epoch for document in step) == list(range(103))
    assert steps[0] != steps[7]
    assert epoch_order(5, None, 3).tolist() == [0, 1, 2, 3, 4]  # validation: as stored


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


@pytest.mark.parametrize(("rows", "length"), [(4, 128), (2, 256), (8, 100)])
def test_a_token_budget_takes_every_document_once_and_fits_its_rows(rows, length):
    schedule = Schedule(
        lengths=np.random.default_rng(4).integers(1, 100, 2000),
        size=StepSize(tokens=rows * length, row_length=length),
        rows_per_step=rows,
        is_packed=True,
        seed=0,
    )
    steps = schedule.steps_of_epoch(0)
    assert sorted(int(document) for step in steps for document in step) == list(range(2000))
    assert min(schedule.lengths[step].sum() for step in steps[:-1]) > 0.75 * rows * length
    for step in steps:
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


DOCUMENTS = {
    "input_ids": [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]],
    "labels": [[-100, 2, 3], [-100, 5], [6], [7, 8, 9, 10]],
}


@pytest.fixture(params=[1, 4], ids=["many_batches", "one_batch"])
def rows(request, tmp_path) -> DocumentRows:
    """Memory-mapped from a file of int32 lists, as prepared data are, in batches of one document or of all."""
    column = pa.list_(pa.int32())
    table = pa.table(DOCUMENTS, schema=pa.schema([("input_ids", column), ("labels", column)]))
    file = tmp_path / "documents.arrow"
    with pa.OSFile(str(file), "wb") as stream, pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table, max_chunksize=request.param)
    return DocumentRows(Dataset.from_file(str(file)), filler_token_id=99)


def test_a_row_is_its_documents_end_to_end_in_the_order_requested_and_filled_up(rows):
    row = rows[[3, 0]]
    assert row["input_ids"].tolist() == [7, 8, 9, 10, 1, 2, 3]
    assert row["labels"].tolist() == [7, 8, 9, 10, -100, 2, 3]
    assert row["seq_lengths"] == [4, 3]
    assert row["input_ids"].dtype == row["labels"].dtype == np.int64
    assert rows[[1, 1]]["labels"].tolist() == [-100, 5, -100, 5]
    empty = rows[[]]
    assert (empty["input_ids"].tolist(), empty["labels"].tolist(), empty["seq_lengths"]) == ([99] * 2, [-100] * 2, [2])
    rows_of_8 = DocumentRows(rows.documents, filler_token_id=99, multiple=8)  # filled up by a document without a loss
    row = rows_of_8[[3, 0]]
    assert row["input_ids"].tolist() == [7, 8, 9, 10, 1, 2, 3, 99]
    assert row["labels"].tolist() == [7, 8, 9, 10, -100, 2, 3, -100]
    assert row["input_ids"].dtype == row["labels"].dtype == np.int64
    assert [rows_of_8[row]["seq_lengths"] for row in ([3, 0], [3, 3], [])] == [[4, 3, 1], [4, 4], [8]]
