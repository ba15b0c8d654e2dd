"""A run's model behind lm-evaluation-harness' interface: it finds the batch size and shares requests with helpers.

Imports the harness and torch, so import it only when there is something to compute. The harness calls it with one kind
of request of one task and sorts requests by length, longest first. So a batch that is too large fails at once, and the
call is repeated with a smaller one. It also counts the requests, and notes how each generated answer ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils.memory import clear_device_cache
from lm_eval.models.huggingface import HFLM

from tunebook.errors import DoesNotFitError
from tunebook.evaluate.finish import FinishLog, finish_of
from tunebook.evaluate.progress import AnswerProgress
from tunebook.hardware.detect import detect_machine
from tunebook.model.gpu_memory import is_out_of_memory
from tunebook.model.tokenizer import stop_ids

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tunebook.evaluate.helpers import Helpers

_LARGEST_ON_GPU = 256  # rows; more do not make a GPU faster, for models of any size
_LARGEST_ON_CPU = 32  # more are hardly faster, and running out of memory kills the process
_SHARE_OF_HOST_MEMORY = 0.25  # for one batch's logits on a CPU, where running out of memory kills the process


class RequestModel(HFLM):  # type: ignore[misc]  # the harness has no type marker
    """HFLM around a model object; stops at the tokenizer's EOS, adds no second BOS."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int | None,
        compute_dtype: torch.dtype | None,
        progress: AnswerProgress,
        helpers: Helpers | None = None,
    ) -> None:
        super().__init__(
            pretrained=model,
            tokenizer=tokenizer,
            batch_size=batch_size or 1,
            mixed_precision_dtype=compute_dtype,
            # A chat template writes BOS itself if the model wants one, and training added no second BOS. Text without a
            # template gets the tokenizer's default.
            add_bos_token=None if tokenizer.chat_template is None else False,
        )
        assert model.generation_config is not None
        model.generation_config.eos_token_id = stop_ids(model, tokenizer)
        self._finishes = FinishLog()
        self.set_cache_hook(_Counter(progress, self._finishes))
        self._asked_size = batch_size  # None: the largest that fits
        self._largest = _LARGEST_ON_CPU if self.device.type == "cpu" else _LARGEST_ON_GPU
        self._allowed = self._largest
        self._progress = progress
        self._helpers = helpers

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return log-likelihoods of given answers."""
        return self._answer("loglikelihood", requests)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Return log-likelihoods of whole texts."""
        return self._answer("loglikelihood_rolling", requests)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Return generated answers to prompts."""
        return self._answer("generate_until", requests)

    def prompted(self) -> dict[str, Any]:
        """Return stop tokens, whether BOS is added, and the device, for the record."""
        assert self.model.generation_config is not None
        return {
            "stop_tokens": self.tokenizer.convert_ids_to_tokens(self.model.generation_config.eos_token_id),
            "adds_bos": self.add_bos_token,
            "device": ", ".join(sorted({str(parameter.device) for parameter in self.model.parameters()})),
        }

    def _answer(self, kind: str, requests: list[Instance]) -> list[Any]:
        self._progress.expect(len(requests))
        if self._helpers is None:
            return self.answer_alone(kind, requests)
        return self._helpers.share(kind, requests, self.answer_alone)

    def answer_alone(self, kind: str, requests: Sequence[Instance]) -> list[Any]:
        """Return answers in the order of the requests. Raises: DoesNotFitError if no allowed batch size fits.

        If memory runs out, half as many rows are tried; the next call may take twice as many again. Answers do not
        depend on it, because rows are computed independently.
        """
        if not requests:
            return []
        size = self._asked_size or max(1, min(self._allowed, len(requests), self._limit_on_cpu(kind, requests)))
        random_state, num_done = _random_state(), self._progress.num_done
        while (answers := self._try(kind, requests, size)) is None:
            if self._asked_size is not None or size == 1:
                raise DoesNotFitError(
                    f"a batch of {size} requests does not fit into the memory next to the model; type --batch-size "
                    "auto for the largest that fits, end what else runs there, or use more GPUs",
                    problem_id="batch-does-not-fit",
                )
            size = self._allowed = size // 2
            self._progress.advance(num_done - self._progress.num_done)
            clear_device_cache(garbage_collection=True)
            _set_random_state(random_state)  # otherwise sampled answers would depend on the number of attempts
        self._allowed = min(self._largest, 2 * self._allowed)
        if kind == "generate_until":
            return self._finishes.with_finish([request.args for request in requests], answers)
        return answers

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any) -> torch.Tensor:
        """Generate a batch, and note how each row ended."""
        rows: torch.Tensor = super()._model_generate(context, max_length=max_length, stop=stop, **options)
        assert self.model.generation_config is not None
        found = self.model.generation_config.eos_token_id
        ends = set(found if isinstance(found, list) else [found])
        finishes = []
        for tokens in rows[:, context.shape[1] :].tolist():
            end = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
            finishes.append(finish_of(tokens, self.tok_decode(tokens[:end]), ends, stop))
        self._finishes.note_batch(finishes)
        return rows

    def _try(self, kind: str, requests: Sequence[Instance], size: int) -> list[Any] | None:
        """Return the answers, or None if memory ran out; then nothing refers to the attempt, so it can be freed."""
        self.batch_size_per_gpu = size
        self._finishes.begin()
        answer: Any = getattr(super(), kind)
        try:
            answers: list[Any] = answer(list(requests), disable_tqdm=True)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None
        return answers

    def _limit_on_cpu(self, kind: str, requests: Sequence[Instance]) -> int:
        """Return how many rows of logits fit into a share of the host's memory; a GPU raises an error itself."""
        if self.device.type != "cpu" or kind == "generate_until":
            return self._largest
        longest = max(("".join(map(str, request.args)) for request in requests), key=len)
        num_tokens = min(self.max_length, len(self.tok_encode(longest)) + 1)
        logits_gib = 2 * 4 * num_tokens * self.model.config.vocab_size / 2**30  # and as many log-probabilities
        memory_gib = detect_machine(no_gpu_because="the host's memory is asked for").host_memory_gib
        return int(_SHARE_OF_HOST_MEMORY * memory_gib / logits_gib)


class _Counter:
    """Counts answered requests, in place of the harness' answer cache."""

    dbdict = None  # attribute of the harness' own hook

    def __init__(self, progress: AnswerProgress, finishes: FinishLog) -> None:
        self._progress = progress
        self._finishes = finishes

    def add_partial(self, attr: str, req: Sequence[Any], res: Any) -> None:
        """Count one request."""
        if attr == "generate_until":
            self._finishes.note_answer(req)
        self._progress.advance()


def _random_state() -> tuple[torch.Tensor, list[torch.Tensor]]:
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []


def _set_random_state(state: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])
