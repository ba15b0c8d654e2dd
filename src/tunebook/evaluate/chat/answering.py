"""One answer of a loaded model: messages to tokens by the template, tokens to text as they come.

Token ids are lists of whole numbers; there is one conversation, so nothing is padded.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from tunebook.data.template import ConversationRenderer, Messages
from tunebook.errors import DoesNotFitError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx")  # where architectures keep it
_UNKNOWN_CONTEXT_TOKENS = 2048
_INCOMPLETE = "\ufffd"  # what bytes that do not make a character yet are decoded to


class Ending(Enum):
    """Why an answer ended."""

    stop = "stop"  # the model wrote a token that ends a turn
    length = "length"  # as many tokens as were asked for
    interrupted = "interrupted"


@dataclass(frozen=True, kw_only=True)
class Generated:
    """A finished answer."""

    text: str
    num_tokens: int  # without the one that ends it
    ending: Ending


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen: the likeliest at temperature 0, drawn otherwise."""

    max_new_tokens: int
    temperature: float
    seed: int


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
        self._tokenizer: Any = tokenizer
        self._stop_ids = stop_ids
        self._autocast_dtype = autocast_dtype
        self._renderer = ConversationRenderer(tokenizer)
        self.context_tokens = _context_tokens(model, tokenizer)

    @property
    def device(self) -> str:
        """Where it computes, for people."""
        import torch

        device = self._model.device
        return f"{torch.cuda.get_device_name(device)}" if device.type == "cuda" else "the CPU"

    @property
    def format(self) -> str:
        """The number format it computes in, for people."""
        return str(self._autocast_dtype or self._model.dtype).removeprefix("torch.")

    def encode(self, messages: Messages) -> list[int]:
        """The messages as tokens, ready for the answer. Raises: DataError when the template refuses them."""
        return self._renderer.prompt_tokens(messages)

    def seed(self, seed: int) -> None:
        """Start drawing anew."""
        import torch

        torch.manual_seed(seed)

    def generate(
        self,
        tokens: list[int],
        sampling: Sampling,
        on_text: Callable[[str], None],
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> Generated:
        """Answer to `tokens`; `on_text` gets every piece of text at once. Raises: DoesNotFitError out of memory."""
        import torch

        stream = _AnswerStream(self._tokenizer, frozenset(self._stop_ids), on_text, num_prompt_parts=1)
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
                    streamer=stream,
                    stopping_criteria=_stopping_when(is_interrupted),
                )
        except torch.OutOfMemoryError as error:
            raise DoesNotFitError(
                f"the GPU ran out of memory on a conversation of {len(tokens)} tokens; make it shorter, lower "
                "--max-new-tokens, or answer on the CPU, slowly: put CUDA_VISIBLE_DEVICES= before the command",
                problem_id="chat-out-of-memory",
            ) from error
        stream.flush()
        unstopped = Ending.interrupted if is_interrupted() else Ending.length
        ending = Ending.stop if stream.has_stopped else unstopped
        return Generated(text=stream.text, num_tokens=stream.num_tokens, ending=ending)

    def _settings(self, sampling: Sampling) -> Any:
        """The model's own generation settings, with what was asked for."""
        from copy import deepcopy

        settings = deepcopy(self._model.generation_config)
        is_drawn = sampling.temperature > 0
        settings.update(
            max_new_tokens=sampling.max_new_tokens,
            max_length=None,
            num_beams=1,
            use_cache=True,  # training turns it off, and without it every token costs a pass over all of them
            eos_token_id=self._stop_ids,
            pad_token_id=self._stop_ids[0],  # nothing is padded, but none would be warned about
            do_sample=is_drawn,
            temperature=sampling.temperature if is_drawn else 1.0,
            # transformers' own default, 50, would draw from fewer tokens than was asked for.
            top_k=(settings.top_k or 0) if is_drawn else 50,
            top_p=(settings.top_p or 1.0) if is_drawn else 1.0,
        )
        return settings


class _AnswerStream:
    """What `generate` hands its tokens to: decodes them and passes on text as soon as it is whole characters.

    A window of two steps is decoded, not the whole answer, so that a long one does not get slower; a token's text can
    depend on the one before it (a space in front of a word), which the window's first half is there for.
    """

    def __init__(
        self, tokenizer: Any, stop_ids: frozenset[int], on_text: Callable[[str], None], *, num_prompt_parts: int
    ) -> None:
        self.text = ""
        self.has_stopped = False
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._on_text = on_text
        self._num_prompt_parts = num_prompt_parts  # generate hands over the prompt first
        self._tokens: list[int] = []
        self._start = 0  # of the window
        self._passed_on = 0  # tokens whose text has been passed on

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def put(self, value: torch.Tensor) -> None:
        """Take the next token."""
        if self._num_prompt_parts:
            self._num_prompt_parts -= 1
            return
        for token in value.reshape(-1).tolist():
            if token in self._stop_ids:
                self.has_stopped = True
            else:
                self._tokens.append(token)
                self._pass_on(is_last=False)

    def end(self) -> None:
        """Nothing: an interrupted generation does not come here, so `flush` does it."""

    def flush(self) -> None:
        """Pass on bytes that never became a character."""
        self._pass_on(is_last=True)

    def _pass_on(self, *, is_last: bool) -> None:
        known = self._decode(self._tokens[self._start : self._passed_on])
        whole = self._decode(self._tokens[self._start :])
        piece = whole[len(known) :]
        if not piece or (whole.endswith(_INCOMPLETE) and not is_last):
            return
        self._start, self._passed_on = self._passed_on, len(self._tokens)
        self.text += piece
        self._on_text(piece)

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def _stopping_when(is_interrupted: Callable[[], bool]) -> Any:
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Interrupted(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> Any:
            return torch.full((len(input_ids),), is_interrupted(), device=input_ids.device)

    return StoppingCriteriaList([Interrupted()])


def _context_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """How many tokens the model reads at once, by its config, else by its tokenizer."""
    config = model.config.get_text_config()
    found = next((int(getattr(config, key)) for key in _CONTEXT_KEYS if getattr(config, key, None)), None)
    if found is not None:
        return found
    limit = int(tokenizer.model_max_length)
    return limit if limit < 10**9 else _UNKNOWN_CONTEXT_TOKENS  # a tokenizer without a limit has 10**30
