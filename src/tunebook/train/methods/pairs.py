"""Batches of pairs: the chosen and the rejected side of each pair as rows of one padded batch, as TRL lays them out.

Shapes: P pairs of a micro-batch, T tokens of their longest side.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from tunebook.data.corpus import IGNORED_LABEL
from tunebook.data.sampler import DocumentRows, Row

NO_PAIR = -1  # the number of a row without a pair, in the short last step of an epoch


class PairRows(DocumentRows):
    """Rows of prepared pairs as a map-style data set: a row is one pair, or none."""

    def __getitem__(self, row: Row) -> dict[str, Any]:
        """The pair's number and its sides, each with input ids and labels (num_tokens,) in int64."""
        if not row:  # each side is two tokens; its loss has no weight
            side = {"input_ids": np.full(2, self.filler_token_id), "labels": np.array([IGNORED_LABEL, 0])}
            return {"pair": NO_PAIR, "sides": [side, side]}
        (pair,) = row
        (chosen_length,) = self.documents[row]["chosen_length"].to_pylist()
        whole = super().__getitem__(row)
        parts = (slice(chosen_length), slice(chosen_length, None))
        sides = [{name: whole[name][part] for name in ("input_ids", "labels")} for part in parts]
        return {"pair": pair, "sides": sides}


class PairCollator:
    """Pads the sides of pairs to a batch: first all chosen sides, then all rejected ones.

    Rows without a pair are left out; a batch of nothing else keeps one of them, since every GPU computes every pass.
    """

    def __init__(self, pad_token_id: int, multiple: int = 1) -> None:
        self.pad_token_id = pad_token_id
        self.multiple = multiple  # of a row's tokens

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """`pairs` (P,), and `input_ids`, `attention_mask` and `completion_mask` (2P, T)."""
        kept = [row for row in rows if row["pair"] != NO_PAIR] or rows[:1]
        sides = [row["sides"][place] for place in (0, 1) for row in kept]
        ids = [torch.from_numpy(side["input_ids"]) for side in sides]
        longest = max(map(len, ids))
        missing = -longest % self.multiple
        columns = {
            "input_ids": (ids, self.pad_token_id),
            "attention_mask": ([torch.ones_like(each) for each in ids], 0),
            "completion_mask": ([torch.from_numpy(side["labels"]).ne(IGNORED_LABEL).long() for side in sides], 0),
        }
        batch = {"pairs": torch.tensor([row["pair"] for row in kept])}
        for name, (values, filling) in columns.items():
            padded = pad_sequence(values, batch_first=True, padding_value=filling)
            batch[name] = torch.nn.functional.pad(padded, (0, missing), value=filling)
        return batch
