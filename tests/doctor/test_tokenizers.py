"""The findings about faulty tokenizers and templates on disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tunebook.config.schema import RunConfig
from tunebook.doctor.findings import Finding, Level
from tunebook.doctor.probes import Probe, read_tokenizer
from tunebook.doctor.tokenizers import check_tokenizer

from .conftest import only, resolved

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart" / "model"
BOS = "<|endoftext|>"  # a token that the quickstart's vocabulary has
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """The quickstart with its own copy of the tokenizer in `model.path`."""
    folder = tmp_path / "model"
    shutil.copytree(QUICKSTART, folder)
    return resolved("quickstart", f"model.path={folder}")


def folder_of(config: RunConfig) -> Path:
    assert config.model.path is not None
    return Path(config.model.path)


def set_tokenizer(config: RunConfig, **values: Any) -> None:
    file = folder_of(config) / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings.update(values)
    file.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))


def set_template(config: RunConfig, text: str | None) -> None:
    file = folder_of(config) / "chat_template.jinja"
    file.unlink()
    if text is not None:
        file.write_text(text.replace("IS_EARLIER", "message.role == 'assistant' and not loop.last"))


def add_bos(config: RunConfig) -> None:
    """Let the tokenizer add a BOS token to every text."""
    set_tokenizer(config, bos_token=BOS)
    file = folder_of(config) / "tokenizer.json"
    content = json.loads(file.read_text())
    token = next(entry for entry in content["added_tokens"] if entry["content"] == BOS)
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": BOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {BOS: {"id": BOS, "ids": [token["id"]], "tokens": [BOS]}},
    }
    file.write_text(json.dumps(content))


def look(config: RunConfig) -> list[Finding]:
    return check_tokenizer(config, Probe(facts=read_tokenizer(config)))


def test_one_without_fault(config: RunConfig) -> None:
    findings = look(config)
    assert [(finding.id, finding.level) for finding in findings] == [
        ("tokenizer", Level.ok), ("tokenizer-template", Level.ok), ("tokenizer-adds-bos", Level.ok),
    ]  # fmt: skip
    assert "marks the assistant's text with {% generation %}" in only(findings, "tokenizer-template").what


def test_no_end_of_text(config: RunConfig) -> None:
    set_tokenizer(config, eos_token=None, tokenizer_class="PreTrainedTokenizerFast")
    (folder_of(config) / "config.json").unlink()  # Qwen2's own class has a default
    (found,) = look(config)
    assert (found.id, found.level, found.fix) == ("tokenizer-no-eos", Level.error, "tunebook explain tokenizer-no-eos")
    assert "model.eos_token=" in found.what


def test_a_template_without_markers_whose_answers_are_found(config: RunConfig) -> None:
    set_template(config, CHATML)
    found = only(look(config), "tokenizer-template")
    assert (found.level, found.data) == (Level.ok, {"is_marked": False, "num_answers": 2, "num_found": 2})
    assert "found by comparing" in found.what


def test_a_template_that_rewrites_earlier_answers(config: RunConfig) -> None:
    set_template(config, CHATML.replace("{{ message.content }}", "{{ '...' if IS_EARLIER }}{{ message.content }}"))
    found = only(look(config), "tokenizer-template")
    assert (found.level, found.data["num_found"]) == (Level.warning, 1)
    assert "{% generation %}" in found.fix


def test_a_template_that_leaves_out_earlier_answers(config: RunConfig) -> None:
    set_template(config, CHATML.replace("{{ message.content }}", "{{ '...' if IS_EARLIER else message.content }}"))
    assert only(look(config), "template-leaves-out").level is Level.error


def test_a_template_that_never_ends_a_turn(config: RunConfig) -> None:
    set_template(config, CHATML.replace("<|im_end|>", ""))
    found = only(look(config), "eos-not-trained")
    assert found.level is Level.error


def test_a_template_that_is_no_jinja(config: RunConfig) -> None:
    set_template(config, "{% for message in messages %}")
    assert only(look(config), "chat-template-broken").level is Level.error


def test_no_template(config: RunConfig) -> None:
    set_template(config, None)
    assert only(look(config), "tokenizer-template").level is Level.warning
    config.dataset.format = type(config.dataset.format).text
    assert only(look(config), "tokenizer-template").level is Level.ok


def test_template_and_tokenizer_each_with_a_bos(config: RunConfig) -> None:
    add_bos(config)
    set_template(config, "{{ bos_token }}" + CHATML)
    found = only(look(config), "tokenizer-adds-bos")
    assert (found.level, found.data) == (Level.warning, {"leading_bos": 1, "leading_bos_if_added": 2})
    assert "add_special_tokens=False" in found.fix


def test_a_tokenizer_alone_with_a_bos(config: RunConfig) -> None:
    add_bos(config)
    found = only(look(config), "tokenizer-adds-bos")
    assert (found.level, found.data) == (Level.ok, {"leading_bos": 0, "leading_bos_if_added": 1})


def test_a_template_with_two(config: RunConfig) -> None:
    add_bos(config)
    set_template(config, "{{ bos_token }}{{ bos_token }}" + CHATML)
    assert only(look(config), "bos-doubled").level is Level.error


def test_a_folder_that_is_not_there_is_an_error(config: RunConfig) -> None:
    config.model.path = "/there/is/no/such/folder"
    assert only(look(config), "tokenizer-not-found").level is Level.error


def test_a_hub_model_that_is_not_on_this_machine_is_not_looked_at(config: RunConfig) -> None:
    config.model.path, config.model.name = None, "some-organization/some-model"
    (found,) = look(config)
    assert (found.id, found.level) == ("tokenizer", Level.ok)
    assert "some-organization/some-model is not on this machine" in found.what


def test_a_probe_that_hung(config: RunConfig) -> None:
    (found,) = check_tokenizer(config, Probe(facts=None, problem="no answer within 120 s"))
    assert (found.level, "no answer within 120 s" in found.what) == (Level.error, True)
