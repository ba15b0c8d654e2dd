"""Supervised fine-tuning: TRL's `SFTTrainer` with our batches, checkpoints and records.

Overridden of TRL's: `compute_loss` (upstream waits for every GPU after each forward pass, for logged numbers that are
left out here), and `evaluate` (validation loss weighted by tokens; upstream averages over batches of different sizes).
A test pins the signatures.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from peft.utils.other import TrainableTokensWrapper
from trl import SFTTrainer

from tunebook.errors import RequestError
from tunebook.model.blocks import name_experts
from tunebook.train.batches import SampledBatches
from tunebook.train.checkpoints import CompleteCheckpoints
from tunebook.train.offloading import correct_offloading
from tunebook.train.one_pass_head import one_pass_head
from tunebook.train.sequence import SequenceGroup


class RecipeTrainer(SampledBatches, CompleteCheckpoints, SFTTrainer):
    """`SFTTrainer` over prepared documents; the data sets handed to the base class are the documents themselves."""

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
        # The loss below is divided by the trained tokens of the whole step for every model. Gemma 3n's and 4's own loss
        # is not, so upstream would give each micro-batch the same weight.
        self.model_accepts_loss_kwargs = True
        trained: Any = self.model
        text = trained.config.get_text_config()
        if self.aux_loss_enabled and not name_experts(text):
            # TRL enables it for dense models of an architecture that may have experts.
            self.aux_loss_enabled = text.output_router_logits = False
        head = trained.get_output_embeddings()
        if isinstance(head, TrainableTokensWrapper):  # TRL 1.16 reads the head's bias, which PEFT 0.21's wrapper lacks
            head.register_parameter("bias", None)
            # Of a vocabulary that has grown, PEFT would write both matrices with each adapter.
            trained.save_pretrained = partial(trained.save_pretrained, save_embedding_layers=False)
        if sequence is not None:
            if self.aux_loss_enabled:
                raise RequestError(
                    f"parallelism.sequence_group_size={sequence.size}: the loss that balances the model's experts "
                    "would be that of a part of a row; try parallelism.sequence_group_size=1",
                    problem_id="sequence-group-model",
                )
            self.data_collator = sequence.collator(self.data_collator)
        correct_offloading(self)

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

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The mean validation loss per trained token over all ranks, as `eval_validation_loss`."""
        assert self.validation_batches is not None
        totals = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        model: Any = self.model
        model.eval()
        with torch.no_grad():
            for batch in self._loader(self.eval_dataset, self.validation_batches):
                inputs = self._prepare_inputs(batch)
                with self.compute_loss_context_manager():
                    outputs = self.model_wrapped(**inputs, use_cache=False, fused_lm_head=True)
                totals += torch.stack([-outputs.log_probs.sum(), outputs.label_mask.sum()]).double()
        negative_log_likelihood, num_tokens = self.accelerator.reduce(totals, reduction="sum").tolist()
        metrics = {
            f"{metric_key_prefix}_validation_loss": negative_log_likelihood / num_tokens,
            f"{metric_key_prefix}_validation_tokens": num_tokens,
        }
        self.log(dict(metrics))
        model.train()
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics
