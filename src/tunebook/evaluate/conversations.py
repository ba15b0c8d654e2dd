"""Held-out conversations as harness documents: the prompt is what the run's own chat template makes of them.

Everything but the last turn is rendered with the generation prompt added; the last turn is the expected answer. Written
anew for every evaluation, because the harness must see this run's template and not another's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.config.choices import Format
from tunebook.data.formats import FormatSettings, Normaliser
from tunebook.data.problems import DocumentError, DocumentProblems
from tunebook.data.readers import read_records
from tunebook.errors import DataError
from tunebook.files import atomic_write_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Turn = dict[str, str]  # role, content
GROUP_KEY = "task"  # beside the conversation in its file: what its score is counted under
UNGROUPED = "all"  # the group of conversations that name none


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A held-out conversation; the last turn is the assistant's and is the expected answer."""

    turns: list[Turn]
    group: str


@dataclass(frozen=True, kw_only=True)
class Item:
    """One document as the harness reads it."""

    prompt: str
    answer: str
    task: str  # the group its score is counted under


def write_items(items: Iterable[Item], file: Path) -> None:
    """Write the documents as JSONL."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # In one step: two evaluations of one run may be at work.
    atomic_write_text(file, "".join(json.dumps(asdict(item), ensure_ascii=False) + "\n" for item in items))


def read_conversations(file: Path, system_prompt: str | None) -> list[Conversation]:
    """Read a file of held-out conversations, in any format that conversations are trained on.

    `system_prompt` is put before conversations that have none, as in training. Raises: DataError with every problem.
    """
    problems = DocumentProblems(str(file))
    normaliser = Normaliser(Format.auto, FormatSettings(system_prompt=system_prompt))
    conversations = []
    for number, record in read_records(file, problems, normaliser.account):
        try:
            turns = _turns_with_answer(normaliser.row(record))
        except DocumentError as error:
            problems.add(number, error)
        else:
            conversations.append(Conversation(turns=turns, group=str(record.get(GROUP_KEY, UNGROUPED))))
    problems.num_documents = len(conversations)
    problems.raise_if_any()
    if not conversations:
        raise DataError(
            f"{file} holds no conversation, so there is nothing to evaluate on", problem_id="data-file-empty"
        )
    return conversations


def _turns_with_answer(row: dict[str, Any]) -> list[Turn]:
    turns = [{"role": turn["role"], "content": turn["content"]} for turn in row.get("messages", [])]
    if not turns:
        raise DocumentError("it is no conversation; write it as ShareGPT or messages")
    if turns[-1]["role"] != "assistant":
        raise DocumentError("it must end with the assistant's turn, which is the expected answer")
    return turns


def render_items(conversations: Iterable[Conversation], tokenizer: PreTrainedTokenizerBase) -> list[Item]:
    """One document per conversation, with the template of this tokenizer."""
    from tunebook.data.template import ConversationRenderer

    renderer = ConversationRenderer(tokenizer)
    return [
        Item(
            prompt=renderer.prompt(conversation.turns[:-1]),
            answer=conversation.turns[-1]["content"],
            task=conversation.group,
        )
        for conversation in conversations
    ]


def check_prompt_lengths(items: list[Item], tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int) -> None:
    """Refuse prompts that the harness would cut at their beginning to make room for the answer.

    Raises: DataError naming how many and the longest.
    """
    encoded = tokenizer([item.prompt for item in items], add_special_tokens=False)["input_ids"]
    lengths = [len(tokens) for tokens in encoded]
    num_long = sum(length > max_prompt_tokens for length in lengths)
    if num_long:
        raise DataError(
            f"{num_long} of {len(items)} held-out prompts are longer than the {max_prompt_tokens} tokens that the "
            f"model's context leaves beside the answer (the longest has {max(lengths)}), and the harness would cut "
            "their beginning; shorten them, or lower generation_kwargs.max_gen_toks in the task's file",
            problem_id="heldout-too-long",
        )
