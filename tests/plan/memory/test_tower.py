"""Towers for images in the fake step: the bytes of real ones on a CPU, and tokens and FLOPs worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.image_models import FAMILIES, write_model
from tunebook.config.choices import ModelPart, PeftMethod
from tunebook.config.schema import ModelConfig, PeftSettings
from tunebook.model.adapters import adapter_config, freeze_parts
from tunebook.model.parameters import count_parameters
from tunebook.plan.architecture import read_facts
from tunebook.plan.images import PlannedImages
from tunebook.plan.memory.activations import Mode
from tunebook.plan.memory.fake_step import FakeStep
from tunebook.plan.memory.ledger import Moment

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS, TOKENS, IMAGES = 2, 64, 2
MODE = Mode(weights="float32", adapters="float32", autocast=False, attention="eager", one_pass_head=False)
LANGUAGE, PROJECTOR, VISION = ModelPart.language, ModelPart.projector, ModelPart.vision


@pytest.fixture(params=FAMILIES)
def tiny(request, sound, tmp_path) -> Any:
    """A configuration with a tiny model of a family, the model's own config, and images of 84 x 56 pixels."""
    return _tiny(request.param, sound, tmp_path)


def _tiny(family: str, config: Any, folder: Any) -> Any:
    write_model(folder, FAMILIES[family], has_weights=False)
    model = ModelConfig(path=str(folder))
    config.model, config.peft.method = replace(model, facts=read_facts(model)), PeftMethod.full
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    images = PlannedImages(
        number=1, size=(84, 56), mean_number=1, is_assumed=False, processor=processor, folder=str(folder)
    )
    return config, AutoConfig.from_pretrained(folder), images


def _in_fake_step(config: Any, architecture: Any, images: Any, mode: Mode = MODE) -> Any:
    step = FakeStep(config, architecture, mode)
    features, _ = step.run_tower(images.inputs(1, torch.float32))
    return step.run(mode, ROWS, TOKENS, images.inputs(IMAGES, torch.float32), IMAGES * features).at


