"""Direct preference optimization: TRL's `DPOTrainer` computes the loss, with our batches, checkpoints and records.

The reference is the untrained model: an adapter is switched off for it, before each pass of the trained model; for a
full fine-tune its log-probabilities are computed once, before the first step, and kept with the prepared data
(`reference`). So no second model is in memory.

Overridden of TRL's: `_prepare_dataset` (the pairs are prepared), `compute_loss` and `_get_num_items_in_batch` (a loss
per pair of the whole step), `_compute_loss` and `compute_ref_log_probs` (packed rows). A test pins the signatures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils.modeling import is_peft_model
from trl import DPOConfig, DPOTrainer
from trl.trainer import dpo_trainer

from tunebook.config.choices import DpoLoss, PackingMode
from tunebook.config.schema import DpoConfig
from tunebook.train.methods.pairs import PairCollator, PairRows, packed
from tunebook.train.methods.reference import ReferencePass, reference_log_probabilities
from tunebook.train.methods.trainer import MethodTrainer, Run

upstream: Any = dpo_trainer
# Our names of TRL's metrics.
_METRICS = {
    "reward_accuracy": "rewards/accuracies",
    "reward_margin": "rewards/margins",
    "chosen_log_probability": "logps/chosen",
    "rejected_log_probability": "logps/rejected",
}
_NAMES = [*_METRICS, "reference_accuracy"]


def trainer_config(arguments: dict[str, Any]) -> DPOConfig:
    """TRL's configuration for prepared pairs."""
    return DPOConfig(**arguments | {"padding_free": False})  # which TRL has switched off; see `pairs.packed`


def build(run: Run, **arguments: Any) -> PairTrainer:
    """The trainer of a run, with its loss."""
    settings = run.config.method
    assert isinstance(settings, DpoConfig)
    given = arguments["args"]
    given.beta, given.label_smoothing = settings.beta, settings.label_smoothing
    given.loss_type, given.loss_weights = losses_of(settings)
    return PairTrainer(**arguments, run=run, rpo_alpha=settings.rpo_alpha)


def losses_of(settings: DpoConfig) -> tuple[list[str], list[float]]:
    """TRL's losses whose weighted sum is the configured one, and their weights.

    TRL 1.16 reads label smoothing in `robust` only, which divides by 1 - 2e. With e the smoothing, the smoothed sigmoid
    loss is (2 - 2e) sigmoid - (1 - 2e) robust.
    """
    losses = {settings.loss_type.name: 1.0}
    smoothing = settings.label_smoothing
    if settings.loss_type is DpoLoss.sigmoid and smoothing:
        losses = {"sigmoid": 2 - 2 * smoothing, "robust": 2 * smoothing - 1}
    if settings.rpo_alpha is not None:
        losses["sft"] = settings.rpo_alpha
    return [*losses], [*losses.values()]


