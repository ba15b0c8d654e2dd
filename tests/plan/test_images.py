"""The images of a planned run: from the first documents or assumed, their tokens and time, and what is refused."""

from __future__ import annotations

import json
import shutil
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from tests.image_models import FAMILIES, draw_image, write_model
from tunebook.data.batch import solve_batch
from tunebook.data.sources import first_images
from tunebook.hardware.detect import Machine
from tunebook.plan.draft import Draft, draft_run
from tunebook.plan.images import planned_images
from tunebook.plan.memory.activations import image_cost, images_of_a_pass, shape_of
from tunebook.plan.show import images_text
from tunebook.plan.speed import TOWER_SHARE, plan_time

MACHINE = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0)
TURNS = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "A cat."}]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "qwen", FAMILIES["qwen2_5_vl"], has_weights=False)


@pytest.fixture
def draft(tmp_path: Path, qwen: Path) -> Any:
    """The plan of documents with images of these sizes for the tiny Qwen2.5-VL, or another model."""

    def make(documents: list[list[tuple[int, int]]], *words: str, model: Path | str = qwen) -> Draft:
        lines = []
        for number, sizes in enumerate(documents):
            for place, size in enumerate(sizes):
                draw_image(0, *size).save(tmp_path / f"{number}-{place}.png")
            names = [f"{number}-{place}.png" for place in range(len(sizes))]
            question = {"role": "user", "content": "<image>" * len(names) + "What?"}
            lines.append(json.dumps({"messages": [question, TURNS[1]], "images": names}))
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        file.write_text("\n".join(lines))
        data = ["dataset=file", f"dataset.path={file}"]
        source = f"model.path={model}" if isinstance(model, Path) else f"model={model}"
        fixed = ["training.global_samples=4", "training.max_length=64", "packing=padded"]
        overrides = [*data, source, *fixed, "model.weights=random", "hardware=hopper", "training.micro_batch_size=2"]
        keys = {word.partition("=")[0] for word in words}
        overrides = [word for word in overrides if word.partition("=")[0] not in keys]
        return draft_run(None, [*overrides, *words], [], MACHINE)

    return make


def test_the_first_documents_say_what_a_row_holds(draft: Any) -> None:
    made = draft([[(56, 28)], [(84, 56), (28, 28)], []])
    made.raise_errors()
    images = planned_images(made.config)
    assert images is not None
    assert (images.number, images.size, images.is_assumed) == (2, (84, 56), False)
    pixels = 56 * 28 + 84 * 56 + 28 * 28
    assert images.mean_number == pytest.approx(pixels / (84 * 56) / 3)
    assert image_cost(made.config, images).tokens == 3 * 2  # of 28 x 28 pixels
    assert shape_of(made.config) == (2, 64) and images_of_a_pass(made.config) == 2 * 2
    made.config.training.max_length = 11  # holds one of them
    made.config.packing.row_length = 11
    assert images_of_a_pass(made.config) == 2 * 1
    assert "leaves 1 of them" in str(images_text(made.config))


def test_an_image_of_proportions_that_the_model_refuses_is_planned_as_a_square(draft: Any) -> None:
    made = draft([[(280 * 28, 28)], [(28, 28)]])
    made.raise_errors()
    images = planned_images(made.config)
    assert images is not None and image_cost(made.config, images).tokens == 9  # 84 x 84 pixels, the most it takes


def test_images_are_planned_as_they_are_scaled_down(draft: Any) -> None:
    made = draft([[(112, 112)]], f"dataset.max_image_pixels={56 * 56}")
    images = planned_images(made.config)
    assert images is not None and images.size == (56, 56)
    assert image_cost(made.config, images).tokens == 4


