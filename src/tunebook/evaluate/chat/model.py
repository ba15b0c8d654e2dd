"""Chat model: loads a model as it was trained and streams its answers as text.

Imports torch, so import it only after the request was checked. There is one conversation, so nothing is padded.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)
from transformers.utils.logging import disable_progress_bar

from tunebook.config.frozen import load_config
from tunebook.config.schema import RunConfig
from tunebook.data.conversation import Conversation, Messages
from tunebook.data.template import ConversationRenderer
from tunebook.errors import DoesNotFitError, RequestError
from tunebook.evaluate.chat import Ending, Generated, Sampling
from tunebook.evaluate.target import Target, bare_config, without_overrides
from tunebook.evaluate.trained_model import (
    SHARE_FOR_COPIES_OF_ONE,
    choose_copies,
    compute_dtype,
    load_trained,
    tokenizer_of_run,
    uses_gpu,
)
from tunebook.model.adapters import is_adapter
from tunebook.model.gpu_memory import place_on_gpus
from tunebook.model.tokenizer import load_tokenizer, stop_ids
from tunebook.record.model_origin import check_base, check_bound, recorded_by_origin, recorded_by_run, uncompared_base
from tunebook.record.run_folder import RUN_FILE

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx")  # the keys that architectures use for it
_UNKNOWN_CONTEXT_TOKENS = 2048
_INCOMPLETE = 0xFFFD  # replacement character for bytes that are not yet a complete character


class ChatModel:
    """A model with the tokenizer it was trained with."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_ids: list[int],
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        self._model: Any = model
        self._model.train(False)
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._autocast_dtype = autocast_dtype
        self._renderer = ConversationRenderer(tokenizer)
        self.context_tokens = _context_tokens(model, tokenizer)

    @property
    def description(self) -> str:
        """Device and number format, for the user."""
        device = self._model.device
        place = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
        return f"{place} in {str(self._autocast_dtype or self._model.dtype).removeprefix('torch.')}"

    def encode(self, messages: Messages) -> list[int]:
        """Encode the messages as tokens, ready for the answer. Raises: DataError if the template refuses them."""
        return self._renderer.prompt_tokens(Conversation.plain(messages))

    def seed(self, seed: int) -> None:
        """Reset the random seed of sampling."""
        torch.manual_seed(seed)

    def generate(
        self,
        tokens: list[int],
        sampling: Sampling,
        on_text: Callable[[str], None],
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> Generated:
        """Answer `tokens`; `on_text` gets each piece when it arrives. Raises: DoesNotFitError if out of memory."""
        streamer = _Streamer(self._tokenizer, self._stop_ids, on_text)
        autocast: Any = nullcontext()
        if self._autocast_dtype is not None:
            autocast = torch.autocast(self._model.device.type, dtype=self._autocast_dtype)
        try:
            prompt = torch.tensor([tokens], device=self._model.device)
            with torch.inference_mode(), autocast:
                self._model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    generation_config=self._settings(sampling),
                    streamer=streamer,
                    stopping_criteria=StoppingCriteriaList([_Interrupted(is_interrupted)]),
                )
        except torch.OutOfMemoryError as error:
            raise DoesNotFitError(
                f"the GPU ran out of memory on a conversation of {len(tokens)} tokens; make it shorter, lower "
                "--max-new-tokens, or answer on the CPU, slowly: put CUDA_VISIBLE_DEVICES= before the command",
                problem_id="chat-out-of-memory",
            ) from error
        unstopped = Ending.interrupted if is_interrupted() else Ending.length
        return Generated(text=streamer.text, ending=Ending.stop if streamer.has_stopped else unstopped)

    def _settings(self, sampling: Sampling) -> Any:
        """Return the model's own generation settings, updated with the requested sampling."""
        settings = deepcopy(self._model.generation_config)
        is_sampled = sampling.temperature > 0
        settings.update(
            max_new_tokens=sampling.max_new_tokens,
            max_length=None,
            num_beams=1,
            use_cache=True,  # training turns it off; without it every token costs a pass over all tokens
            eos_token_id=self._stop_ids,
            pad_token_id=self._stop_ids[0],  # nothing is padded, but transformers warns without it
            do_sample=is_sampled,
            temperature=sampling.temperature if is_sampled else 1.0,
            # transformers' own default, 50, would sample from fewer tokens than requested.
            top_k=(settings.top_k or 0) if is_sampled else 50,
            top_p=(settings.top_p or 1.0) if is_sampled else 1.0,
        )
        return settings


