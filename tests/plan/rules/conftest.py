"""Models in folders, whose config.json the rules read, and documents with images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

# What the config.json of some models says, each in a folder of this name.
MODELS = {
    "masked": {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
    "gptq": {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}},
    "four_bit": {"model_type": "llama", "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
}


@pytest.fixture(autouse=True)
def in_a_folder_with_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder of each test."""
    for name, config in MODELS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    turns = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "A cat."}]
    (tmp_path / "images.jsonl").write_text(json.dumps({"messages": turns, "images": ["a.png"]}))
    monkeypatch.chdir(tmp_path)
