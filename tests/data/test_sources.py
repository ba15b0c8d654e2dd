"""Loading a corpus: files, folders in the hub's layout, validation parts, records, and what cannot be found."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import pytest

from tunebook.config.choices import Format, Source
from tunebook.config.schema import DatasetConfig
from tunebook.data.corpus import Corpus, CorpusKind
from tunebook.data.sources import corpus_identity, load_corpus
from tunebook.errors import DataError, RequestError

from .conftest import chat_row, turns_of


def conversation(number: int) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": f"q{number}"}, {"from": "gpt", "value": f"a{number}"}]}


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def load(tmp_path: Path, config: DatasetConfig, **facts: Any) -> Corpus:
    return load_corpus(config, cache_dir=tmp_path / "cache", **facts)


def questions(part: datasets.Dataset | None) -> list[str]:
    assert part is not None
    return [turns_of(row)[0]["content"] for row in part]


def test_a_file_becomes_rows_with_their_origin_and_a_record(tmp_path: Path) -> None:
    path = write(tmp_path / "chat.jsonl", [conversation(1), conversation(2)])
    corpus = load(tmp_path, DatasetConfig(path=str(path)))
    assert corpus.kind is CorpusKind.conversation
    assert corpus.validation is None
    turns = [{"role": "user", "content": "q2"}, {"role": "assistant", "content": "a2"}]
    assert turns_of(corpus.train[1]) == turns_of(chat_row(turns))
    assert corpus.train["origin"][:] == ["chat.jsonl:1", "chat.jsonl:2"]
    (record,) = corpus.records
    assert record.location == str(path)
    assert record.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (record.format, record.num_documents, record.revision) == ("sharegpt", 2, None)
    assert corpus.notes == [f"{path}: format sharegpt, by the keys of its first document"]
    book = "book:recipes/quickstart/data/heldout.jsonl"
    assert load(tmp_path, DatasetConfig(path=book, max_documents=3)).records[0].location == book


def test_a_glob_reads_files_in_order_and_distinguishes_equal_names(tmp_path: Path) -> None:
    write(tmp_path / "b" / "x.jsonl", [conversation(2)])
    write(tmp_path / "a" / "x.jsonl", [conversation(1)])
    corpus = load(tmp_path, DatasetConfig(path=str(tmp_path / "*" / "x.jsonl")))
    assert questions(corpus.train) == ["q1", "q2"]
    assert corpus.train["origin"][:] == ["a/x.jsonl:1", "b/x.jsonl:1"]
    assert [record.num_documents for record in corpus.records] == [1, 1]


def test_a_folder_is_its_own_files_of_documents(tmp_path: Path) -> None:
    for file, number in (("b.jsonl", 2), ("a.jsonl", 1), ("below/c.jsonl", 3)):
        write(tmp_path / file, [conversation(number)])
    (tmp_path / "notes.txt").write_text("not documents")
    assert questions(load(tmp_path, DatasetConfig(path=str(tmp_path))).train) == ["q1", "q2"]


def test_max_documents_reads_no_further_but_hides_no_problem_before(tmp_path: Path) -> None:
    path = write(tmp_path / "chat.jsonl", [conversation(1), conversation(2), {"conversations": []}])
    assert questions(load(tmp_path, DatasetConfig(path=str(path), max_documents=2)).train) == ["q1", "q2"]
    write(path, [conversation(1), {"conversations": []}, conversation(2), conversation(3)])
    with pytest.raises(DataError, match=r"chat.jsonl, line 2: the conversation is empty"):
        load(tmp_path, DatasetConfig(path=str(path), max_documents=2))


def test_a_path_without_documents_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "data" / "train.jsonl", [conversation(1)])
    (tmp_path / "data" / "notes.txt").write_text("not documents")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    for path, problem_id, named in (
        ("data/trian.jsonl", "data-file-not-found", "'train.jsonl'"),
        ("empty", "data-file-not-found", "dataset=hub"),
        ("book:inputs/none/train.jsonl", "data-file-not-found", "card"),
        ("https://a.org/train.jsonl", "data-file-not-found", "download"),
        ("data/*", "data-file-kind", f"{tmp_path}/data/notes.txt"),
    ):
        with pytest.raises(DataError, match=f"dataset.path: .*{named}") as caught:
            load(tmp_path, DatasetConfig(path=path))
        assert caught.value.problem_id == problem_id


def test_the_held_out_share_depends_on_content_alone(tmp_path: Path) -> None:
    records = [conversation(number) for number in range(200)]
    path = write(tmp_path / "chat.jsonl", records)
    held_out = set(questions(load(tmp_path, DatasetConfig(path=str(path), validation_share=0.1)).validation))
    assert 5 <= len(held_out) <= 35  # 20 expected, standard deviation 4

    write(path, [conversation(number) for number in range(1000, 1100)] + records[::-1])
    corpus = load(tmp_path, DatasetConfig(path=str(path), validation_share=0.1, system_prompt="Be brief."))
    assert {turns_of(row)[1]["content"] for row in corpus.validation or []} >= held_out
    assert not held_out & {turns_of(row)[1]["content"] for row in corpus.train}
    assert len(corpus.train) + len(corpus.validation or []) == 300


def test_validation_files(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", [conversation(1), conversation(1)])
    other = write(tmp_path / "test.jsonl", [conversation(1), conversation(2), conversation(3)])
    corpus = load(tmp_path, DatasetConfig(path=str(train), validation_path=str(other), max_documents=1))
    assert questions(corpus.validation) == ["q1", "q2", "q3"]  # max_documents is about the training documents
    assert [record.num_documents for record in corpus.records] == [1, 3]
    notes = load(tmp_path, DatasetConfig(path=str(train), validation_path=str(other))).notes
    assert "documents that repeat an earlier one: 1 of 2" in notes
    assert "validation documents that are also trained on: 1 of 3" in notes
    write(other, [{"text": "plain"}])
    with pytest.raises(DataError) as caught:
        load(tmp_path, DatasetConfig(path=str(train), validation_path=str(other)))
    assert caught.value.problem_id == "mixture-kinds"


def test_the_identity_changes_with_content_and_settings_but_not_with_the_place(tmp_path: Path) -> None:
    path = write(tmp_path / "one" / "chat.jsonl", [conversation(1)])
    copy = write(tmp_path / "two" / "chat.jsonl", [conversation(1)])
    identity = corpus_identity(DatasetConfig(path=str(path)))
    assert json.loads(json.dumps(identity)) == identity
    assert corpus_identity(DatasetConfig(path=str(copy), num_documents=7)) == identity
    assert corpus_identity(DatasetConfig(path=str(copy), system_prompt="s")) != identity
    assert corpus_identity(DatasetConfig(path=str(copy), format=Format.messages)) != identity
    write(copy, [conversation(2)])
    assert corpus_identity(DatasetConfig(path=str(copy))) != identity


@pytest.fixture
def hub_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "chats"
    write(folder / "train.jsonl", [{**conversation(number), "id": number} for number in range(3)])
    write(folder / "test.jsonl", [{**conversation(number), "id": number} for number in range(3, 5)])
    return folder


def test_a_file_for_testing_is_not_trained_on_with_its_folder(tmp_path: Path, hub_folder: Path) -> None:
    with pytest.raises(DataError) as caught:
        load(tmp_path, DatasetConfig(path=str(hub_folder)))
    assert caught.value.problem_id == "data-held-out-file"


def test_a_folder_in_the_layout_of_the_hub_and_its_bad_rows_and_files(tmp_path: Path, hub_folder: Path) -> None:
    config = DatasetConfig(source=Source.hub, name=str(hub_folder), validation_split="test")
    corpus = load(tmp_path, config)
    assert questions(corpus.train) == ["q0", "q1", "q2"]
    assert questions(corpus.validation) == ["q3", "q4"]
    assert [record.location for record in corpus.records] == [f"{hub_folder}/train", f"{hub_folder}/test"]
    assert corpus.train["origin"][0] == f"{hub_folder}/train:1"
    before = corpus.records[0].sha256
    write(hub_folder / "test.jsonl", [conversation(9)])
    assert before != load(tmp_path, config).records[0].sha256
    question = {"conversations": [{"from": "human", "value": "q"}], "id": 1}
    write(hub_folder / "train.jsonl", [{**conversation(1), "id": 0}, question])
    with pytest.raises(DataError, match=r"chats/train, row 2: no assistant turn"):
        load(tmp_path, config)
    (hub_folder / "test.jsonl").write_text('{"text": "a"}\n{oops\n')
    with pytest.raises(DataError) as caught:
        load(tmp_path, config)
    assert caught.value.problem_id == "data-file-broken"


def test_files_of_the_hub_are_read_as_they_are_written(tmp_path: Path) -> None:
    """Words that pandas reads as nothing stay, and arguments of several types, which the library stores as text."""
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "train.csv").write_text("prompt,completion\nNA,null\nNone,NaN\n")
    corpus = load(tmp_path, DatasetConfig(source=Source.hub, name=str(tmp_path / "table")))
    assert [(row["prompt"], row["completion"]) for row in corpus.train] == [("NA", "null"), ("None", "NaN")]
    rows = []
    for arguments in ({"x": 1}, {"x": "a"}):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        rows.append({"messages": turns})
    write(tmp_path / "calls" / "train.jsonl", rows)
    corpus = load(tmp_path, DatasetConfig(source=Source.hub, name=str(tmp_path / "calls")))
    calls = [turns_of(row)[1]["tool_calls"][0] for row in corpus.train]
    assert [call["function"]["arguments"] for call in calls] == [{"x": 1}, {"x": "a"}]


def test_splits_and_their_parts(tmp_path: Path) -> None:
    folder, train = tmp_path / "chats", [conversation(number) for number in range(10)]
    write(folder / "train-00000-of-00002.jsonl", train[:6])
    write(folder / "train-00001-of-00002.jsonl", train[6:])
    write(folder / "test.jsonl", train[:2])

    def rows_of(split: str) -> list[str]:
        config = DatasetConfig(source=Source.hub, name=str(folder), train_split=split)
        return questions(load(tmp_path, config).train)

    assert rows_of("train[-30%:]") == ["q7", "q8", "q9"]
    assert rows_of("test+train[10:]+train[:10%]") == ["q0", "q1", "q0"]
    with pytest.raises(RequestError, match=r"train\[x\]") as caught:
        rows_of("train[x]")
    assert caught.value.problem_id == "hub-unknown-split"
    datasets.DatasetDict(train=datasets.Dataset.from_list(train[:1])).save_to_disk(tmp_path / "saved")
    assert questions(load(tmp_path, DatasetConfig(source=Source.hub, name=str(tmp_path / "saved"))).train) == ["q0"]


GATED = huggingface_hub.errors.GatedRepoError(
    "no",
    response=SimpleNamespace(headers={}, request=None, status_code=403),  # type: ignore[arg-type]
)


def _refuse(error: Exception) -> Any:
    def refuse(*_: Any, **__: Any) -> Any:
        raise error

    return refuse


@pytest.mark.parametrize(
    ("error", "problem_id"),
    [(ConnectionError("no route to host"), "hub-out-of-reach"), (GATED, "hub-cannot-load")],
    ids=["out_of_reach", "gated"],
)
def test_a_data_set_that_the_hub_does_not_give_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, problem_id: str
) -> None:
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", _refuse(error))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(RequestError, match="some/chats") as caught:
        load(tmp_path, DatasetConfig(source=Source.hub, name="some/chats", revision="v1"))
    assert caught.value.problem_id == problem_id


def test_a_download_of_an_earlier_run_is_found_without_the_hub(
    tmp_path: Path, hub_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "hub/datasets--some--chats/snapshots" / commit
    load_dataset = datasets.load_dataset

    def download(name: str, *arguments: Any, revision: str, **settings: Any) -> Any:
        assert (name, revision) == ("some/chats", commit)
        shutil.copytree(hub_folder, snapshot)  # by commit: no branch is recorded
        return load_dataset(str(snapshot), *arguments, **settings)

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("dataset_info", "repo_info"):
        monkeypatch.setattr(huggingface_hub.HfApi, name, lambda *_, **__: SimpleNamespace(sha=commit))
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_tree", lambda *_, **__: [])
    config = DatasetConfig(source=Source.hub, name="some/chats")
    with monkeypatch.context() as online:
        online.setattr(datasets, "load_dataset", download)
        online.setattr(datasets, "load_dataset_builder", lambda *_, **__: SimpleNamespace(config=None))
        online_rows = questions(load(tmp_path / "1", config).train)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", _refuse(ConnectionError("no route to host")))
    corpus = load(tmp_path / "2", config)
    assert (questions(corpus.train), corpus.records[0].revision) == (online_rows, commit)
    assert corpus_identity(config)["repository"] == ["some/chats", commit, None]
