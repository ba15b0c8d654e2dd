"""The model card: a header that the hub reads, and only what the run has recorded of these very weights."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from tunebook.checkpoint.export.card import ExportOrigin
from tunebook.checkpoint.export.card import card as make_card
from tunebook.config.frozen import config_to_yaml, load_config
from tunebook.config.model_facts import facts_of_hub_name
from tunebook.evaluate.target import bare_config, find_target
from tunebook.model.load import load_architecture
from tunebook.record.model_origin import origin_of
from tunebook.record.run_record import read_run


def task(value: float) -> dict[str, Any]:
    return {"metric": "exact_match", "value": value, "stderr": 0.01, "num_items": 100}


def write_evaluation(run: Path, when: str, model: str, value: float) -> None:
    folder = run / "evaluation"
    folder.mkdir(exist_ok=True)
    record = {"when": when, "model": model, "tasks": {"words": task(value)}, "limit": None, "harness_version": "0.4"}
    (folder / f"{when}.json").write_text(json.dumps(record))


@pytest.fixture
def card(run: Path) -> Any:
    """The text of the card of an export of some step and source."""

    def text(step: int, source: str = "", *, run: Path = run, is_adapter: bool = False) -> str:
        recorded = origin_of(run)
        assert recorded is not None
        origin = ExportOrigin(
            **asdict(recorded), dtype="bf16", num_parameters=50_000, is_exact=False, stored_as="whole safetensors",
            source=source or f"checkpoints/checkpoint-{step}", step=step, base_keywords={}, is_adapter=is_adapter,
            is_merged=False, files_sha256={},
        )  # fmt: skip
        return make_card(origin, load_config(run / "run.yaml"), read_run(run))

    return text


def write_losses(run: Path, validation: tuple[float, ...] = ()) -> None:
    lines: list[dict[str, Any]] = [{"step": step, "loss": 4.0 - step} for step in (1, 2, 3)]
    lines += [{"step": step, "validation_loss": loss} for step, loss in enumerate(validation, start=1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_header_and_table_of_the_run(card: Any, run: Path) -> None:
    write_losses(run)
    write_evaluation(run, "before", "base", 0.1)
    write_evaluation(run, "after", "model", 0.9)  # of step 3
    text = card(2)
    header = yaml.safe_load(text.split("---")[1])
    assert header == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["tunebook", "sft"]}
    assert "# A tiny run" in text
    assert "| loss | 3.0000 at step 1, 2.0000 at step 2 |" in text  # not what came after these weights
    assert "| exported from | checkpoints/checkpoint-2 (whole safetensors) |" in text
    assert "| checked | loaded again, it equals the checkpoint rounded to bf16 |" in text
    assert str(run.parent) not in text  # no paths of this machine
    assert "No evaluation of these weights is recorded." in text
    assert "supervised fine-tuning of tiny, 50,000 numbers in bf16." in text
    (run / "run.yaml").write_text((run / "run.yaml").read_text().replace("weights: pretrained", "weights: random"))
    assert "supervised fine-tuning of the architecture of tiny with random weights" in card(2)


def test_the_best_model_is_of_its_own_step_and_loss(layouts: Any, card: Any, run: Path) -> None:
    write_losses(run, validation=(9.0, 7.0, 8.0))
    layouts.change_manifest(run, status={"best_step": 2})
    write_evaluation(run, "before", "base", 0.1)
    write_evaluation(run, "after", "model", 0.9)
    text = card(2, "model")
    assert "| validation loss | 9.0000 at step 1, 7.0000 at step 2 |" in text
    assert "0.9 ± 0.01" in text
    assert "No evaluation of these weights is recorded." in card(3)  # what was evaluated is the best


def test_evaluations_of_these_weights_only(card: Any, run: Path) -> None:
    write_evaluation(run, "before", "base", 0.1)
    write_evaluation(run, "after", "model", 0.9)
    write_evaluation(run, "eval-1", "checkpoints/checkpoint-2", 0.5)
    assert "| words | exact_match | 100 | 0.1 ± 0.01 | 0.9 ± 0.01 |" in card(3)
    assert "| words | exact_match | 100 | 0.1 ± 0.01 | 0.5 ± 0.01 |" in card(2)


def test_an_adapters_card_says_how_to_load_it(card: Any, lora_run: Path) -> None:
    text = card(3, run=lora_run, is_adapter=True)
    assert yaml.safe_load(text.split("---")[1])["library_name"] == "peft"
    assert "AutoPeftModelForCausalLM.from_pretrained(folder)" in text
    assert "| lora | rank 4, alpha 8 |" in text


def test_a_card_of_a_model_for_images_loads_its_class(card: Any, lora_run: Path) -> None:
    file = lora_run / "run.yaml"
    config = load_config(file)
    facts = facts_of_hub_name("Qwen/Qwen2.5-VL-3B-Instruct")
    file.write_text(config_to_yaml(replace(config, model=replace(config.model, facts=facts))))
    text = card(3, run=lora_run, is_adapter=True)
    assert "base = AutoModelForImageTextToText.from_pretrained(" in text
    assert "PeftModel.from_pretrained(base, folder)" in text and "CausalLM" not in text
    whole = card(3, run=lora_run)
    assert "AutoModelForImageTextToText.from_pretrained(folder)" in whole
    assert "AutoProcessor.from_pretrained(folder)" in whole and "photo.jpg" in whole
    assert yaml.safe_load(whole.split("---")[1])["pipeline_tag"] == "image-text-to-text"


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # PEFT asks transformers for it
def test_the_base_of_an_adapter_is_loaded_with_the_stretched_positions_of_its_training(
    layouts: Any, lora_run: Path, export: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = lora_run / "run.yaml"
    file.write_text(file.read_text().replace("yarn_factor: null", "yarn_factor: 4.0"))
    layouts.write_checkpoint(lora_run, "adapter")
    adapter, merged = (export(lora_run, to=tmp_path / name, merge=name == "merged").folder for name in ("a", "merged"))
    text = (adapter / "README.md").read_text()
    assert "stretched 4 times by YaRN" in text
    used: dict[str, Any] = {}
    monkeypatch.chdir(adapter)
    exec(text.split("```python\n")[1].split("inputs =")[0], used)
    ids = torch.arange(3, 600).remainder(300)[None]
    loaded = AutoModelForCausalLM.from_pretrained(merged)
    assert loaded.config.rope_parameters == used["model"].config.rope_parameters
    assert loaded.config.rope_parameters["factor"] == 4 and loaded.config.max_position_embeddings == 4096
    with torch.no_grad():
        torch.testing.assert_close(used["model"](ids).logits, loaded(ids).logits, rtol=1e-2, atol=1e-2)
    for folder in (adapter, merged):
        target = find_target(str(folder), lora_run.parent, is_model=True)
        config = bare_config(target)
        assert load_architecture(config.model).rope_parameters == loaded.config.rope_parameters
