"""What the trainers of all methods share: our batches, checkpoints and records, and corrections to TRL's trainers.

A method is a module of this package with two functions: `trainer_config(arguments)`, TRL's configuration from the
arguments of a run, and `build(run, **arguments)`, its trainer: a `MethodTrainer` over a trainer of TRL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft.utils.other import TrainableTokensWrapper
from transformers import TrainerCallback

from tunebook.config.schema import RunConfig
from tunebook.data.prepared import Prepared, PreparedPart
from tunebook.data.sampler import RankBatches
from tunebook.model.blocks import name_experts
from tunebook.train.batches import SampledBatches
from tunebook.train.checkpoints import CompleteCheckpoints
from tunebook.train.offloading import correct_offloading
from tunebook.train.sequence import SequenceGroup


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a method's trainer may need of its run, in addition to the Trainer's arguments."""

    config: RunConfig
    prepared: Prepared
    sequence: SequenceGroup | None  # the ranks that share this rank's rows
    batches_of: Callable[[PreparedPart], RankBatches]  # this rank's, of every document of a part once


class MethodTrainer(SampledBatches, CompleteCheckpoints):
    """Use before a trainer of TRL among the bases. The data sets of the base class are the prepared documents.

    A subclass computes the loss of training, per item of the whole step over all ranks, and the sums of a validation.
    """

    sequence: SequenceGroup | None = None
    keeps_gathered = False  # of the strategy
    callbacks_after_checks: Sequence[TrainerCallback] = ()  # of the method; the checks are those of the wrapped model
    aux_loss_enabled: bool  # of TRL's trainer: a mixture of experts adds its routers' loss

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The loss is divided by the items of the whole step for every model. Gemma 3n's and 4's own loss is not, so
        # upstream would give each micro-batch the same weight.
        self.model_accepts_loss_kwargs = self.loss_is_scaled_for_ga = True
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
        correct_offloading(self)

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As upstream. What `fsdp_grad_op` keeps for the backward pass stays gathered for all passes of a step."""
        if self.keeps_gathered:
            model.set_reshard_after_backward(self.accelerator.sync_gradients)
        return super().training_step(model, *args, **kwargs)

    @property
    def row_collator(self) -> Any:
        """Makes a packed row of documents."""
        return self.data_collator

    def validation_sums(self, inputs: dict[str, Any]) -> torch.Tensor:
        """The sums over one validation batch of this rank: first the loss, then what it is divided by, then others."""
        raise NotImplementedError

    def validation_metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """The metrics from the sums of all ranks, with `validation_loss` and `validation_tokens`."""
        raise NotImplementedError

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Every validation document once, weighted as in training; upstream averages over batches."""
        assert self.validation_batches is not None
        model: Any = self.model
        model.eval()
        sums: Any = 0.0
        with torch.no_grad():
            for batch in self._loader(self.eval_dataset, self.validation_batches):
                sums = sums + self.validation_sums(self._prepare_inputs(batch)).double()
        found = self.validation_metrics(self.accelerator.reduce(sums, reduction="sum").tolist())
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        self.log(dict(metrics))
        model.train()
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics
