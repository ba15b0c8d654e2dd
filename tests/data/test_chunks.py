"""Chunks: several processes give what one gives, and documents are fitted to the length."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tunebook.config.choices import Overlong, TrainOn
from tunebook.config.schema import ModelConfig
from tunebook.data import chunks
from tunebook.data.chunks import (
    NEVER_TRAINED,
    NOTHING_TRAINED,
    PIECE_NOT_TRAINED,
    TOO_LONG,
    ChunkEncoder,
    ChunkSettings,
    choose_num_workers,
    encode_chunks,
    fit,
)
from tunebook.data.corpus import CorpusKind
from tunebook.data.encode import Document
from tunebook.errors import DataError, TunebookError
from tunebook.model.tokenizer import load_tokenizer


def make_settings(folder: Path, **changes: Any) -> ChunkSettings:
    common: dict[str, Any] = {
        "kind": CorpusKind.conversation,
        "tokenizer": load_tokenizer(ModelConfig(path=str(folder))),
        "train_on": TrainOn.auto,
        "overlong": Overlong.cut,
        "max_length": 40,
        "vocab_size": None,
    }
    return ChunkSettings(**(common | changes))


def make_documents(num_documents: int) -> Any:
    import datasets

    return datasets.Dataset.from_list(
        [
            {
                "messages": [
                    {"role": "user", "content": f"{number}", "train": False},
                    {"role": "assistant", "content": f"{number}" * (1 + number % 5), "train": True},
                ],
                "origin": f"a:{number}",
            }
            for number in range(num_documents)
        ]
    )


def test_several_processes_give_what_one_gives_with_the_date_that_the_template_writes(
    tokenizer_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{{- strftime_now('%d.%m.%Y') }}{%- for m in messages %}{{- m.content + '<|im_end|>' }}{%- endfor %}"
    settings = make_settings(tokenizer_folder(template=template), template_date="2031-12-01", max_length=80)
    monkeypatch.setattr(chunks, "DOCUMENTS_PER_CHUNK", 10)
    documents = make_documents(95)
    alone = list(encode_chunks(documents, settings, 1))
    assert len(alone) == 10
    assert sum(chunk.counts.num_read for chunk in alone) == 95
    assert alone[0].counts.num_documents == 10
    monkeypatch.setattr(chunks, "_DOCUMENTS_PER_WORKER", 10)
    assert list(encode_chunks(documents, settings, 2)) == alone
    ids = pa.ipc.open_stream(alone[0].stream).read_all()["input_ids"][0].as_py()
    assert settings.tokenizer is not None
    assert settings.tokenizer.decode(ids).startswith("01.12.20310<|im_end|>")


def test_chosen_documents_of_a_file_are_all_read_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import pyarrow as pa

    make_documents(30).save_to_disk(tmp_path / "documents")
    chosen = datasets.load_from_disk(tmp_path / "documents").select([*range(20, 30), *range(0, 15, 2)])
    monkeypatch.setattr(chunks, "DOCUMENTS_PER_CHUNK", 4)
    streams = list(chunks._read_chunks(chosen))
    rows = [row for stream in streams for row in pa.ipc.open_stream(stream).read_all().to_pylist()]
    assert [row["origin"] for row in rows] == [f"a:{number}" for number in [*range(20, 30), *range(0, 15, 2)]]
    assert rows == chosen.to_list()


def test_a_document_that_a_worker_cannot_encode_is_named(
    tokenizer_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "DOCUMENTS_PER_CHUNK", 2)
    monkeypatch.setattr(chunks, "_DOCUMENTS_PER_WORKER", 1)
    settings = make_settings(tokenizer_folder(eos_token="</s>"))
    with pytest.raises(DataError, match=r"a:0: .*never learn to stop") as caught:
        list(encode_chunks(make_documents(6), settings, 2))
    assert caught.value.problem_id == "eos-not-trained"


def test_a_killed_worker_is_said(tokenizer_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "_DOCUMENTS_PER_WORKER", 1)
    monkeypatch.setattr(chunks, "ProcessPoolExecutor", _pool_whose_workers_die)
    with pytest.raises(TunebookError, match=r"2 processes that tokenize was killed.*dataset\.num_workers=1"):
        list(encode_chunks(make_documents(6), make_settings(tokenizer_folder()), 2))


def _pool_whose_workers_die(workers: int, **options: Any) -> Any:
    from concurrent.futures import ProcessPoolExecutor

    return ProcessPoolExecutor(workers, **(options | {"initializer": os._exit, "initargs": (9,)}))


def test_tokens_outside_the_models_vocabulary_are_refused(tokenizer_folder: Callable[..., Path]) -> None:
    documents = make_documents(1)
    settings = make_settings(tokenizer_folder(), vocab_size=259)  # <|im_end|> is token 259
    with pytest.raises(DataError, match=r"hold token 259, but the model's vocabulary ends at 258"):
        list(encode_chunks(documents, settings, 1))
    assert list(encode_chunks(documents, make_settings(tokenizer_folder(), vocab_size=260), 1))


def test_notes_are_counted_for_each_chunk_alone(tokenizer_folder: Callable[..., Path]) -> None:
    folder = tokenizer_folder(merges=(("=", "4"),))
    encoder = ChunkEncoder(make_settings(folder, kind=CorpusKind.prompt_completion))
    import datasets

    stream = next(chunks._read_chunks(datasets.Dataset.from_list([{"prompt": "2=", "completion": "4", "origin": "a"}])))
    assert [sum(encoder.encode(stream).counts.notes.values()) for _ in range(2)] == [1, 1]


@pytest.mark.parametrize(
    ("num_documents", "asked", "expected"), [(10, 8, 1), (15_999, 8, 1), (16_000, 8, 2), (900_000, 3, 3)]
)
def test_no_worker_starts_for_nothing(num_documents: int, asked: int, expected: int) -> None:
    assert choose_num_workers(num_documents, asked) == expected


LONG = Document([1, 2, 3, 4, 5, 6, 7], [-100, -100, 3, -100, -100, -100, 7])


@pytest.mark.parametrize("overlong", list(Overlong))
def test_a_document_that_fits_is_kept_as_it_is(overlong: Overlong) -> None:
    fitted = fit(LONG, 7, overlong)
    assert fitted.pieces == [LONG]
    assert not fitted.was_cut
    assert fitted.num_tokens_lost == 0


def test_cut_keeps_the_beginning() -> None:
    fitted = fit(LONG, 4, Overlong.cut)
    assert fitted.pieces == [Document([1, 2, 3, 4], [-100, -100, 3, -100])]
    assert (fitted.was_cut, fitted.num_tokens_lost, fitted.dropped) == (True, 3, [])


def test_a_cut_that_leaves_nothing_to_train_on_drops_the_document() -> None:
    fitted = fit(LONG, 2, Overlong.cut)
    assert (fitted.pieces, fitted.num_tokens_lost, fitted.dropped) == ([], 7, [NOTHING_TRAINED])


def test_drop_says_why() -> None:
    fitted = fit(LONG, 6, Overlong.drop)
    assert (fitted.pieces, fitted.was_cut, fitted.num_tokens_lost, fitted.dropped) == ([], False, 7, [TOO_LONG])


def test_split_pieces_begin_untrained_and_empty_ones_are_dropped() -> None:
    fitted = fit(LONG, 2, Overlong.split)
    # [1 2] trains nothing; [3 4] would train its first token, which nothing predicts any more; so does [7].
    assert (fitted.pieces, fitted.num_tokens_lost, fitted.dropped) == ([], 7, [PIECE_NOT_TRAINED] * 4)
    fitted = fit(LONG, 5, Overlong.split)
    assert fitted.pieces == [Document([1, 2, 3, 4, 5], [-100, -100, 3, -100, -100]), Document([6, 7], [-100, 7])]
    assert (fitted.was_cut, fitted.num_tokens_lost, fitted.dropped) == (True, 0, [])


def test_a_document_without_a_trained_token_is_dropped() -> None:
    assert fit(Document([1, 2], [-100, -100]), 8, Overlong.cut).dropped == [NEVER_TRAINED]
