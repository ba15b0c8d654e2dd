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
from tunebook.errors import DataError
from tunebook.model.tokenizer import tokenizer_hash
from tunebook.model.weight_files import weights_fingerprint
from tunebook.record.manifest import start_manifest, system_prompt_hash
from tunebook.record.model_origin import (
    ORIGIN_FILE,
    Origin,
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


def test_a_difference_is_an_error(trained: Origin, tokenizer: PreTrainedTokenizerBase) -> None:
    unchanged = check_bound(trained, tokenizer, PROMPT)
    hashes = ("tokenizer_sha256", "chat_template_sha256", "system_prompt_sha256")
    recorded = {name: getattr(trained, name) for name in hashes}
    assert unchanged == {"to": "tiny/now", **recorded}
    other_template, other_tokens = copy.deepcopy(tokenizer), copy.deepcopy(tokenizer)
    other_template.chat_template += "\n"
    other_tokens.add_tokens(["zebra"])
    for problem_id, changed, prompt in (
        ("template-changed", other_template, PROMPT),
        ("tokenizer-changed", other_tokens, PROMPT),
        ("system-prompt-changed", tokenizer, None),
    ):
        with pytest.raises(DataError) as raised:
            check_bound(trained, changed, prompt)
        assert raised.value.problem_id == problem_id
    assert check_bound(origin(), tokenizer, None)["to"] == "tiny/now"  # nothing was recorded
    assert check_bound(None, tokenizer, PROMPT)["to"] is None


def test_padding_token_of_the_trainer_is_no_difference(trained: Origin, tokenizer: PreTrainedTokenizerBase) -> None:
    without: Any = copy.deepcopy(tokenizer)
    without.pad_token = None
    recorded = origin(tokenizer_sha256=tokenizer_hash(without))
    before = tokenizer.pad_token
    assert before is not None
    assert check_bound(recorded, tokenizer, None)["tokenizer_sha256"] == recorded.tokenizer_sha256
    assert tokenizer.pad_token == before


def test_a_different_base_is_an_error_unless_it_was_not_recorded(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    base = ModelConfig(path=str(tmp_path))
    trained = origin(weights_fingerprint="1" * 64)
    with pytest.raises(DataError) as raised:
        check_base(trained, base)
    assert raised.value.problem_id == "base-changed"
    for recorded in (origin(weights_fingerprint=weights_fingerprint(base)), origin(), None):
        check_base(recorded, base)
    check_base(trained, ModelConfig(name="org/base"))  # on the hub


def test_an_exported_folder_says_what_its_run_recorded(tmp_path: Path, run_config: RunConfig) -> None:
    run = tmp_path / "example" / "2026-01-02T03-04-05Z"
    run.mkdir(parents=True)
    run_config.dataset.system_prompt = "Be short."
    (run / "run.yaml").write_text(config_to_yaml(run_config))
    manifest = start_manifest(run, run_config, world_size=1, command=["tunebook"], tokenizer_sha256="abc")
    assert read_origin(tmp_path) is None
    assert origin_of(tmp_path) is None
    written = origin_of(run)
    assert written is not None
    write_origin(tmp_path, written)
    assert written == read_origin(tmp_path)
    assert written.run == "example/2026-01-02T03-04-05Z"
    assert (written.recipe, written.system_prompt) == (manifest["recipe"], "Be short.")
    assert (written.tokenizer_sha256, written.chat_template_sha256) == ("abc", None)
    assert written.config_sha256 == manifest["config_sha256"]
    content = json.loads((tmp_path / ORIGIN_FILE).read_text()) | {"format": 2}
    (tmp_path / ORIGIN_FILE).write_text(json.dumps(content))
    with pytest.raises(DataError) as raised:
        read_origin(tmp_path)
    assert raised.value.problem_id == "broken-record"
