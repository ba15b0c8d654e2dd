"""A run's model behind lm-evaluation-harness' interface: it finds the batch size and shares requests with processes.

Imports the harness and torch, so import it only when there is something to compute. Every process runs the harness as
if it were alone, and answers a share of the requests on its own GPU. All of them then get all answers, and an error of
one is an error of all, so that it costs one task. (The harness' own division among ranks needs an item for each rank,
and adds requests to the last one.)
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import find_executable_batch_size, gather_object
from lm_eval.models.huggingface import HFLM

from tunebook.errors import DoesNotFitError
from tunebook.evaluate.harness import SEEDS
from tunebook.hardware.detect import detect_machine
from tunebook.model.gpu_memory import is_out_of_memory
from tunebook.model.tokenizer import stop_ids

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_LARGEST_ON_GPU = 256  # rows; more do not make a GPU faster, for models of any size
_LARGEST_ON_CPU = 32  # more are hardly faster
_SHARE_OF_HOST_MEMORY = 0.25  # for one batch's logits on a CPU, where running out of memory kills the process


class GeneratedText(str):
    """An answer that knows whether the limit of new tokens cut it off; also after pickling."""

    is_cut = False


class RequestModel(HFLM):  # type: ignore[misc]  # the harness has no type marker
    """HFLM around a model object; stops at the tokenizer's EOS, adds no second BOS."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int | None,
        compute_dtype: torch.dtype | None,
        process: int = 0,
        num_processes: int = 1,
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
        model.generation_config.eos_token_id = self._ends = stop_ids(model, tokenizer)
        self.set_cache_hook(self)  # the harness reports each answer to it, in the order of the batch
        self._asked_size = batch_size  # None: the largest that fits
        self._process, self._num_processes = process, num_processes
        self._are_cut: deque[bool] = deque()  # of the batch that was just generated, in its order
        self._cut_texts: set[str] = set()

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return log-likelihoods of given answers."""
        return self._answer("loglikelihood", requests)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return log-likelihoods of whole texts."""
        return self._answer("loglikelihood_rolling", requests)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return generated answers to prompts, as `GeneratedText`."""
        return self._answer("generate_until", requests)

    def prompted(self) -> dict[str, Any]:
        """Return stop tokens, whether BOS is added, and the device, for the record."""
        return {
            "stop_tokens": self.tokenizer.convert_ids_to_tokens(self._ends),
            "adds_bos": self.add_bos_token,
            "device": ", ".join(sorted({str(parameter.device) for parameter in self.model.parameters()})),
        }

    def add_partial(self, attr: str, req: Sequence[Any], res: Any) -> None:
        """Note an answer of the batch that was just generated."""
        if attr == "generate_until" and self._are_cut.popleft():
            self._cut_texts.add(res)

    def _answer(self, kind: str, requests: Sequence[Instance]) -> list[Any]:
        """Return answers in the order of the requests, computed by all processes."""
        if self._num_processes == 1:
            return self._answer_alone(kind, requests)
        # The harness computes a context once for all its single-token continuations, so they stay together.
        by_context: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            by_context.setdefault(str(request.args[0]), []).append(index)
        contexts = sorted(by_context, key=len)[self._process :: self._num_processes]
        share = [index for context in contexts for index in by_context[context]]
        found: Any
        try:
            found = dict(zip(share, self._answer_alone(kind, [requests[index] for index in share]), strict=True))
        except Exception as error:  # of this process alone: the others would wait for it
            found = error
        answers: dict[int, Any] = {}
        for part in gather_object([found]):
            if isinstance(part, Exception):
                raise part
            answers |= part
        return [answers[index] for index in range(len(requests))]

    def _answer_alone(self, kind: str, requests: Sequence[Instance]) -> list[Any]:
        """Return answers in the order of the requests. Raises: DoesNotFitError if no batch size fits.

        The harness answers the longest requests first, so a batch that is too large fails at once. Answers do not
        depend on the size, because rows are computed independently.
        """
        if not requests:
            return []
        answer: Any = getattr(super(), kind)

        def attempt(size: int) -> list[Any]:
            self.batch_size_per_gpu = size
            self._are_cut.clear()
            self._cut_texts.clear()
            torch.manual_seed(SEEDS["torch"])  # otherwise sampled answers would depend on the number of attempts
            return list(answer(list(requests), disable_tqdm=self._process > 0 or not sys.stderr.isatty()))

        try:
            if self._asked_size is not None:
                answers = attempt(self._asked_size)
            else:
                size = min(self._largest(kind, requests), len(requests))
                answers = find_executable_batch_size(attempt, starting_batch_size=size)()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) and "No executable batch size" not in str(error):
                raise
            raise DoesNotFitError(
                f"a batch of {self._asked_size or 1} requests does not fit into the memory next to the model; use "
                "--batch-size auto for the largest that fits, end what else runs there, or use more GPUs",
                problem_id="batch-does-not-fit",
            ) from error
        if kind == "generate_until":
            answers = [GeneratedText(text) for text in answers]
            for text in answers:
                text.is_cut = text in self._cut_texts
        return answers

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any) -> torch.Tensor:
        """Generate a batch, and note for each row whether it had no end."""
        rows: torch.Tensor = super()._model_generate(context, max_length=max_length, stop=stop, **options)
        for tokens in rows[:, context.shape[1] :].tolist():
            has_end = not set(tokens).isdisjoint(self._ends)
            self._are_cut.append(not has_end and not any(end and end in self.tok_decode(tokens) for end in stop))
        return rows

    def _largest(self, kind: str, requests: Sequence[Instance]) -> int:
        """Return the largest batch size to try; on a CPU, whose logits fit into a share of the memory."""
        if self.device.type != "cpu":
            return _LARGEST_ON_GPU
        if kind == "generate_until":
            return _LARGEST_ON_CPU
        longest = max(("".join(map(str, request.args)) for request in requests), key=len)
        num_tokens = min(self.max_length, len(self.tok_encode(longest)) + 1)
        logits_gib = 2 * 4 * num_tokens * self.model.config.vocab_size / 2**30  # and as many log-probabilities
        memory_gib = detect_machine(no_gpu_because="the host's memory is asked for").host_memory_gib
        return max(1, min(_LARGEST_ON_CPU, int(_SHARE_OF_HOST_MEMORY * memory_gib / logits_gib)))
