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


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl"])  # the second may have packed rows, if asked for
def test_auto_chooses_again_where_the_data_turns_out_to_have_images(family: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / family, FAMILIES[family], has_weights=False, template=f"trl:{family}_training")
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
    if family == "gemma3":
        with pytest.raises(RequestError) as caught:
            plan_job(None, [*words, "packing=isolated"], [])
        assert caught.value.problem_id == "images-packed"
    else:
        assert plan_job(None, [*words, "packing=isolated"], []).config.packing.mode is PackingMode.isolated


def _asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": "It is a number."}]
