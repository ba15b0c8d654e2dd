"""Supervised fine-tuning: TRL's `SFTTrainer` with our batches, checkpoints and records.

Overridden of TRL's: `compute_loss` (upstream waits for every GPU after each forward pass, for logged numbers that are
left out here), and `evaluate` (validation loss weighted by tokens; upstream averages over batches of different sizes).
A test pins the signatures.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from trl import SFTConfig, SFTTrainer

from tunebook.errors import RequestError
from tunebook.model.parameters import compute_dtype
from tunebook.model.processor import load_image_processor
from tunebook.train.image_batches import ImageCollator, image_workers, needs_image_in_each
from tunebook.train.methods.trainer import MethodTrainer, Run
from tunebook.train.one_pass_head import one_pass_head
from tunebook.train.sequence import SequenceGroup


def trainer_config(arguments: dict[str, Any]) -> SFTConfig:
    """TRL's configuration for prepared documents."""
    return SFTConfig(**arguments, dataset_kwargs={"skip_prepare_dataset": True})


def build(run: Run, **arguments: Any) -> RecipeTrainer:
    """The trainer of a run."""
    trainer = RecipeTrainer(**arguments, has_one_pass_head=bool(run.config.model.one_pass_head), sequence=run.sequence)
    if run.prepared.has_images:
        config, tokenizer = run.config, arguments["processing_class"]
        processor = load_image_processor(config.model, tokenizer, config.dataset.max_image_pixels)
        trainer.num_loader_workers = image_workers()
        trainer.data_collator = ImageCollator(
            trainer.data_collator, processor, needs_image=needs_image_in_each(config), dtype=compute_dtype(config)
        )
    return trainer


class RecipeTrainer(MethodTrainer, SFTTrainer):
    """`SFTTrainer` over prepared documents."""

    def __init__(
        self,
        *args: Any,
        has_one_pass_head: bool = False,
        sequence: SequenceGroup | None = None,
        **kwargs: Any,
    ) -> None:
        self.has_one_pass_head = has_one_pass_head  # see `one_pass_head`
        self.sequence = sequence  # the ranks that share this rank's rows
        super().__init__(*args, **kwargs)
        if not self.padding_free:
            self.row_multiple = None  # the collator fills padded rows
        if sequence is not None:
            if self.aux_loss_enabled:
                raise RequestError(
                    f"parallelism.sequence_group_size={sequence.size}: the loss that balances the model's experts "
                    "would be that of a part of a row; try parallelism.sequence_group_size=1",
                    problem_id="sequence-group-model",
                )
            self.data_collator = sequence.collator(self.data_collator)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Upstream's loss: the sum over this micro-batch, per trained token of the whole step over all ranks.

        DDP, FSDP and ZeRO average gradients over the ranks, so the loss is multiplied by their number. A mixture of
        experts adds its routers' loss, as upstream: the mean over the tokens of a micro-batch, then over micro-batches
        and ranks. A row without a document has none.
        """
        assert not return_outputs, "upstream's `evaluate` asks for outputs, and ours replaces it"
        assert num_items_in_batch is not None, "without it, each micro-batch would have the same weight"
        with one_pass_head() if self.has_one_pass_head else nullcontext():
            inputs["use_cache"] = False
            if self.aux_loss_enabled:
                inputs["output_router_logits"] = True
            outputs = model(**inputs, fused_lm_head=True)
        num_items = torch.as_tensor(num_items_in_batch).clamp(min=1)
        loss = -outputs.log_probs.sum() / num_items * self.accelerator.num_processes
        if self.aux_loss_enabled:
            router_loss = outputs.aux_loss * outputs.label_mask.any()
            loss = loss + self.router_aux_loss_coef * router_loss / self.current_gradient_accumulation_steps
        return loss

    def validation_sums(self, inputs: dict[str, Any]) -> torch.Tensor:
        """The negative log-likelihood of this batch's trained tokens, and their number."""
        with self.compute_loss_context_manager():
            outputs = self.model_wrapped(**inputs, use_cache=False, fused_lm_head=True)
        return torch.stack([-outputs.log_probs.sum(), outputs.label_mask.sum()])

    def validation_metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """The mean validation loss per trained token, as `validation_loss`."""
        negative_log_likelihood, num_tokens = sums
        return {"validation_loss": negative_log_likelihood / num_tokens, "validation_tokens": num_tokens}
