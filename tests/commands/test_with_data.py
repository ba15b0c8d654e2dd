"""Images that only the preparation finds: what `auto` chose is chosen again, and what was typed is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.image_models import FAMILIES, draw_image, write_model
from tunebook.commands.job import plan_job
from tunebook.commands.train import with_data
from tunebook.config.choices import PackingMode
from tunebook.errors import RequestError


def test_auto_chooses_again_where_the_data_turns_out_to_have_images(tmp_path: Path) -> None:
    model = write_model(tmp_path / "gemma3", FAMILIES["gemma3"], has_weights=False, template="trl:gemma3_training")
    draw_image(0, 30, 30).save(tmp_path / "a.png")
    texts = [{"messages": _asked(f"What is {number}?")} for number in range(30)]
    documents = [*texts, {"messages": _asked("<image>What?"), "images": ["a.png"]}]
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    words = [f"model={model}", "model.weights=random", f"dataset.path={data}", "hardware=cpu"]
    job = plan_job(None, words, [])
    assert job.config.packing.mode is PackingMode.isolated
    again, prepared = with_data(job, Console(quiet=True))
    assert prepared.has_images and again.config.packing.mode is PackingMode.padded
    with pytest.raises(RequestError) as caught:
        with_data(plan_job(None, [*words, "packing=isolated"], []), Console(quiet=True))
    assert caught.value.problem_id == "images-packed"


def _asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": "It is a number."}]
