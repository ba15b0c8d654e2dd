"""What documents become: the text of the tokens, those that are trained on in [[ ]], with a hash of the ids.

`templates.yaml`: three conversations by each chat template of TRL, and the documents of docs/data.md. `cases.yaml`:
documents that were once misread, with what `tunebook data` answers.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.golden.record import check, read
from tunebook.config.choices import Format, TrainOn
from tunebook.config.compose import compose
from tunebook.data.corpus import IGNORED_LABEL
from tunebook.data.encode import Encoder
from tunebook.data.formats import FormatSettings, Normalizer
from tunebook.data.prepare import prepare
from tunebook.data.view import show_prepared
from tunebook.errors import TunebookError
from tunebook.model.tokenizer import load_tokenizer
from tunebook.model.tokenizer_files import read_chat_template

from ..data.test_docs import examples
from ..data.test_template_families import (
    ENDS,
    PLAIN,
    REASONED,
    TOOLS,
    TRAINING_FAMILIES,
    WITH_TOOLS,
    Family,
)

CONVERSATIONS: dict[str, dict[str, Any]] = {
    "plain": {"messages": PLAIN},
    "with_tools": {"messages": WITH_TOOLS, "tools": TOOLS},
    "reasoned": {"messages": REASONED},
}
CONFIG = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 300,
    "max_position_embeddings": 4096, "dtype": "float32",
}  # fmt: skip


def shown(tokenizer: Any, ids: list[int], mask: list[bool]) -> str:
    """The text with the trained parts in brackets, and the beginning of the hash of the ids."""
    text, start = "", 0
    for is_trained, run in groupby(mask):
        end = start + len(list(run))
        part = tokenizer.decode(ids[start:end], skip_special_tokens=False)
        text, start = text + (f"[[{part}]]" if is_trained else part), end
    return f"{text}\nids: {sha256(json.dumps(ids).encode()).hexdigest()[:12]}"


def result(tokenizer: Any, document: dict[str, Any]) -> str:
    """What a document becomes, or why it is refused."""
    try:
        normalizer = Normalizer(Format.auto, FormatSettings(vocab_size=len(tokenizer)))
        row = normalizer.row(document) | {"origin": "a:1"}
        assert normalizer.kind is not None
        (made,) = Encoder(normalizer.kind, TrainOn.auto, tokenizer).encode([row])
    except TunebookError as error:
        return f"exit {error.exit_code}: {error.problem_id}"
    return shown(tokenizer, made.input_ids, [label != IGNORED_LABEL for label in made.labels])


def test_templates(family: Family, tiny_tokenizer: Callable[..., Any]) -> None:
    found: dict[str, dict[str, str]] = {}
    for name in (*ENDS, *(f"{name}_training" for name in (*TRAINING_FAMILIES, "gptoss"))):
        tokenizer = family(name)
        found[name] = {kind: result(tokenizer, document) for kind, document in CONVERSATIONS.items()}
    special = ("<|pad|>", "<|im_start|>", "<|im_end|>")
    tokenizer = tiny_tokenizer(template=read_chat_template("trl:qwen3_training"), special=special)
    found["docs/data.md"] = {}
    for number, record in enumerate(examples(), 1):
        found["docs/data.md"][f"document {number}"] = result(tokenizer, record)
    check("templates", found)


def samples(output: str) -> str:
    """The documents that `tunebook data` shows."""
    _, _, text = output.partition("[[in double brackets]]\n")
    text, _, _ = text.partition("prepared data: ")
    return "\n".join(line.strip("─ ") for line in text.splitlines() if line.strip("─ "))


def answer(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """What `tunebook data` answers to a case of `cases.yaml`, whose model is in the folder."""
    (folder / "config.json").write_text(json.dumps(CONFIG | case.get("config", {})))
    (folder / case["file"]).write_text(case["documents"])
    overrides = ["model=.", "model.weights=random", "training.global_samples=2",
                 "training.max_length=2048", "dataset.num_workers=1", *case["words"]]  # fmt: skip
    config, output = compose(None, overrides, []).config, io.StringIO()
    try:
        prepared = prepare(config)
    except TunebookError as error:
        return {"exit": error.exit_code, "id": error.problem_id}
    tokenizer = load_tokenizer(config.model) if prepared.tokenizer_sha256 is not None else None
    show_prepared(prepared, tokenizer, Console(file=output, width=160), num_samples=9)
    return {"exit": 0, "shown": samples(output.getvalue())}


def test_cases(tmp_path: Path, tokenizer_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "cache"))
    found = {}
    for name, case in read("cases").items():
        folder = tokenizer_folder(name, **({"template": case["template"]} if case.get("template") else {}))
        monkeypatch.chdir(folder)
        found[name] = {**case, "answer": answer(folder, case)}
    check("cases", found)
