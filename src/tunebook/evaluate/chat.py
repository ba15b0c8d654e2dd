"""`tunebook chat`: talk to a run or a model in the terminal, with its own tokenizer, template and system prompt.

With a question or piped input, exactly one answer goes to stdout and everything else to stderr. torch is imported only
after the request was checked.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from tunebook.config.frozen import load_config
from tunebook.config.unsafe_text import printable
from tunebook.data.conversation import Conversation
from tunebook.data.images import ImageReader, open_image, reference_to
from tunebook.data.problems import DocumentError
from tunebook.data.template import ConversationRenderer
from tunebook.data.turns import IMAGE
from tunebook.errors import RequestError, TunebookError
from tunebook.evaluate.placement import place
from tunebook.evaluate.target import Target, bare_config, find_target
from tunebook.evaluate.trained_model import bound_tokenizer, load_to_answer, uses_gpu
from tunebook.model.processor import ImageProcessor, load_image_processor
from tunebook.model.tokenizer import stop_ids
from tunebook.record.model_origin import origin_of
from tunebook.record.run_folder import RUN_FILE
from tunebook.terminal import print_text, quiet_libraries

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROMPT = "> "
HELP = """\
/reset forgets the conversation. /exit, Ctrl-D, or Ctrl-C here at the prompt end.
Ctrl-C ends an answer that is being written."""
_COMMAND = re.compile(r"/[a-zA-Z]+")
_UNKNOWN_CONTEXT_TOKENS = 2048
_DECODE = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen: the most likely one at temperature 0, otherwise sampled."""

    max_new_tokens: int
    temperature: float
    seed: int


@dataclass(kw_only=True)
class Chat:
    """A model with the tokenizer it was trained with, and one conversation."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    stop_ids: list[int]
    sampling: Sampling
    autocast_dtype: torch.dtype | None = None
    system_prompt: str | None = None
    processor: ImageProcessor | None = None  # None: no images are shown to it
    images: list[dict[str, Any]] = field(default_factory=list)  # shown with the first question
    turns: list[dict[str, Any]] = field(default_factory=list)  # the user's and the assistant's turns, alternating

    def reset(self) -> None:
        """Forget the turns; the same questions get the same answers again."""
        import torch

        self.turns = []
        torch.manual_seed(self.sampling.seed)

    @property
    def context_tokens(self) -> int:
        """The model's context size in tokens."""
        config: Any = self.model.config.get_text_config()
        return int(getattr(config, "max_position_embeddings", None) or _UNKNOWN_CONTEXT_TOKENS)

    def ask(self, question: str, show: Callable[[str], None]) -> str | None:
        """Answer a question, show the pieces of the answer, keep both; return a note for the user, if any.

        Ctrl-C ends the answer, and what there is of it is kept. Raises: KeyboardInterrupt, RequestError if the
        conversation is too long, DataError if the template refuses it.
        """
        turns: list[dict[str, Any]] = [*self.turns, {"role": "user", "content": question}]
        if self.images and not self.turns:
            turns[0] |= {"content": IMAGE * len(self.images) + question, "images": self.images}
        tokens = self._encode(turns)
        if len(tokens) >= self.context_tokens:
            raise RequestError(
                f"the conversation has {len(tokens)} tokens with this question, and the model's context is "
                f"{self.context_tokens}; ask less, or begin again with /reset",
                problem_id="chat-too-long",
            )
        pieces: list[str] = []

        def take(piece: str, stream_end: bool = False) -> None:
            pieces.append(piece)
            show(piece)

        try:
            answer = self._generate(tokens, take)
        except KeyboardInterrupt:
            self._keep(turns, "".join(pieces))
            raise
        is_whole = bool(answer) and answer[-1] in self.stop_ids
        text = str(self.tokenizer.decode(answer[:-1] if is_whole else answer, **_DECODE))
        self._keep(turns, text)
        if not is_whole:
            return f"cut off after {len(answer)} tokens; --max-new-tokens allows more, up to the context's size"
        return None if text else "the model gave an empty answer, which is not kept"

    def _keep(self, turns: list[dict[str, Any]], answer: str) -> None:
        if answer:  # a template may refuse an empty turn
            self.turns = [*turns, {"role": "assistant", "content": answer}]

    def _encode(self, turns: list[dict[str, Any]]) -> list[int]:
        """The tokens of a conversation, ready for the answer."""
        system = [] if self.system_prompt is None else [{"role": "system", "content": self.system_prompt}]
        conversation = Conversation(messages=[*system, *turns])
        return ConversationRenderer(self.tokenizer).prompt_tokens(conversation, self.processor)

    def _generate(self, tokens: list[int], show: Callable[[str, bool], None]) -> list[int]:
        """Generate an answer and show its text piece by piece; return the new tokens."""
        import torch
        from transformers import TextStreamer

        streamer: Any = TextStreamer(self.tokenizer, skip_prompt=True, **_DECODE)
        streamer.on_finalized_text = show
        model: Any = self.model
        device, settings, sampling = model.device, model.generation_config, self.sampling
        sampled = {"do_sample": True, "temperature": sampling.temperature, "top_k": settings.top_k or 0}
        greedy = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        prompt = torch.tensor([tokens], device=device)
        seen: dict[str, Any] = {}
        if self.processor is not None:
            pictures = [open_image(reference_to(image)) for image in self.images]
            seen = self.processor.pixels(pictures) | self.processor.token_types(prompt.cpu())
            seen = {name: tensor.to(device) for name, tensor in seen.items()}
        with (
            torch.inference_mode(),
            torch.autocast(device.type, dtype=self.autocast_dtype, enabled=self.autocast_dtype is not None),
        ):
            rows = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                **seen,
                max_new_tokens=min(sampling.max_new_tokens, self.context_tokens - len(tokens)),
                eos_token_id=self.stop_ids,
                pad_token_id=self.stop_ids[0],  # nothing is padded, but transformers warns without it
                use_cache=True,  # training turns it off
                streamer=streamer,
                **(sampled if sampling.temperature > 0 else greedy),
            )
        new_tokens: list[int] = rows[0, len(tokens) :].tolist()
        return new_tokens


