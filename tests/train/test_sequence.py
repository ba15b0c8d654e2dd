"""A row that ranks share: which tokens each gets, and that exchanged attention is that of the whole row."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from tunebook.data.corpus import IGNORED_LABEL
from tunebook.errors import RequestError
from tunebook.train import sequence


@pytest.fixture
def over_ranks(monkeypatch):
    """Call a function for every rank of a group, one after the other, as if they exchanged their tensors."""

    def call(function, parts):
        sent: list[torch.Tensor] = []
        monkeypatch.setattr(sequence, "exchange", lambda by_rank: (sent.append(by_rank.clone()), by_rank)[1])
        for part in parts:
            function(part, len(parts))
        found = []
        for rank, part in enumerate(parts):
            received = torch.stack([of_rank[rank] for of_rank in sent])
            monkeypatch.setattr(sequence, "exchange", lambda _, received=received: received)
            found.append(function(part, len(parts)))
        return found

    return call


@pytest.mark.parametrize("size", [2, 3, 6])
def test_every_rank_gets_whole_rows_of_its_heads_and_hands_back_its_tokens(over_ranks, size):
    heads, tokens, width = 6, 12, 5
    row = torch.randn(1, heads, tokens, width)
    shares = over_ranks(sequence.to_whole_row, list(row.chunk(size, dim=2)))
    for rank, share in enumerate(shares):
        assert torch.equal(share, row.chunk(size, dim=1)[rank])
    attended = over_ranks(sequence.to_all_heads, [share.transpose(1, 2).contiguous() for share in shares])
    for rank, part in enumerate(attended):
        assert torch.equal(part, row.transpose(1, 2).chunk(size, dim=1)[rank])


def test_parts_of_a_row_have_its_positions_its_boundaries_and_all_its_labels_once():
    ids = list(range(10, 22))
    labels = [IGNORED_LABEL, *ids[1:]]
    batch = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(
        [{"input_ids": ids, "labels": labels, "seq_lengths": [7, 5]}]
    )
    parts = [sequence.part_of_row(batch, rank, 3) for rank in range(3)]
    assert [part["input_ids"].tolist() for part in parts] == [[ids[:4]], [ids[4:8]], [ids[8:]]]
    assert [part["position_ids"].tolist() for part in parts] == [[[0, 1, 2, 3]], [[4, 5, 6, 0]], [[1, 2, 3, 4]]]
    assert all(part["cu_seq_lens_q"].tolist() == [0, 7, 12] and part["max_length_q"] == 7 for part in parts)
    # the last token of a part is trained on the first one of the next; the last of a document on nothing
    assert [part["shift_labels"].tolist() for part in parts] == [
        [[11, 12, 13, 14]], [[15, 16, IGNORED_LABEL, 18]], [[19, 20, 21, IGNORED_LABEL]],
    ]  # fmt: skip
    assert sum(int((part["shift_labels"] != IGNORED_LABEL).sum()) for part in parts) == 6 + 4


@pytest.mark.parametrize(
    ("rope", "is_refused"),
    [
        ({"rope_type": "longrope"}, True),
        ({"full_attention": {"rope_type": "dynamic"}}, True),
        ({"rope_type": "llama3", "factor": 8.0}, False),
    ],
)
def test_positions_that_depend_on_the_whole_row_are_refused(config, monkeypatch, rope, is_refused):
    monkeypatch.setattr(sequence.AttentionInterface, "register", lambda name, attention: None)
    text = SimpleNamespace(rope_parameters=rope)
    group = sequence.SequenceGroup(size=2, rank=0, ranks=None)
    with pytest.raises(RequestError) if is_refused else nullcontext():
        sequence.attend_over_group(config, group, SimpleNamespace(get_text_config=lambda: text))
