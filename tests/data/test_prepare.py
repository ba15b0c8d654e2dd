"""Preparation: made once, found again by its fingerprint, and nothing half-made left."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tunebook.config import schema
from tunebook.config.choices import (
    BadDocuments,
    Format,
    Overlong,
    PeftMethod,
    Reasoning,
    Source,
    SpecialText,
    Strategy,
    TrainOn,
    Weights,
)
from tunebook.data.chunks import NOTHING_TRAINED, TOO_LONG
from tunebook.data.prepare import fingerprint, needs_tokenizer, prepare, vocabulary
from tunebook.data.prepared import load_prepared
from tunebook.data.view import summary_lines
from tunebook.errors import DataError, RequestError

Configs = Callable[..., schema.RunConfig]
# 25 and 27 tokens; see test_encode.py for the first one counted by hand.
SHORT = [("user", "Hi"), ("assistant", "Yo")]
LONGER = [("user", "Hi"), ("assistant", "Yoyo")]
TALK = [SHORT]


def test_counts_lengths_and_rows(run_config: Configs) -> None:
    prepared = prepare(run_config([SHORT, LONGER]))
    counts = prepared.train.counts
    assert (counts.num_read, counts.num_documents, counts.dropped.total(), counts.num_cut) == (2, 2, 0, 0)
    assert (counts.num_tokens, counts.num_trained_tokens) == (25 + 27, 3 + 5)
    assert (counts.shortest, counts.longest) == (25, 27)
    assert prepared.train.load_lengths().tolist() == [25, 27]
    rows = prepared.train.load()
    assert rows.column_names == ["input_ids", "labels", "length"]
    assert rows["length"][:] == [25, 27]
    assert [label for label in rows[0]["labels"] if label != -100] == rows[0]["input_ids"][21:24]
    assert prepared.kind == "conversation"
    assert prepared.records[0].num_documents == 2
    assert not prepared.was_cached


def test_two_at_once_and_later_starts_prepare_once(run_config: Configs) -> None:
    config = run_config([SHORT])
    with ThreadPoolExecutor(3) as threads:
        prepared = list(threads.map(prepare, [config] * 3))
    assert sorted(result.was_cached for result in prepared) == [False, True, True]
    again = prepare(config)
    assert again.was_cached
    assert [replace(result, was_cached=True) for result in prepared] == [again] * 3


def test_the_same_documents_prepared_otherwise_have_the_same_content(run_config: Configs) -> None:
    first = prepare(run_config([SHORT, LONGER]))
    other = prepare(run_config([SHORT, LONGER], max_length=128))
    assert other.fingerprint != first.fingerprint
    assert other.content_sha256 == first.content_sha256
    assert prepare(run_config([LONGER, SHORT])).content_sha256 != first.content_sha256


def test_what_does_not_fit_is_counted_with_its_reason(run_config: Configs) -> None:
    dropped = prepare(run_config([SHORT, LONGER], max_length=26, overlong=Overlong.drop)).train.counts
    assert (dropped.num_documents, dropped.dropped, dropped.num_tokens_lost) == (1, {TOO_LONG: 1}, 27)
    very_long = [("user", "x" * 50), ("assistant", "Yo")]
    cut = prepare(run_config([SHORT, very_long], max_length=30)).train.counts
    assert (cut.num_documents, cut.dropped, cut.num_cut) == (1, {NOTHING_TRAINED: 1}, 1)


def test_a_preparation_that_ends_early_leaves_nothing(run_config: Configs, tmp_path: Path) -> None:
    def interrupt(done: int, total: int | None, what: str) -> None:
        if what.startswith("tokenizing") and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(run_config([SHORT]), interrupt)
    with pytest.raises(DataError, match=r"max_length is 9") as empty:
        prepare(run_config([SHORT, LONGER], max_length=9))
    assert empty.value.problem_id == "nothing-to-train-on"
    with pytest.raises(RequestError, match="enable_thinkin") as unread:
        prepare(run_config([SHORT], chat_template_kwargs={"enable_thinkin": False}))
    assert unread.value.problem_id == "template-variable-unknown"
    assert [path.name for path in (tmp_path / "cache" / "prepared").iterdir() if path.suffix != ".lock"] == []


def test_a_cache_that_cannot_be_written_is_said(
    run_config: Configs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config([SHORT])
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TUNEBOOK_CACHE", str(tmp_path / "file"))
    with pytest.raises(RequestError, match=r"TUNEBOOK_CACHE=DIR") as caught:
        prepare(config)
    assert caught.value.problem_id == "cache-not-writable"


def test_synthetic_documents_need_a_vocabulary_and_no_tokenizer(run_config: Configs) -> None:
    synthetic = schema.SyntheticConfig(num_documents=50, log_mean_tokens=3.0, max_tokens=60)
    talks = run_config(TALK)
    config = replace(
        talks,
        model=schema.ModelConfig(name="nobody/nothing", weights=Weights.random),
        dataset=schema.DatasetConfig(source=Source.synthetic, synthetic=synthetic),
    )
    with pytest.raises(RequestError) as caught:
        vocabulary(config)
    assert caught.value.problem_id == "synthetic-without-vocabulary"
    config.model.facts = talks.model.facts = schema.ModelFacts(vocab_size=500)
    assert (vocabulary(config), vocabulary(talks)) == ((500, 499), (500, None))
    prepared = prepare(config)
    assert prepared.kind == "tokens"
    assert prepared.tokenizer_sha256 is None
    rows = prepared.train.load()
    assert len(rows) == 50
    assert all(labels[0] == -100 for labels in rows["labels"])
    assert max(max(ids) for ids in rows["input_ids"]) == 499  # the vocabulary's last token ends every document
    parts = {"a": schema.MixturePart(source=Source.synthetic), "b": schema.MixturePart()}
    for dataset, needs in (
        (schema.DatasetConfig(), True),
        (schema.DatasetConfig(format=Format.pretokenized), False),
        (schema.DatasetConfig(source=Source.mixture, parts=parts), True),
    ):
        assert needs_tokenizer(dataset) is needs


def test_what_may_change_tokens_changes_the_fingerprint(run_config: Configs, tmp_path: Path) -> None:
    (tmp_path / "other.jinja").write_text("{{ messages }}")
    changes: list[dict[str, Any]] = [
        {}, {"train_on": TrainOn.everything}, {"overlong": Overlong.split}, {"overlong": Overlong.refuse},
        {"max_length": 65}, {"system_prompt": "Be brief."}, {"validation_share": 0.1}, {"max_documents": 1},
        {"ignore_keys": ["name"]}, {"special_tokens_in_content": SpecialText.keep}, {"reasoning": Reasoning.drop},
        {"question_template": "{{conversations[0].value}}", "answer_template": "{{conversations[1].value}}"},
        {"bad_documents": BadDocuments.skip}, {"max_bad_share": 0.2}, {"chat_template_kwargs": {"messages": []}},
    ]  # fmt: skip
    of_model = [
        {"chat_template": str(tmp_path / "other.jinja")},
        {"eos_token": "</s>"},
        {"template_date": "2031-12-01"},
    ]
    marks = {fingerprint(run_config(TALK, **change)) for change in changes}
    config = run_config(TALK)
    marks |= {fingerprint(replace(config, model=replace(config.model, **change))) for change in of_model}
    for name in ("chat_template.jinja", "tokenizer.json"):
        file = tmp_path / "model" / name
        file.write_text(file.read_text() + " ")
        marks.add(fingerprint(config))
    assert len(marks) == len(changes) + len(of_model) + 2


BAD = [
    '{"messages": [{"role": "user", "content": "Hi"}, {"role": "asistant", "content": "Yo"}]}',
    '{"messages": [{"role": "user", "content": "Hi"}, {"role": "asistent", "content": "Yo"}]}',
    "{broken",
    '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo", "image": "a.png"}]}',
]


def test_unusable_documents_are_left_out_by_reason_up_to_a_share(tmp_path: Path, run_config: Configs) -> None:
    config = run_config([[("user", f"{n}"), ("assistant", "Yo")] for n in range(6)], bad_documents=BadDocuments.skip)
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write("\n".join(BAD) + "\n")
    with pytest.raises(DataError, match=r"4 of 10 documents .*max_bad_share=0.01.*\n  2: .*line 7") as caught:
        prepare(config)
    assert (caught.value.problem_id, caught.value.exit_code) == ("data-too-many-bad", 4)
    config.dataset.max_bad_share = 0.4
    prepared = prepare(config)
    counts = prepared.train.counts
    assert (counts.num_read, counts.num_documents, counts.skipped.reasons.total()) == (6, 6, 4)
    reasons = counts.skipped.reasons.most_common()
    assert reasons[0][1] == 2 and reasons[0][0].startswith("unknown role ... in turn ...")
    assert counts.skipped.first[reasons[0][0]].startswith(
        f"{tmp_path}/train.jsonl, line 7: unknown role 'asistant' in turn 2"
    )
    lines = summary_lines(load_prepared(prepared.folder))
    assert any(line.startswith("    2 left out: ") and "line 7" in line for line in lines)
    config.dataset.bad_documents = BadDocuments.refuse
    with pytest.raises(DataError, match="4 of 10 documents cannot be used\n"):
        prepare(config)


def test_documents_that_cannot_be_encoded_are_left_out_too(tmp_path: Path, run_config: Configs) -> None:
    talks = [[("user", "x" * (90 if n == 3 else 1)), ("assistant", "Yo")] for n in range(10)]
    config = run_config(talks, overlong=Overlong.refuse)
    with pytest.raises(DataError, match=r"^train.jsonl:4: ") as caught:
        prepare(config)
    assert caught.value.problem_id == "document-too-long"
    config.dataset.bad_documents, config.dataset.max_bad_share = BadDocuments.skip, 0.1
    counts = prepare(config).train.counts
    assert (counts.num_read, counts.num_documents) == (9, 9)
    ((reason, number),) = counts.skipped.reasons.items()
    assert reason.startswith("it has ... tokens") and number == 1
    config.dataset.max_bad_share = 0.05
    with pytest.raises(DataError, match=r"^the train part: 1 of 10 documents cannot be used"):
        prepare(config)


def test_answers_that_are_cut_are_counted_and_warned_of(run_config: Configs) -> None:
    talks = [[("user", "Hi"), ("assistant", "Yo" * (30 if n == 3 else 1))] for n in range(50)]
    talks[7] += [("user", "Hi" * 30), ("assistant", "Yo")]  # cut within a question
    prepared = prepare(run_config(talks))
    assert (prepared.train.counts.num_cut, prepared.train.counts.num_answers_cut) == (2, 1)
    (warning,) = [line for line in summary_lines(prepared) if "within an answer" in line]
    assert warning.startswith("    warning: 1 (2.0%)")
    split = prepare(run_config(talks, overlong=Overlong.split)).train.counts
    assert (split.num_cut, split.num_answers_cut) == (2, 0)


def test_adapters_cannot_train_added_tokens_in_divided_embeddings(run_config: Configs, tokenizer_folder: Any) -> None:
    tokenizer_folder(template=None, special=("<|pad|>", "</s>"), eos_token="</s>")
    config = run_config([[("user", "Hi"), ("assistant", "Yo")]])
    config.model.chat_template = "chatml"
    config.peft = schema.PeftSettings(method=PeftMethod.lora)
    config.parallelism = schema.ParallelismConfig(strategy=Strategy.ddp)
    prepare(config)
    config.parallelism.strategy = Strategy.fsdp
    with pytest.raises(RequestError) as error:
        prepare(config)
    assert error.value.problem_id == "added-tokens-divided"
    config.peft.method = PeftMethod.full
    prepare(config)