class PairTrainer(MethodTrainer, DPOTrainer):
    """`DPOTrainer` over prepared pairs."""

    rows = PairRows

    def __init__(
        self,
        *args: Any,
        run: Run,
        rpo_alpha: float | None = None,
        optimizer_cls_and_kwargs: Any = None,
        **kwargs: Any,
    ) -> None:
        self.rpo_alpha = rpo_alpha
        self._sums: Counter[str] = Counter()  # of this rank's pairs since the last logged step
        with _without_second_model():
            super().__init__(*args, **kwargs)
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs  # TRL's trainer does not hand it on
        self.precompute_ref_logps = True  # every batch brings the reference's log-probabilities
        tokenizer: Any = self.processing_class
        is_packed = run.config.packing.mode is PackingMode.isolated
        self.pairs = PairCollator(tokenizer.pad_token_id, self.row_multiple or 1, is_packed=is_packed)
        self.data_collator = self.pairs
        self.row_multiple = None  # the collator fills rows
        self.reference: ReferencePass | None = None  # None: an adapter is switched off
        if not is_peft_model(self.model):
            self.reference = ReferencePass(self, run)
            self.callbacks_after_checks = [self.reference]

    @property
    def row_collator(self) -> Any:
        """Makes a packed row of documents."""
        return self.pairs.pack

    def compute_ref_log_probs(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Upstream's, of packed rows if the batch has them."""
        upstream: Any = super()
        return upstream.compute_ref_log_probs(packed(model) if self.pairs.is_packed else model, inputs)

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        upstream: Any = super()
        return upstream._compute_loss(packed(model) if self.pairs.is_packed else model, inputs, return_outputs)

    def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
        return dataset

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor:
        """The pairs of a step and the trained tokens of their chosen answers, over all ranks."""
        counts = torch.stack([_counts(batch["pairs"], batch["completion_mask"]) for batch in batch_samples])
        total: torch.Tensor = self.accelerator.reduce(counts.sum(0).to(device), reduction="sum")
        return total

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Upstream's loss, the mean over this micro-batch, so weighted that a step's loss is the mean over its pairs.

        The SFT term is the mean over the tokens of all chosen answers of the step. DDP, FSDP and ZeRO average gradients
        over the ranks, so the loss is multiplied by their number.
        """
        assert not return_outputs, "upstream's `evaluate` asks for outputs, and ours replaces it"
        assert num_items_in_batch is not None, "without it, each micro-batch would have the same weight"
        own = _counts(inputs["pairs"], inputs["completion_mask"])
        share, token_share = own / num_items_in_batch.to(own).clamp(min=1)
        loss = self._mean_loss(model, inputs, self.rpo_alpha and self.rpo_alpha * token_share / share.clamp(min=1e-9))
        return loss * share * self.accelerator.num_processes

    def _mean_loss(self, model: Any, inputs: dict[str, Any], sft_weight: Any) -> torch.Tensor:
        """Upstream's mean loss of this rank's pairs, whose metrics are added to the sums."""
        trainer: Any = self
        pairs, part = inputs.pop("pairs"), "train" if trainer.model.training else "validation"
        num_pairs = int((pairs >= 0).sum())
        if self.reference is not None:
            chosen, rejected = self.reference.of(pairs, part)
        else:
            chosen, rejected = reference_log_probabilities(trainer, self.model, inputs)
        if sft_weight is not None:
            self.loss_weights[-1] = sft_weight
        known = inputs | {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        with _own_numbers(self.accelerator):
            loss: torch.Tensor = trainer._compute_loss(model, known, False)
        logged = self._metrics["train" if part == "train" else "eval"]
        found = {name: logged[theirs][-1] for name, theirs in _METRICS.items()}
        found["reference_accuracy"] = (chosen > rejected).float().mean().item()
        logged.clear()
        self._sums.update({"pairs": num_pairs} | {name: value * num_pairs for name, value in found.items()})
        return loss

    def _summed(self) -> torch.Tensor:
        """This rank's sums, from zero again: the number of pairs, then a sum for each metric."""
        sums, self._sums = self._sums, Counter()
        return torch.tensor([sums[name] for name in ("pairs", *_NAMES)], dtype=torch.float64, device=self.args.device)

    def step_metrics(self) -> dict[str, float]:
        """Means over the pairs since the last logged step, of all ranks."""
        num_pairs, *sums = self.accelerator.reduce(self._summed(), reduction="sum").tolist()
        return {name: value / max(1, num_pairs) for name, value in zip(_NAMES, sums, strict=True)}

    def validation_sums(self, inputs: dict[str, Any]) -> torch.Tensor:
        """The loss of this batch's pairs without its SFT term, tokens, those of chosen answers, and the sums."""
        training, self._sums = self._sums, Counter()
        num_pairs, num_chosen = _counts(inputs["pairs"], inputs["completion_mask"])
        num_tokens = inputs["attention_mask"].sum() * (num_pairs > 0)
        with self.compute_loss_context_manager():
            loss = self._mean_loss(self.model_wrapped, inputs, self.rpo_alpha and 0.0)
        sums = torch.cat([torch.stack([loss * num_pairs, num_tokens, num_chosen]).double(), self._summed()])
        self._sums = training
        return sums

    def validation_metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """The mean loss per pair, with the mean SFT term per token of chosen answers, and the means of the metrics."""
        loss, num_tokens, num_chosen, num_pairs, *others = sums
        metrics = dict(zip(_NAMES, others, strict=True))
        sft = -metrics["chosen_log_probability"] / num_chosen
        return {
            "validation_loss": loss / num_pairs + (self.rpo_alpha or 0.0) * sft,
            "validation_tokens": num_tokens,
            **{f"validation_{name}": value / num_pairs for name, value in metrics.items()},
        }


def _counts(pairs: torch.Tensor, completion_mask: torch.Tensor) -> torch.Tensor:
    """The number of pairs, and of the trained tokens of their chosen answers; both 0 without a pair."""
    num_pairs = (pairs >= 0).sum()
    num_tokens = completion_mask[: len(pairs)].sum() * (num_pairs > 0)
    return torch.stack([num_pairs, num_tokens]).float()


@contextmanager
def _without_second_model() -> Iterator[None]:
    """Keep TRL from loading the reference of a full fine-tune as a model."""
    create = upstream.create_model_from_path
    upstream.create_model_from_path = lambda *_, **__: None
    try:
        yield
    finally:
        upstream.create_model_from_path = create


@contextmanager
def _own_numbers(accelerator: Any) -> Iterator[None]:
    """Keep TRL from gathering a dozen numbers after each pass: ranks may have different numbers of pairs."""
    names = ("gather", "gather_for_metrics")
    for name in names:
        setattr(accelerator, name, lambda value: value)
    try:
        yield
    finally:
        for name in names:
            delattr(accelerator, name)
