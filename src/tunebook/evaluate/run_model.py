"""A run's model as lm-evaluation-harness sees it: already loaded, with the run's tokenizer.

Imports the harness and torch, so it is only imported once an evaluation starts. How its requests are answered in
batches is `request_model`'s business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lm_eval.models.huggingface import HFLM

from tunebook.evaluate.bound_model import stop_ids

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class RunModel(HFLM):  # type: ignore[misc]  # the harness has no type marker
    """HFLM around a model object; stops at the tokenizer's EOS, adds no second BOS."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int,
        compute_dtype: torch.dtype | None,
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
        assert model.generation_config is not None
        model.generation_config.eos_token_id = stop_ids(model, tokenizer)
