"""`python -m tunebook.doctor.probes.tokenizer RUN_YAML`: load a recipe's tokenizer and try its template, as JSON.

Started with HF_HUB_OFFLINE=1, so that nothing is downloaded: a tokenizer that is not on this machine is `absent`.
`{"is_here", "problem": {id, message} | null, "bos": ..., "template": ...}`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.config.frozen import load_config
from tunebook.config.schema import RunConfig
from tunebook.errors import TunebookError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ABSENT = ("hub-out-of-reach", "hub-cannot-load")  # a named folder that is not there is an error
_TALK = [
    ("user", "Which is larger, 2 or 3?"),
    ("assistant", "3 is larger."),
    ("user", "And 5 or 4?"),
    ("assistant", "5."),
]


def read_tokenizer(config: RunConfig) -> dict[str, Any]:
    """What training would find out about a recipe's tokenizer only once it has begun."""
    from tunebook.model.tokenizer import load_tokenizer, needs_padding

    facts: dict[str, Any] = {"is_here": True, "problem": None, "template": None}
    try:
        tokenizer = load_tokenizer(config.model, is_padded=needs_padding(config))
    except TunebookError as error:
        facts["is_here"] = error.problem_id not in _ABSENT
        return facts | {"problem": _problem(error)}
    facts |= {
        "folder": tokenizer.name_or_path,
        "eos": tokenizer.eos_token,
        "pad": tokenizer.pad_token,
        "bos": tokenizer.bos_token,
    }
    facts |= {"template": _try_template(tokenizer)}
    return facts


def _try_template(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """A conversation of two questions as the template writes it: whether it marks the answers, and its first tokens."""
    from tunebook.data.template import ConversationRenderer

    facts: dict[str, Any] = {"is_there": bool(tokenizer.chat_template), "problem": None}
    if not tokenizer.chat_template:
        return facts
    talk = [{"role": role, "content": text, "train": role == "assistant"} for role, text in _TALK]
    try:
        renderer = ConversationRenderer(tokenizer)
        facts["is_marked"] = renderer.is_marked
        rendered = renderer.render(talk, "a conversation of two questions")
    except TunebookError as error:
        return facts | {"problem": _problem(error)}
    return facts | {
        "num_answers": 2,
        "num_found": len(rendered.spans),
        "leading_bos": _leading_bos(tokenizer, rendered.text, add_special_tokens=False),
        "leading_bos_if_added": _leading_bos(tokenizer, rendered.text, add_special_tokens=True),
    }


def _leading_bos(tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool) -> int:
    """How many BOS tokens the text begins with."""
    if tokenizer.bos_token_id is None:
        return 0
    ids = tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
    count = 0
    for token in ids:
        if token != tokenizer.bos_token_id:
            break
        count += 1
    return count


def _problem(error: TunebookError) -> dict[str, Any]:
    return {"id": error.problem_id, "message": error.message}


if __name__ == "__main__":
    print(json.dumps(read_tokenizer(load_config(Path(sys.argv[1])))))
