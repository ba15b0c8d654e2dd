"""The leak probe: before step 0 every rank verifies, with its wrapped model and kernels, that packed rows are isolated.

It uses the run's own collator and forward pass, so that it detects whatever would leak in training: a mask, a cache,
wrong positions, a kernel that ignores the boundaries of documents.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tunebook.config.choices import PackingMode, Switch
from tunebook.config.schema import RunConfig
from tunebook.errors import InvalidTrainingError
from tunebook.facts.attention import FLEX
from tunebook.model.fp8 import plain_products
from tunebook.model.parameters import has_experts
from tunebook.parallel.deepspeed import forget_parameter_order
from tunebook.record.manifest import add_to_manifest
from tunebook.train.image_batches import ImageCollator
from tunebook.train.isolation import (
    LENGTHS,
    LENGTHS_FOR_FLEX,
    Isolation,
    leaks,
    measure_isolation,
    tolerance,
)
from tunebook.train.sequence import SequenceGroup

if TYPE_CHECKING:
    from PIL.Image import Image

LEAK_PROBE_KEY = "leak_probe"  # in the manifest


class LeakProbe(TrainerCallback):
    """Stops a run whose packed documents affect each other, on all ranks together, and records the measurements."""

    def __init__(self, config: RunConfig, trainer: Any, folder: Path) -> None:
        self.config = config
        self.trainer = trainer
        self.folder = folder

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raises: InvalidTrainingError if documents leak on any rank."""
        if self.config.packing.mode is not PackingMode.isolated:
            self._record(state, {"checked": False, "why": "padded rows hold one document each"})
            return
        precision, facts = self.config.precision, self.config.model.facts
        allowed = tolerance(
            precision.compute,
            uses_tf32=precision.tf32 is Switch.enabled,
            has_experts=facts is not None and has_experts(facts),
        )
        ranks: list[Isolation] = gather_object([self._measure()])
        worst = next((rank for rank, isolation in enumerate(ranks) if leaks(isolation, allowed)), 0)
        blind = [rank for rank, isolation in enumerate(ranks) if not allowed.sees_leaks(isolation)]
        isolation = ranks[worst]
        self._record(
            state,
            {"checked": True, "ranks": len(ranks), "worst_rank": worst, "tolerance": asdict(allowed)}
            | {"sees_leaks": not blind, "loss_difference": isolation.loss_difference}
            | asdict(isolation),
        )
        compute = precision.compute.value
        setting = f"{type(self.trainer.model).__name__}, attention={self.config.attention.implementation.value}"
        if wrong := leaks(isolation, allowed):
            raise InvalidTrainingError(
                f"documents that share a packed row affect each other: {'; '.join(wrong)} (rank {worst}, {setting}). "
                f"Rounding in {compute} explains at most {allowed.moved:.2g} if only the other document changes, "
                f"{allowed.between_shapes(isolation):.2g} between rows of other lengths and {allowed.loss:.2g} in the "
                "loss. Nothing was trained. Try packing=padded, or another attention",
                problem_id="leak",
            )
        if blind:
            raise InvalidTrainingError(
                "it cannot be verified that documents that share a packed row are isolated: a leak would change logits "
                f"by only {ranks[blind[0]].leaking:.2g}, and rounding in {compute} may change them by "
                f"{allowed.moved:.2g} (rank {blind[0]}, {setting}). Nothing was trained. Use packing=padded, which "
                "needs no verification",
                problem_id="leak-not-seen",
            )

    def _measure(self) -> Isolation:
        model, sequence = self.trainer.model_wrapped, self.trainer.sequence
        vocab_size = self.trainer.model.config.get_text_config().vocab_size
        lengths = LENGTHS_FOR_FLEX if self.config.attention.implementation is FLEX else LENGTHS
        model.eval()  # dropout would differ between two passes; each training step sets the other mode
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.no_grad(), torch.random.fork_rng(devices), plain_products(model):
            try:
                forward = TrainingForward(self.trainer, sequence)
                isolation = measure_isolation(forward, vocab_size, _lengths(lengths, sequence), forward.image)
            except ValueError as error:
                if "packed" not in str(error):
                    raise
                raise InvalidTrainingError(
                    f"{type(self.trainer.model).__name__} cannot be trained on packed rows as it is installed here: "
                    f"{error} Nothing was trained. Or type packing=padded",
                    problem_id="leak",
                ) from error
            forget_parameter_order(model)  # training has a backward pass too
        return isolation

    def _record(self, state: TrainerState, entry: dict[str, Any]) -> None:
        if state.is_world_process_zero:
            add_to_manifest(self.folder, {LEAK_PROBE_KEY: entry})


class TrainingForward:
    """The forward pass of training: the trainer's collator, the wrapped model, and the call of its loss."""

    def __init__(self, trainer: Any, sequence: SequenceGroup | None = None) -> None:
        self.trainer = trainer
        self.sequence = sequence  # all its ranks get the same documents
        self.image: list[int] = []  # the tokens of an image, where the run has some
        if isinstance(trainer.row_collator, ImageCollator):
            self.image = trainer.row_collator.processor.blank()[0]

    def logits(self, documents: list[list[int]]) -> torch.Tensor:
        """Logits (num_tokens, vocab_size) in float32 of all documents' tokens, end to end."""
        inputs = self._inputs(documents)
        for name in ("labels", "shift_labels"):
            inputs.pop(name, None)
        logits: torch.Tensor = self._call(inputs).logits
        logits = logits.reshape(-1, logits.shape[-1]).float()
        return logits if self.sequence is None else self.sequence.gather(logits)

    def loss(self, documents: list[list[int]]) -> tuple[float, int]:
        """The summed negative log-likelihood from the fused head, and how many tokens it counts."""
        outputs = self._call(self._inputs(documents) | {"fused_lm_head": True})
        totals = torch.stack([-outputs.log_probs.double().sum(), outputs.label_mask.sum().double()])
        loss, num_tokens = (totals if self.sequence is None else self.sequence.summed(totals)).tolist()
        return loss, int(num_tokens)

    def _inputs(self, documents: list[list[int]]) -> dict[str, Any]:
        tokens = [token for document in documents for token in document]
        row = {"input_ids": tokens, "labels": list(tokens), "seq_lengths": [len(document) for document in documents]}
        collate = self.trainer.row_collator
        batch = collate.with_images([row], self._pictures(tokens)) if self.image else collate([row])
        inputs: dict[str, Any] = self.trainer._prepare_inputs(batch)
        return inputs

    def _pictures(self, tokens: list[int]) -> list[Image]:
        """A picture for each image among the tokens, whose shade follows from the token before it."""
        blank, length = self.trainer.row_collator.processor.blank()[1], len(self.image)
        places = [place for place in range(len(tokens)) if tokens[place : place + length] == self.image]
        return [blank.point([tokens[place - 1] % 256] * 768) for place in places]

    def _call(self, inputs: dict[str, Any]) -> Any:
        forget_parameter_order(self.trainer.model_wrapped)  # passes with and without the fused head take turns
        with self.trainer.compute_loss_context_manager():
            return self.trainer.model_wrapped(**inputs, use_cache=False)


def _lengths(lengths: tuple[int, int], sequence: SequenceGroup | None) -> tuple[int, int]:
    """The documents' lengths, rounded up so that each row has equal parts."""
    size = 1 if sequence is None else sequence.size
    first, second = (-(-length // size) * size for length in lengths)
    return first, second
