"""Every document in docs/data.md can be trained on, and becomes what the text says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunebook.config.book import book_root
from tunebook.config.choices import Format, TrainOn
from tunebook.data.encode import Encoder
from tunebook.data.formats import FormatSettings, Normalizer
from tunebook.model.tokenizer_files import read_chat_template

PAGE = Path(book_root()) / "docs" / "data.md"


def examples() -> list[dict[str, Any]]:
    blocks = re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return [json.loads(line) for block in blocks for line in block.splitlines()]


def test_every_document_of_the_page_can_be_trained_on(tiny_tokenizer: Callable[..., Any]) -> None:
    special = ("<|pad|>", "<|im_start|>", "<|im_end|>")
    tokenizer = tiny_tokenizer(template=read_chat_template("trl:qwen3_training"), special=special)
    texts = []
    for record in examples():
        normalizer = Normalizer(Format.auto, FormatSettings(vocab_size=300))
        row = normalizer.row(record) | {"origin": "a:1"}
        assert normalizer.kind is not None
        encoder = Encoder(normalizer.kind, TrainOn.auto, tokenizer)
        (document,) = encoder.encode([row])
        assert not encoder.counts.notes
        texts.append(tokenizer.decode([label for label in document.labels if label >= 0]))
    assert len(texts) == 13
    trained = "".join(texts)
    assert trained.count("Two and two.") == 3
    assert trained.count('{"name": "weather", "arguments": {"city": "Rome"}}') == 2
    assert "rain" not in trained and "Hrm." not in trained and "Good morning." in trained