def test_without_data_an_image_is_assumed_if_images_are_announced(draft: Any) -> None:
    nowhere = "dataset.path=/nowhere/train.jsonl"
    assumed = planned_images(draft([], nowhere, "model.train=[language,projector]").config)
    assert assumed is not None and assumed.is_assumed and (assumed.number, assumed.size) == (1, (1024, 1024))
    text = draft([], nowhere)
    assert planned_images(text.config) is None and images_text(text.config) is not None


def test_documents_without_images_are_planned_as_text(draft: Any) -> None:
    made = draft([[], []])
    assert planned_images(made.config) is None and images_text(made.config) is None


def test_memory_and_time_count_the_images(draft: Any) -> None:
    with_images, text = draft([[(84, 56)]]), draft([[]])
    assert with_images.memory.parts["activations"] > text.memory.parts["activations"]
    images, config = planned_images(with_images.config), with_images.config
    assert images is not None
    batch = solve_batch(config, None)
    fast, slow = plan_time(text.config, batch), plan_time(config, batch)
    seconds = image_cost(config, images).flops / 64 / (TOWER_SHARE * 989e12)  # of a token of a full row
    assert slow.tokens_per_second == pytest.approx(1 / (1 / fast.tokens_per_second + seconds))


@pytest.mark.parametrize("parts", ["language", "language,vision,projector"])
def test_blocks_of_text_are_compiled_beside_a_tower(parts: str, draft: Any) -> None:
    words = ([[(84, 56)]], f"model.train=[{parts}]")
    compiled, eager = draft(*words, "model.compile_layers=true"), draft(*words)
    compiled.raise_errors()
    assert 0 < compiled.memory.parts["activations"] < eager.memory.parts["activations"]


@pytest.mark.parametrize(
    ("words", "model", "problem_id"),
    [
        ([], "qwen25_05b", "model-without-images"),
        (["packing=isolated"], "gemma3_4b", "images-packed"),
    ],
)
def test_the_plan_refuses_what_the_preparation_refuses(
    words: list[str], model: str, problem_id: str, draft: Any
) -> None:
    made = draft([[(28, 28)]], *words, model=model)
    assert made.error is not None and (made.error.problem_id, made.exit_code) == (problem_id, 2)


@pytest.mark.parametrize("settings", ["{", "[1]", '{"image_processor_type": "NoImageProcessor"}'])
def test_a_broken_processor_is_named(settings: str, draft: Any, qwen: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(qwen, folder)
    (folder / "preprocessor_config.json").write_text(settings)
    made = draft([[(28, 28)]], model=folder)
    assert made.error is not None and made.error.problem_id == "model-without-images"
    assert str(folder) in made.error.message


@pytest.mark.parametrize(
    ("kind", "name", "keys", "value"),
    [
        ("qwen3_vl", "preprocessor_config.json", ["patch_size"], "16"),
        ("qwen3_vl", "processor_config.json", ["image_processor", "merge_size"], 0),
        ("smolvlm", "processor_config.json", ["image_seq_len"], None),
    ],
)
def test_a_processor_with_a_setting_of_a_wrong_type_is_refused(
    kind: str, name: str, keys: list[str], value: Any, draft: Any, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "broken", FAMILIES[kind], has_weights=False)
    images = json.loads((folder / "preprocessor_config.json").read_text())
    stated = json.loads((folder / name).read_text()) | ({"image_processor": images} if len(keys) > 1 else {})
    reduce(lambda settings, key: settings[key], keys[:-1], stated)[keys[-1]] = value
    (folder / name).write_text(json.dumps(stated))
    made = draft([[(28, 28)]], model=folder)
    assert made.error is not None and made.error.problem_id == "model-without-images"
    assert f"{folder} has no processor" in made.error.message


def test_an_image_that_cannot_be_read_is_still_one(draft: Any, tmp_path: Path) -> None:
    made = draft([[(28, 28)]])
    file = Path(made.config.dataset.path)
    file.write_text(file.read_text().replace("0-0.png", "nowhere.png"))
    first = first_images(made.config.dataset)
    assert first is not None and first.are_there and first.sizes == []
