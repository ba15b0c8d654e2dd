"""A trainer mixin for our batches: a sampler decides the documents of every step, on any number of ranks.

Overridden in transformers' Trainer: `get_train_dataloader`, and `compute_loss_context_manager` (accelerate runs FSDP2
without autocast).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer

from tunebook.data.sampler import DocumentRows, RankBatches, Row


class SampledBatches(Trainer):
    """Trains on this rank's micro-batches of prepared documents. Use before a trainer of TRL among the bases."""

    rows: type[DocumentRows] = DocumentRows
    num_loader_workers: int = 0  # processes that make batches ahead of time; 0: none

    def __init__(
        self,
        *args: Any,
        filler_token_id: int,
        train_batches: RankBatches,
        validation_batches: RankBatches | None = None,
        autocast_dtype: torch.dtype | None = None,
        row_multiple: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.filler_token_id = filler_token_id  # of rows without a document, excluded from the loss
        self.train_batches = train_batches
        self.validation_batches = validation_batches
        self.autocast_dtype = autocast_dtype  # if the base class would run without autocast
        self.row_multiple = row_multiple  # in tokens; None: the collator fills rows
        super().__init__(*args, **kwargs)

    def _loader(self, documents: Any, batches: Iterable[list[Row]]) -> DataLoader[Any]:
        rows = self.rows(documents, filler_token_id=self.filler_token_id, multiple=self.row_multiple or 1)
        return DataLoader(
            rows,  # type: ignore[arg-type]
            batch_sampler=batches,
            collate_fn=self.data_collator,
            num_workers=self.num_loader_workers,
            prefetch_factor=1 if self.num_loader_workers else None,  # a batch of images may take GiB of /dev/shm
            pin_memory=torch.cuda.is_available(),
        )

    def get_train_dataloader(self) -> DataLoader[Any]:
        """This rank's share of every step. It is not prepared by accelerate, which would split it again."""
        return self._loader(self.train_dataset, self.train_batches)

    def compute_loss_context_manager(self) -> ExitStack:
        """The forward pass under autocast, if configured. Casts are not cached: gathered weights are bf16 already."""
        contexts = super().compute_loss_context_manager()
        if self.autocast_dtype is not None:
            device = self.args.device.type
            contexts.enter_context(torch.autocast(device, dtype=self.autocast_dtype, cache_enabled=False))
        return contexts
