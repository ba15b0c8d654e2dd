"""Chunks: several processes give what one gives, and documents are fitted to the length."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

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


def make_settings(folder: Path, kind: CorpusKind = CorpusKind.conversation, **changes: Any) -> ChunkSettings:
    options: dict[str, Any] = {"max_length": 40, "vocab_size": None, "dataset": DatasetConfig(num_workers=1)} | changes
    return ChunkSettings(kind=kind, tokenizer=load_tokenizer(ModelConfig(path=str(folder))), **options)


def make_documents(num_documents: int) -> Any:
    import datasets

    def turns(number: int) -> list[dict[str, Any]]:
        answer = f"{number}" * (1 + number % 5)
        return [{"role": "user", "content": f"{number}"}, {"role": "assistant", "content": answer}]

    return datasets.Dataset.from_list([chat_row(turns(number), f"a:{number}") for number in range(num_documents)])


def test_several_processes_give_what_one_gives_with_the_date_that_the_template_writes(
    tokenizer_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{{- strftime_now('%d.%m.%Y') }}{%- for m in messages %}{{- m.content + '<|im_end|>' }}{%- endfor %}"
    settings = make_settings(tokenizer_folder(template=template), template_date="2031-12-01", max_length=80)
    monkeypatch.setattr(chunks, "DOCUMENTS_PER_CHUNK", 10)
    documents = make_documents(95)
    alone = list(encode_chunks(documents, settings))
    assert len(alone) == 10
    assert sum(chunk.counts.num_read for chunk in alone) == 95
    assert alone[0].counts.num_documents == 10
    monkeypatch.setattr(chunks, "_DOCUMENTS_PER_WORKER", 10)
    assert list(encode_chunks(documents, replace(settings, dataset=DatasetConfig(num_workers=2)))) == alone
    ids = alone[0].batch["input_ids"][0].as_py()
    assert settings.tokenizer is not None
    assert settings.tokenizer.decode(ids).startswith("01.12.20310<|im_end|>")


def test_chosen_documents_of_a_file_are_all_read_in_order(
    tmp_path: Path, tokenizer_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    make_documents(30).save_to_disk(tmp_path / "documents")
    numbers = [*range(20, 30), *range(0, 15, 2)]
    chosen = datasets.load_from_disk(tmp_path / "documents").select(numbers)
    monkeypatch.setattr(chunks, "DOCUMENTS_PER_CHUNK", 4)
    settings = make_settings(tokenizer_folder())
    assert settings.tokenizer is not None
    batches = [chunk.batch for chunk in encode_chunks(chosen, settings)]
    texts = [settings.tokenizer.decode(ids) for batch in batches for ids in batch["input_ids"].to_pylist()]
    assert [text.split("<|im_end|>")[0] for text in texts] == [f"<|im_start|>user\n{number}" for number in numbers]


def test_a_document_that_a_worker_cannot_encode_is_named(
    tokenizer_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "DOCUMENTS_PER_CHUNK", 2)
    monkeypatch.setattr(chunks, "_DOCUMENTS_PER_WORKER", 1)
    settings = make_settings(tokenizer_folder(eos_token="</s>"), dataset=DatasetConfig(num_workers=2))
    with pytest.raises(DataError, match=r"a:0: .*never learn to stop") as caught:
        list(encode_chunks(make_documents(6), settings))
    assert caught.value.problem_id == "eos-not-trained"


def test_a_killed_worker_is_said(tokenizer_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_DOCUMENTS_PER_WORKER", 1)
    monkeypatch.setattr(chunks, "ProcessPoolExecutor", _pool_whose_workers_die)
    with pytest.raises(TunebookError, match=r"2 processes that tokenize was killed.*dataset\.num_workers=1"):
        list(encode_chunks(make_documents(6), make_settings(tokenizer_folder(), dataset=DatasetConfig(num_workers=2))))


def _pool_whose_workers_die(workers: int, **options: Any) -> Any:
    from concurrent.futures import ProcessPoolExecutor

    return ProcessPoolExecutor(workers, **(options | {"initializer": os._exit, "initargs": (9,)}))


def test_tokens_outside_the_models_vocabulary_are_refused(tokenizer_folder: Callable[..., Path]) -> None:
    documents = make_documents(1)
    settings = make_settings(tokenizer_folder(), vocab_size=259)  # <|im_end|> is token 259
    with pytest.raises(DataError, match=r"holds token 259, but the model's vocabulary ends at 258"):
        list(encode_chunks(documents, settings))
    assert list(encode_chunks(documents, make_settings(tokenizer_folder(), vocab_size=260)))


LONG = Document([1, 2, 3, 4, 5, 6, 7], [-100, -100, 3, -100, -100, -100, 7])


@pytest.mark.parametrize("overlong", list(Overlong))
def test_a_document_that_fits_is_kept_as_it_is(overlong: Overlong) -> None:
    assert fit(LONG, 7, overlong) == [LONG]


def test_a_long_document_is_cut_dropped_or_split() -> None:
    assert fit(LONG, 4, Overlong.cut) == [Document([1, 2, 3, 4], [-100, -100, 3, -100])]
    assert fit(LONG, 6, Overlong.drop) == []
    # The piece [6 7] would train its first token, which nothing predicts any more.
    assert fit(LONG, 5, Overlong.split) == [
        Document([1, 2, 3, 4, 5], [-100, -100, 3, -100, -100]),
        Document([6, 7], [-100, 7]),
    ]
    # [1 2] trains nothing; [3 4] would train its first token; so does [7].
    assert [piece.num_trained for piece in fit(LONG, 2, Overlong.split)] == [0, 0, 0, 0]
