"""A run's model as lm-evaluation-harness sees it: already loaded, with the run's tokenizer.

Imports the harness and torch, so it is only imported by `harness` once an evaluation starts. The three methods that
are overridden are the harness' places where one batch is computed or asked for; a test pins them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lm_eval.models.huggingface import HFLM

from tunebook.evaluate.bound_model import stop_ids
from tunebook.evaluate.progress import AnswerProgress

if TYPE_CHECKING:
    import torch
    from lm_eval.api.instance import Instance
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class RunModel(HFLM):  # type: ignore[misc]  # the harness has no type marker
    """HFLM around a model object; stops at the tokenizer's EOS, adds no second BOS, reports its progress."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int,
        compute_dtype: torch.dtype | None,
        progress: AnswerProgress,
    ) -> None:
        # A chat template writes BOS itself where the model wants one, and training tokenised its text without adding
        # another. Text without a template keeps the tokenizer's own habit.
        add_bos_token = None if tokenizer.chat_template is None else False
        super().__init__(
            pretrained=model,
            tokenizer=tokenizer,
            batch_size=batch_size,
            mixed_precision_dtype=compute_dtype,
            add_bos_token=add_bos_token,
        )
        self._progress = progress
        assert model.generation_config is not None
        model.generation_config.eos_token_id = stop_ids(model, tokenizer)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Answers to prompts."""
        self._progress.expect(len(requests))
        answers: list[str] = super().generate_until(requests, disable_tqdm=True)
        return answers

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Log-likelihoods of given answers."""
        self._progress.expect(len(requests))
        likelihoods: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return likelihoods

    def _model_generate(self, context: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        generated: torch.Tensor = super()._model_generate(context, *args, **kwargs)
        self._progress.advance(context.shape[0])
        return generated

    def _model_call(self, inps: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        logits: torch.Tensor = super()._model_call(inps, *args, **kwargs)
        self._progress.advance(inps.shape[0])
        return logits