def _in_real_step(config: Any, architecture: Any, images: Any) -> int:
    """Bytes of pixels, of what the tower returns, and of all that autograd saves in a forward pass on a CPU."""
    attention = {"": "sdpa", "text_config": "eager"}
    model: Any = AutoModelForImageTextToText.from_config(architecture, attn_implementation=attention).train()
    freeze_parts(config, model)
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    found: dict[int, int] = {}
    returned: list[Any] = []

    def note(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    tower = model.model.get_image_features
    model.model.get_image_features = lambda *args, **kwargs: returned.append(tower(*args, **kwargs)) or returned[0]
    pixels = images.inputs(IMAGES, torch.float32)
    features = IMAGES * FakeStep(config, architecture, MODE).run_tower(images.inputs(1, torch.float32))[0]
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    ids.view(-1)[:features] = architecture.image_token_id
    types = {"token_type_ids": torch.zeros_like(ids)} if architecture.model_type == "gemma3" else {}
    places = torch.arange(TOKENS).expand(ROWS, TOKENS)
    with saved_tensors_hooks(note, lambda tensor: tensor):
        hidden = model.model(input_ids=ids, position_ids=places, use_cache=False, **types, **pixels).last_hidden_state
    for each in tree_leaves([list(pixels.values()), list(returned[0].values())]):
        if isinstance(each, torch.Tensor):
            note(each)
    assert hidden.requires_grad
    return sum(found.values())


def test_a_trained_tower_keeps_what_a_real_one_keeps(tiny):
    config, architecture, images = tiny
    planned, real = [], []
    for parts in ([LANGUAGE], [LANGUAGE, PROJECTOR], [LANGUAGE, VISION, PROJECTOR]):
        config.model.train = parts
        planned.append(_in_fake_step(config, architecture, images)[Moment.gather].live)
        real.append(_in_real_step(config, architecture, images))
    assert [each - planned[0] for each in planned] == [each - real[0] for each in real]
    assert planned[0] < planned[1] < planned[2]


def test_a_frozen_tower_keeps_pixels_and_features(sound, tmp_path):
    """Gemma 3: pixels (2, 3, 28, 28), 16 patches and 4 tokens of each image, 32 wide; and the types of the tokens."""
    config, architecture, images = _tiny("gemma3", sound, tmp_path)
    with_images = _in_fake_step(config, architecture, images)
    without = FakeStep(config, architecture, MODE).run(MODE, ROWS, TOKENS).at
    kept = with_images[Moment.gather].live - without[Moment.gather].live
    of_tokens = ROWS * TOKENS * (8 + 8 + 1)  # ids, types and the mask of images
    assert kept == 4 * IMAGES * (3 * 28 * 28 + 16 * 32 + 4 * 32) + of_tokens
    assert with_images[Moment.end].gradients == without[Moment.end].gradients


def test_a_projector_can_be_trained_alone(sound, tmp_path):
    """Its gradients, of 4 bytes, come through the frozen language model."""
    config, architecture, images = _tiny("gemma3", sound, tmp_path)
    config.model.train = [PROJECTOR]
    at = _in_fake_step(config, architecture, images, replace(MODE, autocast=True))
    assert at[Moment.sent].gradients == 4 * count_parameters(config, config.model.facts).trained


def test_a_recomputed_tower_keeps_less(sound, tmp_path):
    config, architecture, images = _tiny("qwen2_5_vl", sound, tmp_path)
    config.model.train = [LANGUAGE, VISION, PROJECTOR]
    kept = _in_fake_step(config, architecture, images)
    again = _in_fake_step(config, architecture, images, replace(MODE, recomputed=True))
    assert again[Moment.start].live < kept[Moment.start].live
    assert again[Moment.sent].gradients == kept[Moment.sent].gradients


def test_tokens_and_flops_of_an_image(tiny):
    """Products take 2 FLOPs for each number of a weight and patch, attention 4 for each pair and number of a head."""
    config, architecture, images = tiny
    features, flops = FakeStep(config, architecture, MODE).run_tower(images.inputs(1, torch.float32))
    # Patches of 14 or 16 pixels in squares of four; 4 tokens an image; 4 tiles and the whole image, 4 tokens each.
    expected = {"qwen2_5_vl": 3 * 2, "qwen3_vl": 3 * 2, "gemma3": 4, "smolvlm": 5 * 4}
    assert features == expected[architecture.model_type]
    if architecture.model_type == "gemma3":
        blocks = 2 * (2 * 16 * (4 * 32 * 32 + 2 * 32 * 48) + 4 * 16 * 16 * 32)
        assert flops == 2 * 16 * (3 * 7 * 7) * 32 + blocks + 2 * 4 * 32 * 32
    assert images.tokens(config) >= features


@pytest.mark.parametrize("targets", [[], ["fc1", "gate_proj", "linear_fc1"]])
@pytest.mark.parametrize("parts", [[LANGUAGE], [LANGUAGE, VISION], [VISION, PROJECTOR]], ids=str)
def test_trained_parameters_of_adapters_are_those_of_the_parts(tiny, parts, targets):
    config, architecture, _ = tiny
    config.model.train = parts
    config.peft = PeftSettings(method=PeftMethod.lora, target_modules=targets)
    adapted = get_peft_model(AutoModelForImageTextToText.from_config(architecture), adapter_config(config))
    assert count_parameters(config, config.model.facts).trained == adapted.get_nb_trainable_parameters()[0]


@pytest.mark.parametrize("parts", [[LANGUAGE], [PROJECTOR], [LANGUAGE, VISION], [VISION, PROJECTOR]], ids=str)
def test_trained_parameters_are_those_of_the_parts(tiny, parts):
    config, architecture, _ = tiny
    config.model.train = parts
    model = AutoModelForImageTextToText.from_config(architecture)
    freeze_parts(config, model)
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert count_parameters(config, config.model.facts).trained == trained