def load_chat(
    target: Target, sampling: Sampling, system: str | None = None, images: Sequence[str] = ()
) -> tuple[Chat, str]:
    """Load a target; return a chat and its description. `system` replaces the run's system prompt; '' removes it.

    `images` are shown with the first question.
    Raises: RequestError, DataError (the template or tokenizer differs from training), DoesNotFitError.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    if target.run is not None:
        trained, config = origin_of(target.run), load_config(target.run / RUN_FILE)
    else:
        trained, config = target.origin, bare_config(target)
    tokenizer, _ = bound_tokenizer(config, target.folder, trained)
    if not tokenizer.chat_template:
        raise RequestError(
            f"the tokenizer of {target.name} has no chat template; name a model or run that was trained on "
            "conversations, or save the template as chat_template.jinja next to the tokenizer",
            problem_id="tokenizer-no-template",
        )
    processor = None
    if images:
        processor = load_image_processor(config.model, tokenizer, config.dataset.max_image_pixels)
    placement = place(config, target.folder, num_processes=1)
    system_prompt = config.dataset.system_prompt if system is None else system or None
    model, autocast = load_to_answer(config, target.folder, is_sharded=placement.is_sharded)
    chat = Chat(
        model=model,
        tokenizer=tokenizer,
        stop_ids=stop_ids(model, tokenizer),
        sampling=sampling,
        autocast_dtype=autocast if uses_gpu(config) else None,  # a CPU computes fastest in the weights' own format
        system_prompt=system_prompt,
        processor=processor,
        images=[_read_image(name) for name in images],
    )
    chat.reset()
    source = f"those of the run {trained.run}" if trained else "the model's own, and not compared with a run"
    dtype = str(chat.autocast_dtype or model.dtype).removeprefix("torch.")
    return chat, (
        f"{target.name}\n{model.device} in {dtype}, context {chat.context_tokens:,} tokens\n"
        f"template and tokenizer are {source}\nsystem prompt: {system_prompt or 'none'}"
    )


def _read_image(name: str) -> dict[str, Any]:
    try:
        return ImageReader(folder=Path.cwd(), may_download=True).read(name, "--image")
    except DocumentError as error:
        raise RequestError(error.message, problem_id="chat-image") from error


def chat_command(
    target: str,
    outputs: Path,
    *,
    question: str | None,
    is_model: bool,
    system: str | None,
    sampling: Sampling,
    images: Sequence[str] = (),
) -> None:
    """Chat with a run, a checkpoint, a model folder or a model on the hub, or answer one question.

    Raises: RequestError, DataError if the template differs from training, DoesNotFitError.
    """
    if question is None and not sys.stdin.isatty():
        question = sys.stdin.read().rstrip("\r\n")
    if question is not None and not question.strip():
        raise RequestError("there is nothing to answer: the text is empty; write a question", problem_id="chat-no-text")
    model = find_target(target, outputs, is_model=is_model)
    with quiet_libraries():
        with Console(stderr=True).status(Text(f"loading {model.name}")):
            chat, description = load_chat(model, sampling, system, images)
        if question is None:
            with suppress(ImportError):  # Python may lack it: no arrow keys or history
                import readline  # noqa: F401
            console = Console(highlight=False)
            _say(f"{description}\n{HELP}", console)
            converse(chat, console)
            return
        is_shown = sys.stdout.isatty()
        note = chat.ask(question, lambda piece: print(printable(piece) if is_shown else piece, end="", flush=True))
        if note:
            print(f"({note})", file=sys.stderr)
        print()


def _say(text: str, console: Console, style: str = "dim") -> None:
    print_text(printable(text), console, style=style)


def converse(chat: Chat, console: Console, read_line: Callable[[str], str] = input) -> None:
    """Read questions and commands until /exit, Ctrl-D, or Ctrl-C at the prompt."""
    while True:
        try:
            line = read_line(PROMPT).strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if line == "/exit":
            return
        try:
            if line == "/reset":
                chat.reset()
                _say("(a new conversation)", console)
            elif _COMMAND.fullmatch(line):
                _say(HELP, console)
            elif line:
                note: str | None = "stopped"
                try:
                    note = chat.ask(line, lambda piece: console.out(printable(piece), end="", highlight=False))
                except KeyboardInterrupt:  # ends only this answer
                    pass
                finally:
                    console.print()
                if note:
                    _say(f"({note})", console)
        except TunebookError as error:
            _say(error.message, console, style="red")
