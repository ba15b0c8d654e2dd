"""Batches of pairs: the chosen and the rejected side of each pair as rows of one padded batch, as TRL lays them out.

TRL 1.16 has switched off its rows without padding in DPO. Where rows are packed, the model computes all sides of a
batch as documents of one row (`packed`), and TRL's loss gets the results as those of the padded batch.

Shapes: P pairs of a micro-batch, T tokens of their longest side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from tunebook.data.corpus import IGNORED_LABEL
from tunebook.data.sampler import DocumentRows, Row

NO_PAIR = -1  # the number of a row without a pair, in the short last step of an epoch


class PairRows(DocumentRows):
    """Rows of prepared pairs as a map-style data set: a row is some pairs, or none."""

    def __getitem__(self, row: Row) -> dict[str, Any]:
        """The pairs' numbers and their sides, chosen and rejected in turn.

        A side has input ids and labels (num_tokens,) in int64.
        """
        if not row:  # each side is two tokens; its loss has no weight
            side = {"input_ids": np.full(2, self.filler_token_id), "labels": np.array([IGNORED_LABEL, 0])}
            return {"pairs": [NO_PAIR], "sides": [side, side]}
        whole, chosen = super().__getitem__(row), self.documents[row]["chosen_length"].to_numpy()
        ends = np.cumsum(np.stack([chosen, whole["seq_lengths"] - chosen], axis=1))[:-1]
        ids, labels = (np.split(whole[name], ends) for name in ("input_ids", "labels"))
        sides = [{"input_ids": one, "labels": other} for one, other in zip(ids, labels, strict=True)]
        return {"pairs": row, "sides": sides}


class PairCollator:
    """Pads the sides of pairs to a batch: first all chosen sides, then all rejected ones.

    Rows without a pair are left out; a batch of nothing else keeps one of them, since every GPU computes every pass.
    """

    def __init__(self, pad_token_id: int, multiple: int = 1, *, is_packed: bool = False) -> None:
        self.pad_token_id = pad_token_id
        self.multiple = multiple  # of a row's tokens
        self.is_packed = is_packed
        self.pack = DataCollatorForLanguageModeling(pad_token_id, padding_free=True)

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """`pairs` (P,), and `input_ids`, `attention_mask` and `completion_mask` (2P, T).

        With packed rows also `row`: all sides as one packed row, in the same order.
        """
        kept = [row for row in rows if row["pairs"] != [NO_PAIR]] or rows[:1]
        sides = [side for place in (0, 1) for row in kept for side in row["sides"][place::2]]
        ids = [torch.from_numpy(side["input_ids"]) for side in sides]
        longest = max(map(len, ids))
        missing = -longest % self.multiple
        columns = {
            "input_ids": (ids, self.pad_token_id),
            "attention_mask": ([torch.ones_like(each) for each in ids], 0),
            "completion_mask": ([torch.from_numpy(side["labels"]).ne(IGNORED_LABEL).long() for side in sides], 0),
        }
        batch: dict[str, Any] = {"pairs": torch.tensor([pair for row in kept for pair in row["pairs"]])}
        for name, (values, filling) in columns.items():
            padded = pad_sequence(values, batch_first=True, padding_value=filling)
            batch[name] = functional.pad(padded, (0, missing), value=filling)
        if self.is_packed:
            missing = -sum(map(len, ids)) % self.multiple
            filler = {"input_ids": [self.pad_token_id] * missing, "labels": [IGNORED_LABEL] * missing}
            batch["row"] = self.pack(sides + [filler] * (missing > 0))
        return batch


def packed(model: Any) -> Callable[..., Any]:
    """The model as a function of a padded batch that computes its packed row."""

    def forward(
        *,
        row: dict[str, Any],
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        labels: torch.Tensor,
        **options: Any,
    ) -> Any:
        outputs, is_token = model(**row, **options), attention_mask.bool()
        shape = outputs.log_probs.shape
        for name, values in outputs.items():  # (1, num_tokens - 1), of all tokens but the first
            if values.shape == shape:
                of_tokens = functional.pad(values, (1, 0))
                padded = values.new_zeros(is_token.shape).masked_scatter(is_token, of_tokens)
                outputs[name] = padded[:, 1:]
        return outputs

    return forward
