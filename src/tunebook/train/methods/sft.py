"""Supervised fine-tuning: TRL's `SFTTrainer` with our batches, checkpoints and records.

Overridden of TRL's: `compute_loss` and `log` (upstream waits for every GPU after each forward pass, for three logged
numbers), and `evaluate` (validation loss weighted by tokens; upstream averages over batches of different sizes). A test
pins the signatures.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from peft.utils.other import TrainableTokensWrapper
from torch.distributed.fsdp import CPUOffloadPolicy
from trl import SFTTrainer
from trl.models.activation_offloading import OffloadActivations

from tunebook.errors import InvalidTrainingError, RequestError
from tunebook.model.blocks import name_experts
from tunebook.train.batches import SampledBatches
from tunebook.train.checkpoints import CompleteCheckpoints
from tunebook.train.offloading import gather_head, keep_scale_on_host, keep_weights
from tunebook.train.one_pass_head import one_pass_head
from tunebook.train.sequence import SequenceGroup


class TokenTotals:
    """Sums over the micro-batches of this rank since the last log, on its device.

    Reading a number from a GPU waits for all its queued work, and gathering one waits for the slowest rank. Upstream
    does both several times after every forward pass, and the GPU idles meanwhile.
    """

    def __init__(self) -> None:
        # (5,) in float64: trained tokens, entropy, correct guesses, routers' losses, micro-batches with one
        self._sums: torch.Tensor | None = None

    def add(self, outputs: Any, router_loss: torch.Tensor | None = None) -> None:
        """Add the outputs of TRL's fused head for a micro-batch, (batch, tokens), zero for untrained tokens."""
        judged = outputs.label_mask.sum()
        routed = [judged.new_zeros(())] * 2 if router_loss is None else [router_loss.detach(), judged > 0]
        sums = [judged, outputs.entropy.detach().sum(), outputs.is_top1.sum(), *routed]
        found = torch.stack([one.double() for one in sums])
        self._sums = found if self._sums is None else self._sums + found

    def take(self, over_ranks: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Mean entropy and accuracy per trained token, by TRL's names; then reset.

        With the mean of the routers' losses if there are any. A collective. Empty if no rank has counted anything.
        """
        if self._sums is None:
            return {}
        judged, entropy, right, routers, num_routed = over_ranks(self._sums).tolist()
        self._sums = None
        means = {"entropy": entropy / max(judged, 1.0), "mean_token_accuracy": right / max(judged, 1.0)}
        if num_routed:
            means["aux_loss"] = routers / num_routed
        return means


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
        self._totals = TokenTotals()
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
        if self.is_fsdp_enabled and isinstance(self.accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy):
            gather_head(self.model)
            keep_scale_on_host(self.accelerator)
        offloading, state = self.maybe_activation_offload_context, self.accelerator.state
        # ZeRO-3 has its own linear product, which keeps no view of a weight.
        is_zero3 = self.is_deepspeed_enabled and state.deepspeed_plugin.zero_stage == 3
        if isinstance(offloading, OffloadActivations) and not is_zero3:
            keep_weights(offloading)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Upstream's loss: the sum over this micro-batch, per trained token of the whole step over all ranks.

        DDP, FSDP and ZeRO average gradients over the ranks, so the loss is multiplied by their number. A mixture of
        experts adds its routers' loss, as upstream: the mean over the tokens of a micro-batch, then over micro-batches
        and ranks. A row without a document has none. Raises: InvalidTrainingError if the number of the step's trained
        tokens is unknown: each micro-batch would have the same weight, however few tokens it trains on.
        """
        if num_items_in_batch is None and model.training:
            raise InvalidTrainingError(
                "the number of trained tokens of this step is unknown, so its micro-batches cannot be weighted by "
                "theirs: the gradient would depend on the split of the step. This is a bug in Tunebook, or the "
                "installed version of transformers is not the lock's",
                problem_id="tokens-not-counted",
            )
        with one_pass_head() if self.has_one_pass_head else nullcontext():
            if return_outputs:
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[no-untyped-call]
            inputs["use_cache"] = False
            if self.aux_loss_enabled:
                inputs["output_router_logits"] = True
            outputs = model(**inputs, fused_lm_head=True)
        num_items = torch.as_tensor(num_items_in_batch).clamp(min=1)
        loss = -outputs.log_probs.sum() / num_items * self.accelerator.num_processes
        router_loss = None
        if self.aux_loss_enabled:
            router_loss = outputs.aux_loss * outputs.label_mask.any()
            loss = loss + self.router_aux_loss_coef * router_loss / self.current_gradient_accumulation_steps
        self._totals.add(outputs, router_loss)
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As upstream, with the totals since the last log."""
        model: Any = self.model
        if model.training:
            self._metrics["train"] |= {name: [value] for name, value in self._totals.take(self._summed).items()}
        super().log(logs, start_time)

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
