"""What the logged numbers about training tokens are made of, added up where it is computed until the next log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


class TokenTotals:
    """Sums over the micro-batches of this rank since the last log, on its device.

    Asking a GPU for a number waits for all that it was told to do, and gathering one from all ranks waits for the
    slowest: upstream does both several times after every forward pass, besides the one wait of its fused head, and the
    GPU stands still until it is told more.
    """

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None  # (4,) in float64: tokens judged, entropy, right guesses, all tokens

    def add(self, outputs: Any, inputs: Mapping[str, Any]) -> None:
        """Count a micro-batch: what TRL's fused head found of each token, (batch, tokens), zero where none is judged.

        All its tokens count as seen, trained on or not, and as upstream those that a packed row was filled up with.
        """
        judged = outputs.label_mask.sum()
        mask = inputs.get("attention_mask")
        seen = mask.sum() if mask is not None else judged.new_full((), inputs["input_ids"].numel())  # made on the GPU
        sums = [judged, outputs.entropy.detach().sum(), outputs.is_top1.sum(), seen]
        found = torch.stack([one.double() for one in sums])
        self._sums = found if self._sums is None else self._sums + found

    def take(self, over_ranks: Callable[[torch.Tensor], torch.Tensor]) -> tuple[dict[str, float], int] | None:
        """Mean entropy and accuracy per judged token, by TRL's names, and the tokens seen; then begin anew.

        A collective: every rank has counted, or none has, which gives None.
        """
        if self._sums is None:
            return None
        judged, entropy, right, seen = over_ranks(self._sums).tolist()
        self._sums = None
        means = {"entropy": entropy / max(judged, 1.0), "mean_token_accuracy": right / max(judged, 1.0)}
        return means, round(seen)
