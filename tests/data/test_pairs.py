"""Pairs: the forms in which data sets write them, the masks of both sides, and what is wrong with a pair."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tunebook.commands.data_page import write_page
from tunebook.config import schema
from tunebook.config.book import book_root
from tunebook.config.choices import BadDocuments, Format, Overlong, Source
from tunebook.data.chunks import EQUAL, NOTHING_TRAINED, TOO_LONG
from tunebook.data.corpus import CorpusKind, content_hash
from tunebook.data.formats import FormatSettings, Normalizer, document_keys
from tunebook.data.prepare import prepare
from tunebook.data.prepared import Prepared
from tunebook.data.problems import DocumentError, KeyAccount
from tunebook.data.view import show_prepared
from tunebook.errors import DataError
from tunebook.model.tokenizer import load_tokenizer


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def said(role: str, text: str) -> dict[str, Any]:
    return {"from": role, "value": text}


# One pair of conversations in the forms of several data sets.
FORMS: dict[str, dict[str, Any]] = {
    "turns": {"prompt": [user("Hi")], "chosen": [assistant("Yo")], "rejected": [assistant("No")]},
    "turn": {"prompt": [user("Hi")], "chosen": assistant("Yo"), "rejected": assistant("No")},
    "whole": {"chosen": [user("Hi"), assistant("Yo")], "rejected": [user("Hi"), assistant("No")]},
    "turns-and-whole": {
        "prompt": [user("Hi")],
        "chosen": [user("Hi"), assistant("Yo")],
        "rejected": [user("Hi"), assistant("No")],
    },
    "ultrafeedback": {
        "prompt": "Hi",
        "chosen": [user("Hi"), assistant("Yo")],
        "rejected": [user("Hi"), assistant("No")],
        "messages": [user("Hi"), assistant("Yo")],
        "score_chosen": 8.0,
    },
    "sharegpt": {
        "conversations": [said("human", "Hi")],
        "chosen": said("gpt", "Yo"),
        "rejected": said("gpt", "No"),
    },
    "alpaca": {"instruction": "Hi", "input": "", "chosen": "Yo", "rejected": "No"},
    "messages": {"messages": [user("Hi")], "chosen": assistant("Yo"), "rejected": assistant("No")},
    "distilabel": {
        "instruction": "Hi",
        "chosen": [user("Hi"), assistant("Yo")],
        "rejected": [user("Hi"), assistant("No")],
    },
    "sharegpt-texts": {"conversations": [said("human", "Hi")], "chosen": "Yo", "rejected": "No"},
}
TEXTS = {"prompt": "2+2=", "chosen": "4", "rejected": "22"}


def normalize(record: dict[str, Any], **settings: Any) -> tuple[CorpusKind | None, dict[str, Any]]:
    made = FormatSettings(**settings)
    normalizer = Normalizer(Format.auto, made, KeyAccount(document_keys(made)))
    row = normalizer.row(record)
    return normalizer.kind, row


def turns(text: str) -> list[tuple[str, str, bool]]:
    return [(turn["role"], turn["content"], turn["train"]) for turn in json.loads(text)]


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_data_sets_are_one_pair(form: str) -> None:
    _, row = normalize(FORMS[form])
    assert turns(row["messages"]) == [("user", "Hi", False), ("assistant", "Yo", True)]
    assert turns(row["rejected"]) == [("user", "Hi", False), ("assistant", "No", True)]


def test_every_pair_of_the_page_is_one() -> None:
    page = (book_root() / "docs" / "preferences.md").read_text(encoding="utf-8")
    examples = re.findall(r"```json\n(.*?)\n```", page)
    kinds = [normalize(json.loads(example))[0] for example in examples]
    assert kinds == [CorpusKind.conversation_pair] * 3 + [CorpusKind.text_pair]


def test_common_answers_are_part_of_a_whole_conversations_prompt() -> None:
    begun = [user("Hi"), assistant("Yo"), user("Why?")]
    _, row = normalize({"chosen": [*begun, assistant("So")], "rejected": [*begun, assistant("Because")]})
    assert [trained for *_, trained in turns(row["messages"])] == [False, False, False, True]
    assert turns(row["rejected"])[-1] == ("assistant", "Because", True)


def test_tools_and_system_prompts_are_of_both_sides() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    _, row = normalize({**FORMS["turns"], "tools": [tool]}, system_prompt="Be brief.")
    assert json.loads(row["tools"])[0]["function"]["name"] == "f"
    for side in ("messages", "rejected"):
        assert turns(row[side])[0] == ("system", "Be brief.", False)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({**FORMS["turns"], "rejected": [assistant("Yo")]}, "are the same"),
        ({**TEXTS, "rejected": "4"}, "are the same"),
        ({**TEXTS, "chosen": "  "}, "'chosen' is empty"),
        ({**FORMS["turns"], "chosen": [assistant("")]}, "'chosen': .* is empty"),
        ({"chosen": [user("Hi"), assistant("Yo")], "rejected": [user("Ho"), assistant("No")]}, "there is no prompt"),
        ({"system": "Be brief.", "question": "Hi", "chosen": "Yo", "rejected": "No"}, "there is no prompt.*question"),
        ({**FORMS["turns"], "rejected": 5}, "^'rejected' is a JSON number where"),
        ({**FORMS["whole"], "prompt": "Ho"}, "'prompt' is a text, and no turn"),
        ({**FORMS["whole"], "rejected": [user("Hi")]}, "'rejected' has no turn of the assistant"),
        ({**FORMS["turns"], "rejected": FORMS["whole"]["rejected"]}, "'rejected' begins with a turn of the user"),
        ({**FORMS["whole"], "prompt": [user("Ho")]}, "'chosen' begins with a turn of the user"),
        ({**TEXTS, "tools": [{"name": "f"}]}, "'tools' goes with turns"),
        ({**FORMS["messages"], "messages": [user("Hi"), assistant("Yo")]}, "'messages' ends with the answer"),
        ({**FORMS["whole"], "conversations": FORMS["whole"]["chosen"]}, "ignore_keys=.conversations"),
        ({**FORMS["sharegpt"], "prompt": [user("Hi")]}, "two places, prompt and conversations"),
        ({"prompt": "a", "chosen": "b"}, "its format is not known"),
    ],
)
def test_pairs_that_cannot_be_trained_on(record: dict[str, Any], message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        normalize(record)


def test_pairs_of_one_prompt_stay_together() -> None:
    one, other = normalize(FORMS["turns"])[1], normalize({**FORMS["turns"], "rejected": [assistant("Nope")]})[1]
    third = normalize({**FORMS["turns"], "prompt": [user("Ho")]})[1]
    hashes = [content_hash(row, CorpusKind.conversation_pair) for row in (one, other, third)]
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.fixture
def prepare_pairs(run_config: Callable[..., schema.RunConfig], tmp_path: Path) -> Callable[..., Prepared]:
    """Prepare pairs, each written as a line, for method=dpo."""

    def make(records: list[dict[str, Any]], max_length: int = 64, **dataset: Any) -> Prepared:
        config = run_config([], max_length, **dataset)
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return prepare(replace(config, method=schema.DpoConfig(name="dpo")))

    return make


def test_a_pair_is_one_document_of_two_sides(prepare_pairs: Callable[..., Prepared]) -> None:
    """A token is a byte or a special token; `<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n` is 21."""
    prepared = prepare_pairs([{**FORMS["turns"], "rejected": [assistant("Nope")]}])
    (row,) = prepared.train.load().to_list()
    assert (row["chosen_length"], row["length"]) == (25, 25 + 27)
    sides = [slice(25), slice(25, None)]
    for side, num_trained in zip(sides, (3, 5), strict=True):  # with the token that ends the turn
        ids, labels = row["input_ids"][side], row["labels"][side]
        assert labels == [-100] * 21 + ids[21 : 21 + num_trained] + [-100]
    counts = prepared.train.counts
    assert (prepared.unit, counts.num_documents, counts.num_trained_tokens) == ("pair", 1, 8)


def test_texts_are_tokenized_as_prompt_and_completion(prepare_pairs: Callable[..., Prepared]) -> None:
    prepared = prepare_pairs([TEXTS])
    assert any("no chat template is used" in note for note in prepared.notes)
    (row,) = prepared.train.load().to_list()
    assert (row["chosen_length"], row["length"]) == (6, 13)  # 4 bytes of the prompt, answer and EOS
    assert [label == -100 for label in row["labels"]] == [True] * 4 + [False] * 2 + [True] * 4 + [False] * 3


def test_sides_are_cut_and_dropped_with_a_reason(prepare_pairs: Callable[..., Prepared]) -> None:
    records = [
        TEXTS,
        {**TEXTS, "rejected": "5" * 20},  # cut
        {"prompt": "12345678", "chosen": "a", "rejected": "b"},  # nothing is left to train on
        {"prompt": "1", "chosen": "1234567890a", "rejected": "1234567890b"},  # equal once they are cut
    ]
    counts = prepare_pairs(records, max_length=8).train.counts
    assert (counts.num_read, counts.num_documents, counts.num_cut, counts.num_answers_cut) == (4, 2, 3, 1)
    assert dict(counts.dropped) == {NOTHING_TRAINED: 1, EQUAL: 1}
    dropped = prepare_pairs(records, max_length=8, overlong=Overlong.drop).train.counts
    assert (dropped.num_documents, dict(dropped.dropped)) == (1, {TOO_LONG: 3})
    with pytest.raises(DataError, match="overlong=cut or drop") as caught:
        prepare_pairs(records, max_length=8, overlong=Overlong.refuse)
    assert caught.value.problem_id == "document-too-long"


def test_answers_that_the_template_makes_equal_are_dropped(
    run_config: Callable[..., schema.RunConfig], tmp_path: Path
) -> None:
    config, template = run_config([]), tmp_path / "trim.jinja"
    template.write_text(
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{{ message.content | trim }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    records = [FORMS["turns"], {**FORMS["turns"], "rejected": [assistant("Yo ")]}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    model = replace(config.model, chat_template=str(template))
    counts = prepare(replace(config, model=model, method=schema.DpoConfig(name="dpo"))).train.counts
    assert (counts.num_read, counts.num_documents, dict(counts.dropped)) == (2, 1, {EQUAL: 1})


def test_bad_pairs_are_named_by_line_or_left_out(prepare_pairs: Callable[..., Prepared]) -> None:
    records = [TEXTS, {**TEXTS, "chosen": TEXTS["rejected"]}, TEXTS]
    with pytest.raises(DataError, match="line 2: 'chosen' and 'rejected' are the same"):
        prepare_pairs(records)
    counts = prepare_pairs(records, bad_documents=BadDocuments.skip, max_bad_share=0.5).train.counts
    assert (counts.num_documents, counts.skipped.reasons.total()) == (2, 1)


def test_each_method_refuses_the_others_data(
    run_config: Callable[..., schema.RunConfig], prepare_pairs: Callable[..., Prepared], tmp_path: Path
) -> None:
    documents = run_config([[("user", "Hi"), ("assistant", "Yo")]])
    prepare(documents)
    with pytest.raises(DataError, match="type method=sft") as caught:  # found prepared, or not
        prepare(replace(documents, method=schema.DpoConfig(name="dpo")))
    assert (caught.value.problem_id, caught.value.exit_code) == ("data-for-another-method", 4)
    made = replace(
        documents.dataset, source=Source.synthetic, synthetic=schema.SyntheticConfig(num_documents=9, max_tokens=60)
    )
    model = schema.ModelConfig(name="me/mine", facts=schema.ModelFacts(vocab_size=500))
    with pytest.raises(DataError, match="pairs=true"):
        prepare(replace(documents, model=model, dataset=made, method=schema.DpoConfig(name="dpo")))
    prepare_pairs([TEXTS])
    with pytest.raises(DataError, match="type method=dpo"):
        prepare(documents)


def test_both_sides_are_shown(prepare_pairs: Callable[..., Prepared], tmp_path: Path) -> None:
    prepared = prepare_pairs([FORMS["turns"]])
    output = io.StringIO()
    tokenizer = load_tokenizer(schema.ModelConfig(path=str(tmp_path / "model")), is_padded=True)
    show_prepared(prepared, tokenizer, Console(file=output, width=100), 1)
    shown = output.getvalue()
    assert "1 pair of 50 tokens" in shown
    assert shown.index("chosen:") < shown.index("[[Yo<|im_end|>]]") < shown.index("rejected:")
    assert shown.index("rejected:") < shown.index("[[No<|im_end|>]]")
    write_page(prepared, tokenizer, tmp_path / "page.html", 1)
    page = (tmp_path / "page.html").read_text()
    assert page.index("<h3>chosen</h3>") < page.index("Yo") < page.index("<h3>rejected</h3>") < page.index("No&lt;")