class _Streamer(TextStreamer):
    """Passes text on once it forms complete characters, without the token that ends the answer."""

    def __init__(self, tokenizer: Any, stop_ids: list[int], on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self.text = ""
        self.has_stopped = False
        self._stop_ids = stop_ids
        self._on_text = on_text

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, and then each token."""
        if self.next_tokens_are_prompt or int(value) not in self._stop_ids:
            super().put(value)  # type: ignore[no-untyped-call]
        else:
            self.has_stopped = True

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Pass on a piece."""
        self.text += text
        if text:
            self._on_text(text)

    def _is_chinese_char(self, cp: int) -> bool:
        # transformers holds text back until the last space or Chinese character, which delays other scripts without
        # spaces.
        return cp != _INCOMPLETE


class _Interrupted(StoppingCriteria):
    def __init__(self, is_interrupted: Callable[[], bool]) -> None:
        self._is_interrupted = is_interrupted

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> Any:
        return torch.full((len(input_ids),), self._is_interrupted(), device=input_ids.device)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model ready to answer."""

    model: ChatModel
    system_prompt: str | None  # as used in training
    notes: list[str] = field(default_factory=list)  # sentences for the user: what the model is, and the decisions made


def load(target: Target) -> Loaded:
    """Load a target. Raises: RequestError, DataError (template differs from training), DoesNotFitError."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        return _load(target)
    except RequestError as error:
        if target.run is not None:
            raise
        raise without_overrides(error, target, "tunebook chat ") from error


def _load(target: Target) -> Loaded:
    if target.run is not None:
        trained, config = recorded_by_run(target.run), load_config(target.run / RUN_FILE)
    else:
        trained, config = recorded_by_origin(target.origin) if target.origin else None, bare_config(target)
    tokenizer = load_tokenizer(tokenizer_of_run(config.model, target.folder), is_padded=False)
    check_bound(trained, tokenizer, config.dataset.system_prompt)
    notes: list[str | None] = []
    if target.folder is not None and is_adapter(target.folder):
        check_base(trained, config.model)
        notes.append(uncompared_base(trained, config.model))
    if not tokenizer.chat_template:
        raise RequestError(
            f"the tokenizer of {target.name} has no chat template, so a conversation cannot be written as this model "
            "reads it: it is a base model or was trained on plain text. Name the instruction-tuned version, or a run "
            "that was trained on conversations; if you know its template, save it as chat_template.jinja next to the "
            "tokenizer",
            problem_id="tokenizer-no-template",
        )
    model, placement_notes = _place(config, target, tokenizer)
    if trained is not None:
        notes.append(f"template and tokenizer are those of the run{f' {trained.name}' if target.origin else ''}")
    elif target.run is not None:
        notes.append("without a manifest nothing can be compared")
    else:
        notes.append("the model's own template, without a run")
    notes = [model.description, *placement_notes, *notes]
    return Loaded(model=model, system_prompt=config.dataset.system_prompt, notes=[note for note in notes if note])


def _place(config: RunConfig, target: Target, tokenizer: PreTrainedTokenizerBase) -> tuple[ChatModel, list[str | None]]:
    """Load the model on its device; also return notes about that."""
    model: Any = load_trained(config, target.folder)
    autocast = None  # a CPU computes fastest in the weights' own format
    notes: list[str | None] = []
    if uses_gpu(config):
        autocast = compute_dtype(config)
        if autocast is torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
            autocast = None  # trained on a newer GPU: fp32 loses nothing
        if autocast is torch.float16 and target.run is None:
            model, autocast = model.to(torch.float16), None  # as published, in half the memory
        model, note = place_on_gpus(model, autocast)
        notes = [note, choose_copies(model, autocast, SHARE_FOR_COPIES_OF_ONE)]
    return ChatModel(model, tokenizer, stop_ids=stop_ids(model, tokenizer), autocast_dtype=autocast), notes


def _context_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the model's context size in tokens, from its config, else from its tokenizer."""
    config = model.config.get_text_config()
    found = next((int(getattr(config, key)) for key in _CONTEXT_KEYS if getattr(config, key, None)), None)
    if found is not None:
        return found
    limit = int(tokenizer.model_max_length)
    return limit if limit < 10**9 else _UNKNOWN_CONTEXT_TOKENS  # a tokenizer without a limit has 10**30
