"""A run's model behind lm-evaluation-harness' interface: it finds the batch size and shares requests with processes.

Imports the harness and torch, so import it only when there is something to compute. Every process runs the harness as
if it were alone, and answers a share of the requests on its own GPU. All of them then get all answers, and an error of
one is an error of all, so that it costs one task. (The harness' own division among ranks needs an item for each rank,
and adds requests to the last one.)

The answers of each task are kept in a file, under a key that hashes the model and every request of the task. After a
kill, the next evaluation computes only what is not there. The harness' own cache would lose sampled answers, and it
commits a database after each answer.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import find_executable_batch_size, gather_object
from lm_eval.models.huggingface import HFLM

from tunebook.data.images import open_image, reference_to
from tunebook.errors import DoesNotFitError
from tunebook.evaluate.harness import SEEDS, with_images
from tunebook.files import atomic_write_text, read_json, sha256_text
from tunebook.model.tokenizer import stop_ids

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tunebook.model.processor import ImageProcessor

_LARGEST_ON_GPU = 256  # rows; more do not make a GPU faster, for models of any size
_LARGEST_ON_CPU = 8  # more are hardly faster, and running out of memory kills the process
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")


class _Prompt(str):
    """A prompt with its images, which the harness hands on as a text."""

    __slots__ = ("images",)
    images: tuple[str, ...]  # as `SHA256 PATH`


class RequestModel(HFLM):  # type: ignore[misc]  # the harness has no type marker
    """HFLM around a model object; stops at the tokenizer's EOS, adds no second BOS, keeps its answers in `folder`."""

    MULTIMODAL = True  # for the harness

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int | None,
        compute_dtype: torch.dtype | None,
        folder: Path,
        identity: dict[str, Any],
        load_processor: Callable[[], ImageProcessor] | None = None,
        process: int = 0,
        num_processes: int = 1,
    ) -> None:
        """Wrap a model. `identity` is all that its answers depend on, except the requests."""
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
        self._requested_size = batch_size  # at most; None: the largest that fits
        self.folder, self._identity = folder, identity
        self._load_processor = load_processor  # None: no prompt has images
        self._images: list[str] = []  # of the prompts of the next batch
        self._process, self._num_processes = process, num_processes
        self.reused: list[str] = []  # tasks whose answers were kept

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return log-likelihoods of given answers."""
        return self._answer("loglikelihood", requests)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return log-likelihoods of whole texts."""
        return self._answer("loglikelihood_rolling", requests)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return generated answers to prompts."""
        return self._answer("generate_until", requests)

    def prompted(self) -> dict[str, Any]:
        """Return stop tokens, whether BOS is added, and the device, for the record."""
        return {
            "stop_tokens": self.tokenizer.convert_ids_to_tokens(self._ends),
            "adds_bos": self.add_bos_token,
            "device": ", ".join(sorted({str(parameter.device) for parameter in self.model.parameters()})),
        }

    def _answer(self, kind: str, requests: Sequence[Instance]) -> list[Any]:
        """Return answers in the order of the requests, task by task, each computed or read."""
        by_task: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            by_task.setdefault(str(request.task_name), []).append(index)
        answers: dict[int, Any] = {}
        for task, indices in by_task.items():
            answers |= zip(indices, self._of_task(kind, task, [requests[index] for index in indices]), strict=True)
        return [answers[index] for index in range(len(requests))]

    def _of_task(self, kind: str, task: str, requests: Sequence[Instance]) -> list[Any]:
        key = sha256_text(json.dumps([self._identity, kind, [request.args for request in requests]], default=str))
        file = self.folder / f"{_NOT_IN_NAMES.sub('-', task)}-{key[:16]}.json"
        # Another evaluation may write the file now, so that only some processes see it.
        if all(gather_object([file.is_file()])):
            self.reused.append(task)
            return [tuple(answer) if isinstance(answer, list) else answer for answer in read_json(file)]
        answers = self._compute(kind, requests)
        if self._process == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_write_text(file, json.dumps(answers))
        return answers

    def _compute(self, kind: str, requests: Sequence[Instance]) -> list[Any]:
        """Return answers in the order of the requests, computed by all processes."""
        if self._num_processes == 1:
            return self._compute_alone(kind, requests)
        # The harness computes a context once for all its single-token continuations, so they stay together.
        by_context: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            by_context.setdefault(str((request.args[0], request.args[2:])), []).append(index)
        contexts = sorted(by_context, key=len)[self._process :: self._num_processes]
        share = [index for context in contexts for index in by_context[context]]
        result: Any
        try:
            result = dict(zip(share, self._compute_alone(kind, [requests[index] for index in share]), strict=True))
        except Exception as error:  # of this process alone: the others would wait for it
            result = error
        answers: dict[int, Any] = {}
        for part in gather_object([result]):
            if isinstance(part, Exception):
                raise part
            answers |= part
        return [answers[index] for index in range(len(requests))]

    def _compute_alone(self, kind: str, requests: Sequence[Instance]) -> list[Any]:
        """Return answers in the order of the requests, in batches of the given size or smaller ones that fit.

        The harness answers the longest requests first, so a batch that is too large fails at once: its logits take
        rows x tokens x vocabulary x 4 bytes, twice. Answers do not depend on the size: rows are computed independently.
        """
        if not requests:
            return []
        answer: Any = getattr(super(), kind)
        requests = [self._with_images(request) for request in requests]

        def attempt(size: int) -> list[Any]:
            self.batch_size_per_gpu = size
            torch.manual_seed(SEEDS["torch"])  # otherwise sampled answers would depend on the number of attempts
            return list(answer(list(requests), disable_tqdm=self._process > 0 or not sys.stderr.isatty()))

        def smaller() -> int:
            if self.batch_size_per_gpu == 1:
                raise DoesNotFitError(
                    f"a single request of {requests[0].task_name} does not fit in the free memory; end what else runs "
                    "there (nvidia-smi lists it), take a larger GPU, or shorten its prompts or generation_kwargs."
                    "max_gen_toks",
                    problem_id="request-does-not-fit",
                )
            return int(self.batch_size_per_gpu * 0.9)

        largest = self._requested_size or (_LARGEST_ON_CPU if self.device.type == "cpu" else _LARGEST_ON_GPU)
        start = min(largest, len(requests))
        answers: list[Any] = find_executable_batch_size(attempt, start, reduce_batch_size_fn=smaller)()
        return answers

    def _with_images(self, request: Instance) -> Instance:
        """A request as the harness reads those of text, the images going with its prompt."""
        if len(request.args) < 3:
            return request
        images: list[Mapping[str, Any]] = request.args[2]["visual"]
        assert self._load_processor is not None
        prompt = _Prompt(with_images(request.args[0], images, self._load_processor()))
        prompt.images = tuple(map(reference_to, images))
        return replace(request, arguments=(prompt, request.args[1]))

    def tok_batch_encode(self, strings: list[str], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """As the harness, and note the images of the prompts."""
        self._images = [image for text in strings for image in getattr(text, "images", ())]
        encoded: tuple[torch.Tensor, torch.Tensor] = super().tok_batch_encode(strings, **options)
        return encoded

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any) -> torch.Tensor:
        seen = self._seen(context, self._images)
        rows: torch.Tensor = super()._model_generate(context, max_length, stop, **options, **seen)
        return rows

    def _loglikelihood_tokens(self, requests: list[Any], **options: Any) -> list[tuple[float, bool]]:
        """As the harness, but one batch for the choices about the same images: other images may have equal tokens."""
        by_images: dict[tuple[str, ...], list[int]] = {}
        for index, (texts, *_) in enumerate(requests):  # of a whole text: None
            by_images.setdefault(getattr(texts and texts[0], "images", ()), []).append(index)
        answers: dict[int, tuple[float, bool]] = {}
        for images, indices in by_images.items():
            self._images = [*images]
            quiet = {"disable_tqdm": True} if images else {}
            part = super()._loglikelihood_tokens([requests[index] for index in indices], **options | quiet)
            answers |= zip(indices, part, strict=True)
        return [answers[index] for index in range(len(requests))]

    def _model_call(self, inps: torch.Tensor, **_: Any) -> torch.Tensor:
        autocast = self.mixed_precision_dtype
        with torch.no_grad(), torch.autocast(self.device.type, dtype=autocast, enabled=autocast is not None):
            logits: torch.Tensor = self.model(inps, **self._seen(inps, self._images * len(inps))).logits
        return logits

    def _seen(self, ids: torch.Tensor, images: Sequence[str]) -> dict[str, torch.Tensor]:
        """What the model reads of the images, besides tokens."""
        if not images:
            return {}
        assert self._load_processor is not None
        processor = self._load_processor()
        inputs = processor.pixels([*map(open_image, images)]) | processor.token_types(ids.cpu())
        return {name: tensor.to(self.device) for name, tensor in inputs.items()}
