from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from tunebook.config.frozen import config_to_yaml
from tunebook.config.schema import ModelConfig, RunConfig
from tunebook.data.template import template_hash
from tunebook.errors import DataError, RequestError
from tunebook.model.tokenizer import tokenizer_hash
from tunebook.record import model_origin
from tunebook.record.manifest import start_manifest, system_prompt_hash
from tunebook.record.model_origin import (
    BASE,
    MISMATCHES,
    ORIGIN_FILE,
    Origin,
    allowed_mismatches,
    check_base,
    check_bound,
    origin_of,
    read_origin,
    write_origin,
)

PROMPT = "Answer in one word."


def origin(**changes: Any) -> Origin:
    recorded: dict[str, Any] = dict.fromkeys(("tokenizer_sha256", "chat_template_sha256", "system_prompt"))
    recorded["system_prompt_sha256"] = system_prompt_hash(None)
    return Origin(run="tiny/now", recipe=None, config_sha256="c", **recorded | changes)


@pytest.fixture
def trained(tokenizer: PreTrainedTokenizerBase) -> Origin:
    return origin(
        tokenizer_sha256=tokenizer_hash(tokenizer),
        chat_template_sha256=template_hash(tokenizer),
        system_prompt_sha256=system_prompt_hash(PROMPT),
    )


@pytest.fixture
def changed(tokenizer: PreTrainedTokenizerBase) -> dict[str, tuple[Any, str | None]]:
    """The tokenizer and the system prompt, with one of them changed."""
    other_template, other_tokens = copy.deepcopy(tokenizer), copy.deepcopy(tokenizer)
    other_template.chat_template += "\n"
    other_tokens.add_tokens(["zebra"])
    return {
        "template": (other_template, PROMPT),
        "tokenizer": (other_tokens, PROMPT),
        "system_prompt": (tokenizer, None),
    }


def test_unchanged_origin_has_no_differences(trained: Origin, tokenizer: PreTrainedTokenizerBase) -> None:
    assert check_bound(trained, tokenizer, PROMPT) == {
        "to": "tiny/now",
        "mismatches": [],
        "tokenizer_sha256": trained.tokenizer_sha256,
        "chat_template_sha256": trained.chat_template_sha256,
        "system_prompt_sha256": trained.system_prompt_sha256,
    }


@pytest.mark.parametrize("what", [name for name in MISMATCHES if name != BASE])
def test_difference_is_an_error_unless_allowed_and_is_recorded(
    trained: Origin, changed: dict[str, tuple[Any, str | None]], what: str
) -> None:
    tokenizer, prompt = changed[what]
    others = [name for name in MISMATCHES if name != what]
    with pytest.raises(DataError) as raised:
        check_bound(trained, tokenizer, prompt, others)
    assert raised.value.problem_id == f"{what.replace('_', '-')}-changed"
    bound = check_bound(trained, tokenizer, prompt, [what])
    assert bound["mismatches"] == [what]
    key = {"template": "chat_template"}.get(what, what) + "_sha256"
    assert bound[key] != getattr(trained, key)
    assert [bound[f"{name}_sha256"] for name in ("tokenizer", "chat_template", "system_prompt")].count(None) == 0


def test_padding_token_of_the_trainer_is_no_difference(trained: Origin, tokenizer: PreTrainedTokenizerBase) -> None:
    without: Any = copy.deepcopy(tokenizer)
    without.pad_token = None
    recorded = origin(tokenizer_sha256=tokenizer_hash(without))
    before = tokenizer.pad_token
    assert before is not None
    assert check_bound(recorded, tokenizer, None)["tokenizer_sha256"] == recorded.tokenizer_sha256
    assert tokenizer.pad_token == before


def test_what_was_not_recorded_is_not_compared(tokenizer: PreTrainedTokenizerBase) -> None:
    assert check_bound(origin(), tokenizer, None)["mismatches"] == []
    assert check_bound(None, tokenizer, PROMPT)["to"] is None


def test_what_may_differ_is_named_with_commas() -> None:
    assert allowed_mismatches("") == []
    assert allowed_mismatches("template, system_prompt") == ["template", "system_prompt"]
    with pytest.raises(RequestError, match=r"there is no 'templat'") as raised:
        allowed_mismatches("tokenizer,templat")
    assert raised.value.problem_id == "unknown-mismatch"


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    """A base model whose weights have the fingerprint `222...`."""
    monkeypatch.setattr(model_origin, "weights_fingerprint", lambda model: "2" * 64 if model.path else None)
    return ModelConfig(path="/models/base")


def test_different_base_is_an_error_unless_allowed_and_is_recorded(base: ModelConfig) -> None:
    trained = origin(weights_fingerprint="1" * 64)
    with pytest.raises(DataError) as raised:
        check_base(trained, base, [name for name in MISMATCHES if name != BASE])
    assert raised.value.problem_id == "base-changed"
    assert check_base(trained, base, [BASE]) == [BASE]


@pytest.mark.parametrize("recorded", ["2" * 64, None])
def test_unrecorded_base_is_not_compared(base: ModelConfig, recorded: str | None) -> None:
    assert check_base(origin(weights_fingerprint=recorded), base) == []
    assert check_base(None, base) == []
    assert check_base(origin(weights_fingerprint="1" * 64), ModelConfig(name="org/base")) == [], "on the hub"


@pytest.fixture
def run(tmp_path: Path, run_config: RunConfig) -> Path:
    folder = tmp_path / "example" / "2026-01-02T03-04-05Z"
    folder.mkdir(parents=True)
    run_config.dataset.system_prompt = "Be short."
    (folder / "run.yaml").write_text(config_to_yaml(run_config))
    start_manifest(folder, run_config, world_size=1, command=["tunebook"], tokenizer_sha256="abc")
    return folder


def test_an_exported_folder_says_what_its_run_recorded(run: Path, tmp_path: Path) -> None:
    exported = tmp_path / "exported"
    exported.mkdir()
    assert read_origin(exported) is None
    assert origin_of(exported) is None
    written = origin_of(run)
    assert written is not None
    write_origin(exported, written)
    manifest = json.loads((run / "manifest.json").read_text())
    assert written == read_origin(exported)
    assert written.run == "example/2026-01-02T03-04-05Z"
    assert (written.recipe, written.system_prompt) == (manifest["recipe"], "Be short.")
    assert (written.tokenizer_sha256, written.chat_template_sha256) == ("abc", None)
    assert written.config_sha256 == manifest["config_sha256"]


def test_another_format_is_an_error(run: Path, tmp_path: Path) -> None:
    written = origin_of(run)
    assert written is not None
    write_origin(tmp_path, written)
    content = json.loads((tmp_path / ORIGIN_FILE).read_text()) | {"format": 2}
    (tmp_path / ORIGIN_FILE).write_text(json.dumps(content))
    with pytest.raises(DataError) as raised:
        read_origin(tmp_path)
    assert raised.value.problem_id == "broken-record"
