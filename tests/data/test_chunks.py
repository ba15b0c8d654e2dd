"""Chunks: several processes give what one gives, and documents are fitted to the length."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest

from tunebook.config.choices import Overlong
from tunebook.config.schema import DatasetConfig, ModelConfig
from tunebook.data import chunks
from tunebook.data.chunks import ChunkSettings, encode_chunks, fit
from tunebook.data.corpus import CorpusKind
from tunebook.data.encode import Document
from tunebook.errors import DataError, TunebookError
from tunebook.model.tokenizer import load_tokenizer

from .conftest import chat_row

TWO_WORKERS = DatasetConfig(num_workers=2)


def make_settings(tokenizer: Any, **changes: Any) -> ChunkSettings:
    options: dict[str, Any] = {"max_length": 80, "vocab_size": None, "dataset": DatasetConfig(num_workers=1)} | changes
    return ChunkSettings(kind=CorpusKind.conversation, tokenizer=tokenizer, **options)


def make_documents(num_documents: int, last_answer: str = "yes") -> datasets.Dataset:
    def turns(number: int) -> list[dict[str, Any]]:
        answer = last_answer if number == num_documents - 1 else f"{number}" * (1 + number % 5)
        return [{"role": "user", "content": f"{number}"}, {"role": "assistant", "content": answer}]

    return datasets.Dataset.from_list([chat_row(turns(number), f"a:{number}") for number in range(num_documents)])


def test_several_processes_give_what_one_gives_and_name_a_bad_document(
    tokenizer_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{{- strftime_now('%d.%m.%Y') }}{%- for m in messages %}{{- m.content + '<|im_end|>' }}{%- endfor %}"
    tokenizer = load_tokenizer(ModelConfig(path=str(tokenizer_folder(template=template))))
    settings = make_settings(tokenizer, template_date="2031-12-01")
    monkeypatch.setattr(chunks, "DOCUMENTS_PER_CHUNK", 10)
    monkeypatch.setattr(chunks, "_DOCUMENTS_PER_WORKER", 10)
    alone = list(encode_chunks(make_documents(30), settings))
    assert sum(chunk.counts.num_read for chunk in alone) == 30
    ids = alone[0].batch["input_ids"][0].as_py()
    assert tokenizer.decode(ids).startswith("01.12.20310<|im_end|>")

    refusing = replace(TWO_WORKERS, overlong=Overlong.refuse)
    results = encode_chunks(make_documents(31, last_answer="x" * 80), replace(settings, dataset=refusing))
    assert [next(results) for _ in range(2)] == alone[:2]  # the last of 30 has another answer
    next(results)
    with pytest.raises(DataError, match=r"^a:30: ") as caught:
        next(results)
    assert caught.value.problem_id == "document-too-long"


def test_chosen_documents_of_a_file_are_all_read_in_order(
    tmp_path: Path, tiny_tokenizer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_documents(30).save_to_disk(tmp_path / "documents")
    numbers = [*range(20, 30), *range(0, 15, 2)]
    chosen = datasets.load_from_disk(tmp_path / "documents").select(numbers)
    monkeypatch.setattr(chunks, "DOCUMENTS_PER_CHUNK", 4)
    batches = [chunk.batch for chunk in encode_chunks(chosen, make_settings(tiny_tokenizer()))]
    texts = [tiny_tokenizer().decode(ids) for batch in batches for ids in batch["input_ids"].to_pylist()]
    assert [text.split("<|im_end|>")[0] for text in texts] == [f"<|im_start|>user\n{number}" for number in numbers]


class KillsWhoReadsIt:
    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (9,)


def test_a_killed_worker_is_an_error_that_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_DOCUMENTS_PER_WORKER", 1)
    with pytest.raises(TunebookError, match=r"dataset\.num_workers=1") as caught:
        list(encode_chunks(make_documents(6), make_settings(KillsWhoReadsIt(), dataset=TWO_WORKERS)))
    assert caught.value.problem_id == "worker-killed"


def test_tokens_outside_the_models_vocabulary_are_refused(tiny_tokenizer: Callable[..., Any]) -> None:
    documents = make_documents(1)
    with pytest.raises(DataError) as caught:  # <|im_end|> is token 259
        list(encode_chunks(documents, make_settings(tiny_tokenizer(), vocab_size=259)))
    assert caught.value.problem_id == "token-outside-vocabulary"
    assert list(encode_chunks(documents, make_settings(tiny_tokenizer(), vocab_size=260)))


LONG = Document([1, 2, 3, 4, 5, 6, 7], [-100, -100, 3, -100, -100, -100, 7])


def test_a_document_is_kept_cut_dropped_or_split() -> None:
    assert all(fit(LONG, 7, overlong) == [LONG] for overlong in Overlong)
    assert fit(LONG, 4, Overlong.cut) == [Document([1, 2, 3, 4], [-100, -100, 3, -100])]
    assert fit(LONG, 6, Overlong.drop) == []
    # The piece [6 7] would train its first token, which nothing predicts any more.
    assert fit(LONG, 5, Overlong.split) == [
        Document([1, 2, 3, 4, 5], [-100, -100, 3, -100, -100]),
        Document([6, 7], [-100, 7]),
    ]
    # [1 2] trains nothing; [3 4] would train its first token; so does [7].
    assert [piece.num_trained for piece in fit(LONG, 2, Overlong.split)] == [0, 0, 0, 0]
